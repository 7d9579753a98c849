"""The worked example of docs/protocol.md, computed again with the code.

``python -m tests.unit.test_protocol_doc`` prints the block of vectors as it stands in the document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.protocol.anchor import Anchor, seal_anchor
from atoll.protocol.averaged import hash_chunk, pack, unpack
from atoll.protocol.calling import Calling, make_seal
from atoll.protocol.codecs import get_codec
from atoll.protocol.commits import START, Position, bitmap, make_body, position_of, verify_commit
from atoll.protocol.control import Ballot, Control
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Body,
    ChunkEntry,
    Commit,
    Member,
    Seal,
    Vote,
    decode,
    encode,
    hash_of,
    head_of,
    seal_bytes,
    vote_bytes,
)
from atoll.protocol.reduce import CONTRIBUTION, Hello
from atoll.protocol.state import GlobalState

SPECIFICATION = Path(__file__).parents[2] / "docs/protocol.md"
A = Ed25519Signer.from_seed(bytes(range(32)))
B = Ed25519Signer.from_seed(bytes(range(32, 64)))
PARAMETERS, CHUNK = 70, 64
LAYOUT = ChunkLayout(PARAMETERS, CHUNK)
CODEC = get_codec("int8")
PEERS = sorted([A, B], key=lambda signer: signer.peer_id)
NONCES = {A.peer_id: bytes([0xAA]) * 16, B.peer_id: bytes([0xBB]) * 16}
WEIGHTS = {A.peer_id: 200, B.peer_id: 100}


def manifest() -> Manifest:
    state = GlobalState.fresh(LAYOUT, np.zeros(PARAMETERS, np.float32))
    return Manifest.make(
        "example", parameters=PARAMETERS, theta0=state.digest().hex(), state={"chunk": CHUNK},
        round={
            "inner_steps": 50, "quorum": 2, "max_group": 16, "silence": 5.0, "grace": 0.25, "overlap": 0,
            "merge": "carry", "mix": 0.5, "weight_cap": 25600, "first_lease": 100, "max_lease": 400,
        },
        outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6}, codec={"name": "int8", "error_feedback": 1.0},
        budget={"rounds": 60},
    ).sign(A)  # fmt: skip


def contribution(signer: Ed25519Signer) -> NDArray[np.float32]:
    """x of a peer: (i mod 7 - 3) / 256 for A, (i mod 5 - 2) / 512 for B."""
    i = np.arange(PARAMETERS)
    values = (i % 7 - 3) / 256 if signer is A else (i % 5 - 2) / 512
    return values.astype(np.float32)


def seal_of(call: int, round: int, base: Position, rules: Manifest, *, weighed: bool) -> Seal:
    """The roster that A seals when B has entered its call."""
    members = {
        signer.peer_id: Member(
            signer.peer_id, NONCES[signer.peer_id], WEIGHTS[signer.peer_id] if weighed else 0, 50 if weighed else 0,
            200 if weighed else 100, 0.0, 0.0, True,
        )
        for signer in (A, B)
    }  # fmt: skip
    calling = Calling(bytes([call]) * 16, round, base.head, {B.peer_id})
    calling.entered[B.peer_id] = members[B.peer_id]
    return make_seal(calling, members[A.peer_id], coordinator=A.peer_id, manifest=rules, layout=LAYOUT)


def averaged(index: int) -> bytes:
    """An averaged chunk, as its reducer makes it."""
    total = np.zeros(LAYOUT.size(index), np.float32)
    for signer in PEERS:
        payload = CODEC.encode(contribution(signer)[LAYOUT.span(index)])
        CODEC.accumulate(bytes(payload), float(WEIGHTS[signer.peer_id]), total)
    total /= np.float32(sum(WEIGHTS.values()))
    return pack(index, bitmap([0, 1], 2), sum(WEIGHTS.values()), CODEC.encode(total))


def votes_of(commit_id: bytes) -> list[Vote]:
    return [Vote(member, signer.sign(vote_bytes(commit_id))) for member, signer in enumerate(PEERS)]


@dataclass
class Example:
    """Two commits of a run of two: leases alone, then a first average."""

    rules: Manifest
    seals: list[Seal]
    chunks: list[bytes]
    bodies: list[Body]
    commits: list[Commit]
    digests: list[bytes]


def example() -> Example:
    rules = manifest()
    state = GlobalState.fresh(LAYOUT, np.zeros(PARAMETERS, np.float32))
    first = seal_of(0x01, 1, START, rules, weighed=False)
    body1 = make_body(first, hash_of(first), START, state.digest(), [], rules, LAYOUT)
    position = position_of(body1, hash_of(body1))
    second = seal_of(0x02, 2, position, rules, weighed=True)
    chunks = [averaged(index) for index in range(LAYOUT.count)]
    entries = [ChunkEntry(hash_chunk(data), unpack(data).contributors) for data in chunks]
    body2 = make_body(second, hash_of(second), position, state.digest(), entries, rules, LAYOUT)
    digests = [state.digest()]
    means: list[NDArray[np.float32] | None] = []
    for index, data in enumerate(chunks):
        mean = np.empty(LAYOUT.size(index), np.float32)
        CODEC.decode(unpack(data).payload, mean.size, mean)
        means.append(mean)
    state.apply(means, lr=0.7, mu=0.6)
    digests.append(state.digest())
    bodies = [body1, body2]
    commits = [Commit(body, votes_of(hash_of(body))) for body in bodies]
    return Example(rules, [first, second], chunks, bodies, commits, digests)


def vectors() -> dict[str, bytes]:
    """Everything in the document's block, by name."""
    made = example()
    first, second = made.seals
    roster, commit = hash_of(second), hash_of(made.bodies[1])
    signature = A.sign(seal_bytes(roster))
    part = next(part for part in second.parts if PEERS[part.reducer] is A)
    b = PEERS.index(B)
    vote = made.commits[1].votes[b]
    ours = CODEC.encode(contribution(B)[LAYOUT.span(part.first)])
    return {
        "run id": made.rules.run_id,
        "state digest at the start": made.digests[0],
        "seal 1": encode(first),
        "roster id 1": hash_of(first),
        "body 1": encode(made.bodies[0]),
        "commit id 1": hash_of(made.bodies[0]),
        "seal 2": encode(second),
        "roster id 2": roster,
        "seal signature 2": signature,
        "hello": encode(Hello(second, signature, part.first, part.count, part.first)),
        "contribution": bytes([CONTRIBUTION]) + part.first.to_bytes(4, "big") + ours,
        "averaged chunk 0": made.chunks[0],
        "hash of averaged chunk 0": hash_chunk(made.chunks[0]),
        "averaged chunk 1": made.chunks[1],
        "hash of averaged chunk 1": hash_chunk(made.chunks[1]),
        "body 2": encode(made.bodies[1]),
        "commit id 2": commit,
        "ballot": encode(Ballot(roster, made.bodies[1], [vote])),
        "vote signature of A": made.commits[1].votes[PEERS.index(A)].signature,
        "state digest after commit 2": made.digests[1],
        "anchor": seal_anchor(Anchor(made.rules.run_id, 1_760_000_000, head_of(made.bodies[1], commit)), A),
    }


def block(values: dict[str, bytes]) -> str:
    """The vectors as the document shows them."""
    lines = []
    for name, data in values.items():
        lines.append(f"{name} ({len(data)} bytes)")
        text = data.hex()
        lines += [f"    {text[at : at + 112]}" for at in range(0, len(text), 112)]
    return "\n".join(lines)


def parse(text: str) -> dict[str, bytes]:
    """The inverse of :func:`block`, of the document's block marked ``vectors``."""
    found = re.search(r"^```vectors\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, "docs/protocol.md has no block of vectors"
    values: dict[str, str] = {}
    sizes: dict[str, int] = {}
    name = ""
    for line in found[1].splitlines():
        if line.startswith("    "):
            values[name] += line.strip()
        elif heading := re.fullmatch(r"(.+) \((\d+) bytes\)", line):
            name = heading[1]
            values[name], sizes[name] = "", int(heading[2])
    data = {name: bytes.fromhex(text) for name, text in values.items()}
    assert {name: len(value) for name, value in data.items()} == sizes
    return data


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the documents are not beside the tests")
def test_vectors_of_the_specification() -> None:
    written = parse(SPECIFICATION.read_text(encoding="utf-8"))
    computed = vectors()
    assert list(written) == list(computed)
    for name, data in computed.items():
        assert written[name] == data, f"{name}: docs/protocol.md and the code differ"


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the documents are not beside the tests")
def test_the_canonical_manifest_of_the_example_is_written_out() -> None:
    text = "".join(SPECIFICATION.read_text(encoding="utf-8").split())
    assert "".join(manifest().canonical().decode().split()) in text


def test_the_example_is_a_valid_chain() -> None:
    made = example()
    for commit, body in zip(made.commits, made.bodies, strict=True):
        assert verify_commit(commit, made.rules, LAYOUT, A) == hash_of(body)
        assert decode(encode(commit), Commit) == commit
    ballot = Ballot(hash_of(made.seals[1]), made.bodies[1], made.commits[1].votes)
    assert decode(encode(ballot), Control) == ballot  # type: ignore[arg-type]


if __name__ == "__main__":
    print(manifest().canonical().decode())
    print(block(vectors()))
