"""The event log and the reader that follows it; the locked state folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.node import events
from atoll.node.events import EVENT_FILE, EventLog, EventTail, last_events, last_head_time, read_events
from atoll.protocol.errors import ResourceError, StateError, StateLocked
from atoll.protocol.statefolder import StateFolder, default_state, folder_error


def test_every_line_has_time_event_and_peer(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "deep" / EVENT_FILE, "12D3KooWx", clock=lambda: 12.34567)
    log.write("digest", round=3, digest=b"\x01\xff", loss=float("nan"))
    log.close()
    (line,) = (tmp_path / "deep" / EVENT_FILE).read_text().splitlines()
    assert json.loads(line) == {
        "t": 12.346,
        "event": "digest",
        "peer": "12D3KooWx",
        "round": 3,
        "digest": "01ff",
        "loss": None,
    }


def test_a_field_about_another_peer_does_not_change_whose_log_it_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENT_FILE, "me")
    log.write("refused", peer="them", reason="unsigned")
    log.close()
    (event,) = read_events(tmp_path / EVENT_FILE)
    assert (event["peer"], event["from"]) == ("me", "them")


def test_echo_sees_events_even_without_a_file() -> None:
    seen: list[dict[str, object]] = []
    log = EventLog(None, "p", echo=seen.append)
    log.write("state", state="training")
    log.close()
    log.write("exit", code=0)
    assert [event["event"] for event in seen] == ["state", "exit"]


def test_half_a_line_of_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / EVENT_FILE
    path.write_text('{"event":"start","t":1}\n{"event":"comm')
    log = EventLog(path, "p")
    log.write("start")
    log.close()
    tail = EventTail(path)
    assert [event["event"] for event in tail.poll()] == ["start", "start"]
    assert tail.malformed == 1
    tail.close()


def test_tail_follows_a_file_that_appears_and_grows_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / EVENT_FILE
    tail = EventTail(path)
    assert tail.poll() == []
    data = b'{"event":"state","state":"joining"}\n\n{"event":"commit","round":1}\n'
    seen: list[str] = []
    for index in range(len(data)):
        with open(path, "ab") as file:
            file.write(data[index : index + 1])
        seen += [event["event"] for event in tail.poll()]
    assert seen == ["state", "commit"]
    assert tail.malformed == 0
    tail.close()


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\n", b"[1,2]\n", b'{"event":7}\n', b"{}\n", b"nonsense\n", b"[" * 5000 + b"\n"]
)
def test_tail_skips_what_is_no_event(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / EVENT_FILE
    path.write_bytes(junk + b'{"event":"exit"}\n')
    tail = EventTail(path)
    assert [event["event"] for event in tail.poll()] == ["exit"]
    assert tail.malformed == 1
    tail.close()


def test_rotation_loses_nothing_for_a_tail(tmp_path: Path) -> None:
    path = tmp_path / EVENT_FILE
    log = EventLog(path, "p", rotate_at=400)
    tail = EventTail(path)
    seen = []
    for number in range(60):
        log.write("progress", steps=number)
        if number % 3 == 0:
            seen += [event["steps"] for event in tail.poll()]
    seen += [event["steps"] for event in tail.poll()]
    log.close()
    tail.close()
    assert seen == list(range(60))
    assert path.with_name(EVENT_FILE + ".1").exists()
    assert path.stat().st_size <= 400
    assert [event["steps"] for event in read_events(path)][-1] == 59


def test_a_rotation_that_fails_goes_on_in_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / EVENT_FILE
    log = EventLog(path, "p", rotate_at=300)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raises(full))
        for number in range(20):
            log.write("progress", steps=number)
            # Whatever is opened now must not be given the log's number.
            with open(tmp_path / f"other-{number}", "wb") as other:
                other.write(b"mine")
    assert log.dropped > 0
    assert all((tmp_path / f"other-{number}").read_bytes() == b"mine" for number in range(20))
    before = [event["steps"] for event in read_events(path)]
    assert before == list(range(len(before)))
    assert path.stat().st_size <= 600
    log.write("progress", steps=20)
    log.close()
    assert [event["steps"] for event in read_events(path)] == [*before, 20]
    assert path.with_name(EVENT_FILE + ".1").exists()


def raises(error: OSError) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_the_newest_of_each_kind_is_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(events, "_BLOCK", block)
    path = tmp_path / EVENT_FILE
    assert last_events(path, ["start"]) == {}
    log = EventLog(path, "p", clock=lambda: 5.0, rotate_at=400)
    log.write("start", name="n")
    for number in range(8):
        log.write("progress", steps=number, note='"commit"')
    log.close()
    with path.open("ab") as file:
        file.write(b'nonsense "progress"\n{"event":"progr')
    assert path.with_name(EVENT_FILE + ".1").exists()
    found = last_events(path, ["progress", "commit"])
    assert {kind: event["steps"] for kind, event in found.items()} == {"progress": 7}
    assert last_head_time(path) is None


def test_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / EVENT_FILE
    path.write_text('{"event":"start","t":1,"x":"a long line"}\n')
    tail = EventTail(path)
    assert len(tail.poll()) == 1
    path.write_text('{"event":"exit"}\n')
    assert [event["event"] for event in tail.poll()] == ["exit"]
    tail.close()


def test_last_head_time(tmp_path: Path) -> None:
    path = tmp_path / EVENT_FILE
    assert last_head_time(path) is None
    path.write_text('{"event":"commit","t":5.5}\n{"event":"digest","t":7}\n{"event":"progress","t":99}\n')
    assert last_head_time(path) == 7


def test_full_disk_while_running_counts_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / EVENT_FILE)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write("progress")
    log.write("progress")
    log.close()
    assert log.dropped == 1
    assert len(list(read_events(tmp_path / EVENT_FILE))) == 1


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="is not a folder"):
        EventLog(tmp_path / "file" / EVENT_FILE)
    with pytest.raises(StateError, match="is not a folder"):
        StateFolder(tmp_path / "file")


@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [
        (errno.ENOSPC, ResourceError, "no space"),
        (errno.EROFS, ResourceError, "read-only"),
        (errno.EACCES, StateError, "permission"),
        (errno.EIO, StateError, "cannot use"),
    ],
)
def test_complaints_of_the_system_become_errors(number: int, kind: type[Exception], word: str) -> None:
    error = folder_error(Path("/x"), OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert word in str(error)
    assert "--state" in str(error)


def test_a_state_folder_has_one_owner(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from atoll.protocol.statefolder import StateFolder\n"
    code += "StateFolder(Path(sys.argv[1]))"
    with StateFolder(tmp_path):
        with pytest.raises(StateLocked, match=f"process {os.getpid()}"):
            StateFolder(tmp_path)
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert "StateLocked" in other.stderr
    with StateFolder(tmp_path):
        pass


def test_default_state_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state(bytes(range(32))) == tmp_path / "atoll" / "000102030405"
    assert default_state("ab" * 32, "bootstrap-") == tmp_path / "atoll" / "bootstrap-abababababab"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state("ab" * 32) == tmp_path / ".local/state/atoll/abababababab"
