"""Peers on disk: what was met is found again, whatever happens to the file."""

from __future__ import annotations

from pathlib import Path

from atoll.node.peerbook import FILE, KEPT, PeerBook
from atoll.protocol.identity import Ed25519Signer

PEERS = [Ed25519Signer.from_seed(bytes([i]) * 32).peer_id for i in range(KEPT + 4)]


def addresses(*numbers: int) -> dict[str, list[str]]:
    return {PEERS[i]: [f"/ip4/192.0.2.{i + 1}/tcp/4001"] for i in numbers}


def test_what_was_noted_is_loaded(tmp_path: Path) -> None:
    assert PeerBook(tmp_path).load() == []
    PeerBook(tmp_path).note(addresses(0, 1))
    assert PeerBook(tmp_path).load() == [f"/ip4/192.0.2.{i + 1}/tcp/4001/p2p/{PEERS[i]}" for i in (0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_it_keeps_those_it_has_and_a_bounded_number(tmp_path: Path) -> None:
    book = PeerBook(tmp_path)
    book.note(addresses(5, 6))
    book.note(addresses(*range(KEPT + 4)))
    kept = [line.rsplit("/", 1)[1] for line in book.load()]
    assert len(kept) == KEPT
    assert kept[:2] == [PEERS[5], PEERS[6]]
    before = (tmp_path / FILE).stat().st_ino
    book.note(addresses(*reversed(range(KEPT + 4))))
    assert (tmp_path / FILE).stat().st_ino == before, "nothing new is no reason to write"
    book.note({})
    assert len(book.load()) == KEPT, "alone for a while, it does not forget the others"


def test_a_restart_in_an_outage_keeps_those_who_are_away(tmp_path: Path) -> None:
    PeerBook(tmp_path).note(addresses(*range(KEPT)))
    before = (tmp_path / FILE).read_text()
    again = PeerBook(tmp_path)
    again.note(addresses(3))
    assert (tmp_path / FILE).read_text() == before
    again.note(addresses(3, KEPT))
    kept = [line.rsplit("/", 1)[1] for line in again.load()]
    assert kept == [*PEERS[1:KEPT], PEERS[KEPT]], "one who is there has the place of one who is not"


def test_damage_and_no_room_are_no_errors(tmp_path: Path) -> None:
    good = f"/ip4/192.0.2.1/tcp/4001/p2p/{PEERS[0]}"
    (tmp_path / FILE).write_bytes(b"\xff\x00 nonsense\n/ip4/1.2.3.4/tcp/1\n" + good.encode() + b"\n/ip4/1.2.3")
    assert PeerBook(tmp_path).load() == [good]
    PeerBook(tmp_path / "nowhere").note(addresses(0))
    assert not (tmp_path / "nowhere").exists()
