from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.__main__ import run
from atoll.node.config import to_toml
from atoll.node.run_defaults import Tables, complete, new_manifest, verify
from atoll.protocol.errors import DataError, ManifestError
from atoll.protocol.identity import load_identity
from atoll.protocol.manifest import Manifest

SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 24, "context": 16}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"text number {i}: " + "the quick brown fox " * 20)
    return folder


@pytest.fixture
def hand(tmp_path: Path, corpus: Path) -> Path:
    """As short as a manifest can be written by hand."""
    path = tmp_path / "hand.toml"
    path.write_text(
        f"""# my run
name = "hand" # the name
[model]
width = 32   # narrow
layers = 1
heads = 2
kv_heads = 2
ffn = 64
context = 32
# end of model
[data]
source = "text"
path = "{corpus}"
[round]
inner_steps = 20
"""
    )
    return path


def test_defaults_are_derived(corpus: Path) -> None:
    manifest = new_manifest(
        "small", data=corpus, model=SMALL, optimizer="adamw", lr=0.001, batch=3, inner_steps=10, codec="float16",
        rounds=7, seed=5, round={"max_group": 9},
    )  # fmt: skip
    tables = verify(manifest)
    assert tables.model.seed == 5
    assert tables.inner.optimizer == "adamw"
    assert tables.inner.adamw_lr == 0.001
    assert manifest.round.weight_cap == 8 * 10 * 3 * 16
    assert (manifest.round.first_lease, manifest.round.max_lease) == (60, 240)
    assert manifest.round.max_group == 9
    assert manifest.codec.name == "float16"
    assert manifest.budget.rounds == 7
    assert manifest.state.chunk == 4096
    assert new_manifest("small", data=corpus, model=SMALL, seed=6).state.theta0 != manifest.state.theta0
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert complete(manifest.model_dump()) == manifest.model_dump()


def test_what_the_protocol_cannot_see(corpus: Path) -> None:
    manifest = new_manifest(data=corpus, model=SMALL)
    with pytest.raises(ManifestError, match=r"state\.theta0: the model's initial state has the digest"):
        verify(manifest.replace(state={"theta0": "00" * 32}))
    with pytest.raises(ManifestError, match=r"state\.parameters: the model has \d+, found 7"):
        verify(manifest.replace(state={"parameters": 7}))
    with pytest.raises(ManifestError, match=r"max_lease = 100 is below inner_steps × batch = 200"):
        verify(manifest.replace(round={"first_lease": 100, "max_lease": 100}))
    with pytest.raises(ManifestError, match=r"first_lease = 7 is below two steps of batch = 4"):
        verify(manifest.replace(round={"first_lease": 7}))
    with pytest.raises(ManifestError, match=r"model\.widht: unknown key; did you mean 'width'"):
        verify(manifest.replace(model={"widht": 3}))
    with pytest.raises(ManifestError) as caught:
        Tables.of({"model": {"widht": 1}, "data": 3, "inner": {"lr": "x"}})
    for part in ("model.widht", "data: expected a table", "inner.lr"):
        assert part in str(caught.value)
    with pytest.raises(ManifestError, match="there is no 'huge'"):
        new_manifest(preset="huge")
    with pytest.raises(DataError):
        new_manifest(data=corpus / "none")


def test_new_sign_check_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["manifest", "new", "-o", "reef.toml", "--rounds", "12", "--quorum", "3"]) == 0
    assert "next: atoll manifest sign reef.toml" in capsys.readouterr().out
    draft = Manifest.load("reef.toml")
    assert (draft.name, draft.budget.rounds, draft.round.quorum, draft.owner) == ("reef", 12, 3, "")

    assert run(["manifest", "new", "-o", "reef.toml"]) == 2
    assert "reef.toml exists" in capsys.readouterr().err
    assert run(["manifest", "check", "reef.toml"]) == 3
    err = capsys.readouterr().err
    assert err.endswith(
        "reef.toml is complete, but not signed yet; sign it with: atoll manifest sign reef.toml --key owner.key\n"
    )
    assert run(["manifest", "show", "reef.toml"]) == 0
    assert "signature missing" in capsys.readouterr().out

    assert run(["manifest", "sign", "reef.toml", "--key", "owner.key"]) == 0
    assert "made a new key in owner.key" in capsys.readouterr().out
    signed = Manifest.load("reef.toml")
    signed.check_signature()
    assert signed.owner == load_identity("owner.key").peer_id
    text = Path("reef.toml").read_text()
    assert text == to_toml(signed)
    fields = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert len(fields) > 40
    above = {after: before for before, after in pairwise(text.splitlines())}
    assert [line for line in fields if "#" not in line and not above[line].startswith("#")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.key", "reef.toml"]

    assert run(["manifest", "check", "reef.toml"]) == 0
    out = capsys.readouterr().out
    assert f"ok: run id {signed.run_id.hex()}" in out
    assert "data here: the same" in out
    assert run(["manifest", "show", "reef.toml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run_id"], shown["signed"], shown["round"]["quorum"]) == (signed.run_id.hex(), True, 3)

    # the same key again changes nothing, another one is refused
    assert run(["manifest", "sign", "reef.toml", "--key", "owner.key"]) == 0
    assert Manifest.load("reef.toml") == signed
    before = Path("reef.toml").read_bytes()
    assert run(["manifest", "sign", "reef.toml", "--key", "other.key"]) == 2
    assert "belongs to" in capsys.readouterr().err
    assert Path("reef.toml").read_bytes() == before
    assert not Path("other.key").exists()

    Path("reef.toml").write_text(before.decode().replace("rounds = 12", "rounds = 13"))
    assert run(["manifest", "check", "reef.toml"]) == 3
    assert "changed after signing" in capsys.readouterr().err
    assert run(["manifest", "show", "reef.toml"]) == 0
    assert "signature BAD" in capsys.readouterr().out


def test_signing_a_short_manifest_keeps_its_text(hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", "check", str(hand)]) == 3
    err = capsys.readouterr().err
    assert f"fill in what follows from the rest with: atoll manifest sign {hand} --key owner.key" in err
    assert err.count("\n") == 1
    key = hand.with_name("owner.key")
    hand.chmod(0o640)
    assert run(["manifest", "sign", str(hand), "--key", str(key)]) == 0
    out = capsys.readouterr().out
    for part in ("protocol", "state.theta0", "data.files", "round.max_lease", "outer.lr"):
        assert part in out
    text = hand.read_text()
    for kept in ("# my run\n", 'name = "hand" # the name\n', "width = 32   # narrow\n", "# end of model\n"):
        assert kept in text
    assert hand.stat().st_mode & 0o777 == 0o640
    manifest = Manifest.load(hand)
    manifest.check_signature()
    assert manifest.round.inner_steps == 20
    assert manifest.round.first_lease == 2 * 20 * 4
    assert run(["manifest", "check", str(hand)]) == 0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("inner_steps = 20", "inner_step = 20", "round.inner_step: unknown key; did you mean 'inner_steps'?"),
        ("inner_steps = 20", "inner_steps = 0", "round.inner_steps: expected at least 1, found 0"),
        ("inner_steps = 20", 'inner_steps = "x"', "round.inner_steps: expected an integer, found 'x' (a string)"),
        ("inner_steps = 20", "quorum = 40", "quorum = 40 exceeds max_group = 16"),
        ("width = 32", "widht = 32", "model.widht: unknown key; did you mean 'width'?"),
        ("[round]", "[rounds]", "rounds: unknown key; did you mean 'round'?"),
        ('name = "hand"', "", "name: missing; expected a string"),
        ("[round]", "round = 3\n[x]", "data.round: unknown key"),
        ("[model]", "round = 3\n[model]", "not a TOML file"),
        ("[round]", "[state]\nparameters = 5\n[round]", "state.parameters: the model has"),
    ],
)
def test_signing_refuses_and_keeps(
    hand: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, expected: str
) -> None:
    text = hand.read_text().replace(old, new)
    hand.write_text(text)
    assert run(["manifest", "sign", str(hand), "--key", str(hand.with_name("k"))]) == 3
    err = capsys.readouterr().err
    assert expected in err
    assert "hand.toml" in err
    assert err.count("\n") == 1
    assert hand.read_text() == text
    assert not hand.with_name("k").exists()


def test_exit_codes(hand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", "check", str(tmp_path / "none.toml")]) == 3
    assert "there is no manifest" in capsys.readouterr().err
    bad = tmp_path / "key"
    bad.write_text("hello")
    assert run(["manifest", "sign", str(hand), "--key", str(bad)]) == 6
    assert "not a libp2p private key" in capsys.readouterr().err
    assert run(["manifest", "sign", str(hand)]) == 2
    assert run(["manifest", "new", "-o", str(tmp_path / "x.toml"), "--data", str(tmp_path / "none")]) == 5
    assert run(["manifest", "new", "-o", str(tmp_path / "none" / "x.toml")]) == 6
    assert run(["manifest", "new", "-o", str(tmp_path / "x.toml"), "--quorum", "99"]) == 3
    newer = tmp_path / "newer.toml"
    newer.write_text("protocol = 2\n")
    capsys.readouterr()
    assert run(["manifest", "check", str(newer)]) == 8
    assert "newer.toml: the run speaks protocol version 2" in capsys.readouterr().err
    hand.write_text("protocol = 2\n" + hand.read_text())
    assert run(["manifest", "sign", str(hand), "--key", str(tmp_path / "k")]) == 8


def test_check_names_all_that_is_wrong(hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", "sign", str(hand), "--key", str(hand.with_name("k"))]) == 0
    hand.write_text(hand.read_text().replace("width = 32", "width = 36"))
    capsys.readouterr()
    assert run(["manifest", "check", str(hand)]) == 3
    err = capsys.readouterr().err
    assert "state.parameters: the model has" in err
    assert "changed after signing" in err


def test_check_tells_when_the_data_differs_here(hand: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", "sign", str(hand), "--key", str(hand.with_name("k"))]) == 0
    (corpus / "0.txt").write_text("other text")
    capsys.readouterr()
    assert run(["manifest", "check", str(hand)]) == 0
    assert "data here: the training data differs from the run's" in capsys.readouterr().out


def test_other_rules_of_rounds(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What follows from a rule is filled in, and what contradicts one is named with what to do."""
    path, key = tmp_path / "run.toml", str(tmp_path / "owner.key")
    new = ["manifest", "new", "-o", str(path), "--data", str(corpus), "--force"]
    chosen = ["--by", "time", "--every", "600", "--weights", "tokens2/steps", "--average", "radial", "--preset", "tiny"]
    assert run([*new, *chosen]) == 0
    manifest = Manifest.load(path)
    rules = manifest.round
    assert (rules.by, rules.every, rules.grace, rules.weights, rules.average) == (
        "time", 600, 0, "tokens2/steps", "radial",
    )  # fmt: skip
    assert rules.weight_cap == 3 * 50 * 4 * 128
    assert manifest.state.embeddings == (0, 26)
    assert len([size for layer in manifest.state.layers for size in layer]) == 27
    assert run(["manifest", "sign", str(path), "--key", key]) == 0
    assert run(["manifest", "check", str(path)]) == 0
    capsys.readouterr()

    text = path.read_text()
    for old, said, expected in (
        ("every = 600.0", "every = 0.5", "the nearest is 1"),
        ("    26,\n", "    25,\n", "state.embeddings: those of the model are [0, 26], found [0, 25]; delete the line"),
        ('average = "radial"', 'average = "mean"', "state.layers with round.fragments = 1 does nothing"),
        ("grace = 0.0", "grace = 0.25", "set grace to 0"),
    ):
        assert old in text
        path.write_text(text.replace(old, said))
        assert run(["manifest", "check", str(path)]) == 3
        assert expected in capsys.readouterr().err
    assert run([*new, "--by", "tokens", "--every", "1"]) == 3
    assert "the nearest is 2" in capsys.readouterr().err


def test_what_factors_need_is_filled_in(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, key = tmp_path / "run.toml", tmp_path / "owner.key"
    assert run(["manifest", "new", "-o", str(path), "--data", str(corpus), "--codec", "lowrank", "--rank", "4"]) == 0
    manifest = Manifest.load(path)
    assert (manifest.codec.rank, manifest.codec.error_feedback) == (4, 0.9)
    assert sum(map(len, manifest.state.layers)) == len(manifest.state.columns)
    assert manifest.state.chunk == 1 << 16  # the largest matrix of the demonstration has 49,152 elements
    verify(manifest)
    assert run(["manifest", "sign", str(path), "--key", str(key)]) == 0
    assert Manifest.load(path).state.columns == manifest.state.columns
    capsys.readouterr()
    text = path.read_text().replace("rank = 4", "rank = 99")
    path.write_text(text)
    assert run(["manifest", "check", str(path)]) == 3
    assert "the most is 40" in capsys.readouterr().err
    other = new_manifest("other", data=corpus, codec="lowrank", model=SMALL)
    assert other.codec.rank == 7  # the most by which its embedding gains
    wrong = other.replace(state={"columns": [n if n != 24 else 12 for n in other.state.columns]})
    with pytest.raises(ManifestError, match=r"state\.columns: these are not the model's"):
        verify(wrong)
