from __future__ import annotations

import copy
import json
import math
import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.protocol.canonical import canonical_json, number
from atoll.protocol.errors import ManifestError, SignatureError, VersionError
from atoll.protocol.explain import explain
from atoll.protocol.identity import Ed25519Signer, base58_encode, peer_id_of
from atoll.protocol.manifest import MAX_MANIFEST, Manifest, Scalars, suggested_chunk

OWNER = Ed25519Signer.from_seed(bytes(range(32)))
SPECIFICATION = Path(__file__).parents[2] / "docs/wire/records.md"
KNOWN = Manifest.make(
    "known", parameters=1000, theta0="00" * 32, model={"a": 1.5}, data={"source": "é"}, inner={"lr": 1e-3}
)


def make(**sections: Any) -> Manifest:
    sections = {"model": {"preset": "demo", "seed": 1}, "data": {"source": "stdlib"}, "inner": {"lr": 0.02}} | sections
    return Manifest.make("demo", parameters=200_000, theta0="ab" * 32, **sections)


def changed(**changes: Any) -> dict[str, Any]:
    """A valid manifest as plain values, with changes merged in; None removes."""
    raw = copy.deepcopy(json.loads(make().model_dump_json()))
    for key, value in changes.items():
        if value is None:
            del raw[key]
        elif isinstance(value, dict) and isinstance(raw.get(key), dict):
            raw[key] |= value
            raw[key] = {k: v for k, v in raw[key].items() if v is not None}
        else:
            raw[key] = value
    return raw


def problem(**changes: Any) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_dict(changed(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------- canonical form

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
tables = st.dictionaries(st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True), scalars, max_size=5)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    quorum = draw(st.integers(1, 256))
    steps = draw(st.integers(1, 1000))
    peers = [peer_id_of(blake3(bytes([i])).digest()) for i in range(draw(st.integers(0, 4)))]
    return Manifest.make(
        draw(st.sampled_from(["demo", "Ünïcode — run", 'quo"te', "#[x]='y'"])),
        parameters=draw(st.integers(1, 2**30)),
        theta0=draw(st.binary(min_size=32, max_size=32)).hex(),
        model=draw(tables),
        data=draw(tables),
        inner=draw(tables),
        round={
            "inner_steps": steps,
            "quorum": min(quorum, len(peers) or quorum),
            "max_group": draw(st.integers(quorum, 256)),
            "silence": draw(st.floats(0.1, 120)),
            "grace": draw(st.floats(0, 1)),
            "overlap": (overlap := draw(st.integers(0, steps - 1))),
            "merge": draw(st.sampled_from(["carry", "mix", "overwrite", "eager", "delay"])) if overlap else "carry",
            "mix": draw(st.floats(0, 1, exclude_max=True)),
        },
        outer={"lr": draw(st.floats(1e-300, 10)), "momentum": draw(st.floats(0, 1, exclude_max=True))},
        access={"admit": "list" if peers else "open", "peers": peers},
    )


@given(manifests())
def test_toml_round_trip_keeps_everything(manifest: Manifest) -> None:
    again = Manifest.from_toml(manifest.to_toml())
    assert again == manifest
    assert again.canonical() == manifest.canonical()
    assert again.run_id == manifest.run_id
    assert again.to_toml() == manifest.to_toml()
    # any JSON reader reads the canonical form, and its values validate to the same manifest
    assert Manifest.from_dict(tomllib.loads(manifest.to_toml())).canonical() == manifest.canonical()
    assert canonical_json(json.loads(manifest.canonical(), parse_int=float)) == manifest.canonical()


SIGNED = make(inner={"lr": 0.02, "warmup": 1e-7, "x": 12}).sign(OWNER)
SIGNED_TOML = SIGNED.to_toml().encode()


@settings(max_examples=1000)
@given(st.integers(0, len(SIGNED_TOML) - 1), st.integers(0, 255))
@example(SIGNED_TOML.index(b"0.02"), ord("1"))
def test_a_flipped_byte_of_signed_text_is_noticed(at: int, byte: int) -> None:
    """Refused, or another canonical form whose signature fails, or a comment or a blank: the very same run."""
    text = SIGNED_TOML[:at] + bytes([byte]) + SIGNED_TOML[at + 1 :]
    try:
        read = Manifest.from_toml(text)
    except (ManifestError, VersionError):
        return
    if read.canonical() == SIGNED.canonical() and read.signature == SIGNED.signature:
        read.check_signature()
    else:
        assert read.run_id != SIGNED.run_id or read.signature != SIGNED.signature
        with pytest.raises(SignatureError):
            read.check_signature()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back(value: float) -> None:
    assert float(number(value)) == value
    assert number(float(number(value))) == number(value)


@pytest.mark.parametrize(
    ("bits", "text"),
    [  # RFC 8785, appendix B
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_numbers_of_rfc8785(bits: str, text: str) -> None:
    import struct

    assert number(struct.unpack(">d", bytes.fromhex(bits))[0]) == text


def test_strings_of_rfc8785() -> None:
    value = {"literals": [True, False], "string": '€$\x0f\nA\'B"\\\\"/', "numbers": [333333333.33333329, 1e30, 4.50]}
    assert canonical_json(value).decode() == (
        '{"literals":[true,false],"numbers":[333333333.3333333,1e+30,4.5],"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53 + 1, None, {"é": 1}, {1: 2}, b"x"])
def test_what_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(ValueError, match="no canonical form"):
        canonical_json(value)


def test_one_and_one_point_zero_are_one_run() -> None:
    a = make(inner={"lr": 1, "decay": 0.0}, outer={"lr": 1})
    b = make(inner={"lr": 1.0, "decay": 0}, outer={"lr": 1.0})
    assert a.canonical() == b.canonical()
    assert a.run_id == b.run_id
    assert a == b
    assert hash(a) == hash(b)
    assert a.run_id != make(inner={"lr": True, "decay": 0}, outer={"lr": 1}).run_id


def test_known_run_id() -> None:
    """Changes only with the protocol version: every peer of a run must agree on it."""
    assert KNOWN.canonical().decode() == (
        '{"access":{"admit":"open","peers":[]},"budget":{"rounds":60},"codec":{"error_feedback":1,"name":"int8"},'
        '"data":{"source":"é"},"inner":{"lr":0.001},"model":{"a":1.5},"name":"known",'
        '"outer":{"lr":0.7,"momentum":0.6,"optimizer":"nesterov","period":1},"owner":"","protocol":1,'
        '"round":{"first_lease":100,"grace":0.25,"inner_steps":50,"max_group":16,"max_lease":400,"merge":"carry",'
        '"mix":0.5,"overlap":0,"quorum":2,"silence":5,"weight_cap":25600},'
        '"state":{"checkpoint_every":10,"chunk":4096,"parameters":1000,'
        f'"theta0":"{"00" * 32}"}}}}'
    )
    assert KNOWN.run_id.hex() == "40fda1dd2d2a09858d230b820d6b7ad9a2b260337f9de6f1081422e2201bb8c0"


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the documents are not beside the tests")
def test_vectors_of_the_specification() -> None:
    signed = KNOWN.sign(OWNER)
    vectors = "".join(SPECIFICATION.read_text(encoding="utf-8").split())
    for vector in (KNOWN.canonical().decode(), KNOWN.run_id.hex(), signed.run_id.hex(), signed.signature):
        assert "".join(vector.split()) in vectors


# ---------------------------------------------------------------------------- signature


def test_signature() -> None:
    manifest = make()
    signed = manifest.sign(OWNER)
    signed.check_signature()
    assert signed.owner == OWNER.peer_id
    assert manifest.owner == ""
    assert signed.run_id != manifest.run_id
    assert signed.sign(OWNER) == signed
    other = signed.sign(Ed25519Signer.generate())
    other.check_signature()
    assert other.run_id != signed.run_id
    with pytest.raises(SignatureError, match="not signed"):
        manifest.check_signature()
    with pytest.raises(SignatureError, match="changed after signing"):
        Manifest.from_dict(signed.model_dump() | {"name": "other"}).check_signature()
    with pytest.raises(SignatureError):
        Manifest.from_dict(signed.model_dump() | {"signature": ""}).check_signature()
    assert signed.replace(budget={"rounds": 3}).signature == ""


def test_an_instance_cannot_change() -> None:
    manifest = make()
    with pytest.raises(ValidationError):
        manifest.name = "x"
    with pytest.raises(ValidationError):
        manifest.round.quorum = 3
    for change in (
        lambda t: t.update(a=1),
        lambda t: t.__setitem__("a", 1),
        lambda t: t.pop("preset"),
        lambda t: t.clear(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(manifest.model)
    for copied in (pickle.loads(pickle.dumps(manifest)), copy.deepcopy(manifest), manifest.model_copy()):
        assert copied == manifest
        assert isinstance(copied.model, Scalars)
    assert manifest.model_copy(update={"name": "b"}).run_id == manifest.replace(name="b").run_id != manifest.run_id
    with pytest.raises(ValidationError):
        manifest.model_copy(update={"name": ""})


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"round": {"quorom": 2}}, "round.quorom: unknown key; did you mean 'quorum'?"),
        ({"round": {"momentum": 0.5}}, "round.momentum: unknown key here; it belongs in [outer]"),
        ({"rounds": {}}, "rounds: unknown key; did you mean 'round'?"),
        ({"quorum": 2}, "quorum: unknown key here; it belongs in [round]"),
        ({"codec": {"owner": "x"}}, "codec.owner: unknown key here; it belongs at the top"),
        ({"round": {"quorum": "two"}}, "round.quorum: expected an integer, found 'two' (a string)"),
        ({"round": {"quorum": True}}, "round.quorum: expected an integer, found true (a boolean)"),
        ({"round": {"quorum": 2.0}}, "round.quorum: expected an integer, found 2.0 (a number)"),
        ({"outer": {"lr": "0.7"}}, "outer.lr: expected a number, found '0.7' (a string)"),
        ({"outer": {"lr": math.nan}}, "outer.lr: expected a finite number, found nan"),
        ({"outer": {"lr": math.inf}}, "outer.lr: expected a finite number, found inf"),
        ({"outer": {"lr": 0.0}}, "outer.lr: expected more than 0.0, found 0.0"),
        ({"outer": {"momentum": 1.0}}, "outer.momentum: expected less than 1.0, found 1.0"),
        ({"outer": {"optimizer": "adam"}}, "outer.optimizer: expected 'nesterov', 'delayed-nesterov' or 'sgd', found"),
        ({"outer": {"optimizer": "sgd"}}, 'outer: momentum = 0.6 with optimizer = "sgd", which has none; set momentum'),
        ({"outer": {"period": 4}}, 'outer: period = 4 with optimizer = "nesterov"'),
        ({"outer": {"period": 0}}, "outer.period: expected at least 1"),
        (
            {"round": {"merge": "eager", "overlap": 5}, "outer": {"optimizer": "delayed-nesterov", "period": 2}},
            'round.merge = "eager" previews',
        ),
        ({"codec": {"name": "int7"}}, "did you mean 'int8'?"),
        ({"codec": {"error_feedback": 1.5}}, "codec.error_feedback: expected at most 1.0, found 1.5"),
        ({"round": {"silence": 0.0}}, "round.silence: expected at least 0.1, found 0.0"),
        ({"round": {"silence": 500.0}}, "round.silence: expected at most 120.0, found 500.0"),
        ({"round": {"grace": 1.5}}, "round.grace"),
        ({"round": {"quorum": 17}}, "quorum = 17 exceeds max_group = 16"),
        ({"round": {"max_group": 257}}, "round.max_group: expected at most 256"),
        ({"round": {"first_lease": 401}}, "first_lease = 401 exceeds max_lease = 400"),
        ({"round": {"inner_steps": 401, "first_lease": 1}}, "max_lease = 400 is below inner_steps = 401"),
        ({"round": {"overlap": 51}}, "overlap = 51 exceeds inner_steps = 50"),
        ({"round": {"overlap": 51}}, "the longest is 50"),
        ({"round": {"overlap": -1}}, "round.overlap: expected at least 0"),
        ({"round": {"overlap": 10, "max_lease": 59, "first_lease": 50}}, "max_lease = 59 is below inner_steps + over"),
        ({"round": {"merge": "eagre"}}, "did you mean 'eager'?"),
        ({"round": {"merge": "eager"}}, 'merge = "eager" with overlap = 0 does nothing'),
        ({"round": {"merge": "overwrite", "overlap": 50}}, "use overlap = 49"),
        ({"round": {"merge": "mix", "overlap": 50, "mix": 0.0}}, 'merge = "mix" with mix = 0'),
        ({"round": {"merge": "mix", "overlap": 5, "mix": 1.0}}, "round.mix: expected less than 1.0"),
        ({"round": {"weight_cap": 10}}, "weight_cap = 10 is below inner_steps = 50"),
        ({"round": {"weights": "token"}}, "did you mean 'tokens'?"),
        ({"round": {"stale": "discard"}}, "did you mean 'discount'?"),
        ({"round": {"max_age": 3}}, 'max_age = 3 with stale = "keep" does nothing; set it to 0, or stale to "drop"'),
        ({"round": {"stale": "discount", "weights": "equal"}}, 'use weights = "tokens"'),
        (
            {"round": {"stale": "shorten", "fragments": 4, "overlap": 25}, "state": {"layers": [[250] * 4]}},
            "the longest overlap is 12 (inner_steps / fragments)",
        ),
        ({"round": {"stale": "drop", "max_age": 1025}}, "round.max_age: expected at most 1024"),
        ({"round": {"every": 9.0}}, 'every = 9 with by = "steps" does nothing; leave it out, or set by to "tokens"'),
        ({"round": {"by": "tokens", "every": 9}}, 'grace = 0.25 with by = "tokens"'),
        ({"round": {"by": "tokens", "grace": 0}}, "the nearest is 2"),
        ({"round": {"by": "tokens", "grace": 0, "every": 9.25}}, "the nearest is 9"),
        ({"round": {"by": "tokens", "grace": 0, "every": 10**6}}, "the nearest is 409600"),
        ({"round": {"by": "time", "grace": 0}}, "expected 1 to 1000000 seconds; the nearest is 1"),
        ({"round": {"by": "time", "grace": 0, "every": 2e6}}, "the nearest is 1000000"),
        ({"round": {"weights": "tokens2/steps", "weight_cap": 2**30}}, "the largest is 671088640"),
        ({"state": {"chunk": 1000}}, "state.chunk: expected a power of two, found 1000 (near it: 512 and 1024)"),
        ({"state": {"chunk": 32}}, "state.chunk: expected at least 64, found 32"),
        ({"state": {"parameters": 2**40, "chunk": 64}}, "use larger chunks"),
        ({"state": {"parameters": 0}}, "state.parameters: expected at least 1, found 0"),
        ({"state": {"theta0": "AB" * 32}}, "state.theta0: expected 64 lower-case hex digits"),
        ({"state": {"checkpoint_every": 0}}, "state.checkpoint_every: expected at least 1"),
        ({"budget": {"rounds": 0}}, "budget.rounds: expected at least 1, found 0"),
        ({"access": {"admit": "list"}}, "nobody could take part"),
        ({"access": {"peers": [OWNER.peer_id]}}, 'admit = "open" ignores them'),
        ({"access": {"admit": "list", "peers": ["12D3KooWx"]}}, "'12D3KooWx' (a string) is not a peer id"),
        ({"access": {"admit": "list", "peers": [OWNER.peer_id] * 2}}, "listed 2 times"),
        ({"access": {"admit": "list", "peers": [OWNER.peer_id]}}, "round.quorum = 2 exceeds the 1 peers"),
        ({"access": {"admit": "list", "peers": [1]}}, "access.peers[0]: expected a string, found 1 (an integer)"),
        ({"access": {"peers": "x"}}, "access.peers: expected an array, found 'x' (a string)"),
        ({"owner": "me"}, "owner: 'me' (a string) is not a peer id"),
        ({"owner": base58_encode(b"\x12\x20" + bytes(32))}, "RSA"),
        ({"signature": "00" * 64}, "no owner"),
        ({"signature": "zz"}, "signature: expected a signature in lower-case hex digits"),
        ({"name": ""}, "name: expected at least 1 characters"),
        ({"name": "x" * 65}, "name: expected at most 64 characters, found 65"),
        ({"name": "a\nb"}, "name: expected printable characters"),
        ({"name": "../x"}, "name: expected printable characters without slashes"),
        ({"protocol": "1"}, "protocol: expected an integer, found '1' (a string)"),
        ({"protocol": None}, "protocol: missing; expected an integer"),
        ({"model": None}, "model: missing; expected a table"),
        ({"model": 3}, "model: expected a table, found 3 (an integer)"),
        ({"round": []}, "round: expected a table, found an array of 0"),
        ({"codec": {"name": None}}, "codec.name: missing; expected 'float32' or 'float16' or 'int8'"),
        ({"inner": {"betas": [0.9, 0.95]}}, "inner: betas: expected a string, a number or a boolean, found an array"),
        ({"inner": {"lr": math.inf}}, "inner: lr: expected a finite number"),
        ({"inner": {"n": 2**53 + 1}}, "±2^53"),
        ({"inner": {"a b": 1}}, "inner: key 'a b' (a string)"),
        ({"inner": {"é": 1}}, "inner: key 'é' (a string): expected ASCII"),
        ({"inner": {"x" * 65: 1}}, "expected 1 to 64"),
        ({"inner": {"x": "y" * 5000}}, "at most 4096 characters"),
        ({"inner": {str(i): i for i in range(65)}}, "at most 64 keys"),
        ({"inner": {"x": "\ud800"}}, "surrogate"),
        ({"bad\nkey": 1}, r"'bad\nkey': unknown key"),
    ],
)
def test_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in problem(**changes)


def test_every_problem_is_named() -> None:
    text = problem(round={"quorum": "2", "foo": 1}, outer={"lr": -1.0}, budget=None)
    assert text.count("; ") >= 3
    for part in ("round.quorum", "round.foo", "outer.lr", "budget: missing"):
        assert part in text


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_protocol_version(version: int) -> None:
    with pytest.raises(VersionError, match=f"speaks protocol version {version}, and this atoll speaks 1"):
        Manifest.from_dict(changed(protocol=version, novelty={"x": 1}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("protocol = ", "not a TOML file"),
        ("a = 1\na = 2", "not a TOML file"),
        (b"\xff\xfe", "not UTF-8"),
        ("x = " + "[" * 5000, "not a TOML file"),
        ("x = " + "9" * 5000, "not a TOML file"),
        ("# " + "x" * MAX_MANIFEST, "too long"),
        ("", "protocol: missing"),
        ("protocol = 1979-05-27", "protocol: expected an integer, found datetime.date(1979, 5, 27) (a date or time)"),
    ],
)
def test_text_that_is_no_manifest(text: str | bytes, expected: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_toml(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ManifestError, match="there is no manifest at"):
        Manifest.load(path)
    path.write_text(make().to_toml())
    assert Manifest.load(path) == make()
    path.write_text("protocol = 7")
    with pytest.raises(VersionError, match=r"run\.toml: the run speaks"):
        Manifest.load(path)
    path.write_text("protocol = 1")
    with pytest.raises(ManifestError, match=r"run\.toml: name: missing"):
        Manifest.load(path)
    with pytest.raises(ManifestError, match="is a folder, not a file; expected a manifest"):
        Manifest.load(tmp_path)


def test_size_is_bounded() -> None:
    peers = [peer_id_of(i.to_bytes(32, "little")) for i in range(4096)]
    manifest = make(access={"admit": "list", "peers": peers})
    assert len(manifest.to_toml()) < MAX_MANIFEST
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert "at most 4096 items" in problem(access={"admit": "list", "peers": [*peers, OWNER.peer_id]})
    big = {str(i): "x" * 4096 for i in range(64)}
    with pytest.raises(ManifestError, match="expected at most 262144 bytes"):
        make(model=big)


def test_admits() -> None:
    peers = [peer_id_of(bytes([i]) * 32) for i in range(1, 4)]
    manifest = make(access={"admit": "list", "peers": peers})
    assert manifest.admits(peers[1])
    assert not manifest.admits(OWNER.peer_id)
    assert make().admits(OWNER.peer_id)


@given(st.integers(1, 2**40))
def test_suggested_chunk(parameters: int) -> None:
    chunk = suggested_chunk(parameters)
    assert chunk & (chunk - 1) == 0
    assert 2**12 <= chunk <= 2**20
    if 2**19 <= parameters < 2**27:
        assert chunk <= parameters / 128 < 2 * chunk


def test_explain_serves_other_models() -> None:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        width: int = Field(ge=1)
        name: str | None = None
        rate: float = 0.1

    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"widht": 3, "name": 5, "rate": "fast", "width": "x"})
    text = explain(caught.value, Config, "model")
    assert "model.widht: unknown key; did you mean 'width'?" in text
    assert "model.name: expected a string, found 5 (an integer)" in text
    assert "model.rate: expected a number, found 'fast' (a string)" in text
    assert "model.width: expected an integer, found 'x' (a string)" in text
