"""The manifest: a run's constitution, one file that says all its peers must agree on.

It is a TOML file. Its canonical form (RFC 8785 JSON of everything but the signature) hashes to the run id, so two
runs of one name cannot mix; the owner signs it with Ed25519. The tables ``[model]``, ``[data]`` and ``[inner]`` are
opaque here: flat, scalars only, given their meaning by the node. docs/wire/records.md is the specification.
"""

from __future__ import annotations

import math
import os
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from blake3 import blake3
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from .canonical import canonical_json
from .codecs import CODECS
from .errors import ManifestError, SignatureError, VersionError, why_unreadable
from .explain import explain, shown
from .fragments import make_layout
from .identity import Signer, public_key_of, verify
from .layout import ChunkLayout
from .lowrank import LowRankLayout, largest_rank
from .merging import Merging, Weights
from .messages import MAX_CHUNKS, MAX_MEMBERS
from .radial import NORM_BYTES, Radial
from .schedule import By, Schedule
from .stale import Rule, Stale
from .toml import toml_array, toml_value, wrapped_comment
from .transport import PeerId

__all__ = ["MAX_MANIFEST", "PROTOCOL", "Manifest", "Scalar", "Scalars", "explain"]

PROTOCOL = 1
"""Version of the protocol that this package speaks."""
MAX_MANIFEST = 256 * 1024
"""Bytes of the longest manifest, as TOML and in canonical form."""
MAX_SAFE_INTEGER = 2**53
"""Beyond it not every integer is a float64, so the canonical form would not be one."""
MAX_PEERS = 4096
MAX_FRAGMENTS = 64
LATER = (("round", "fragments"), ("round", "packing"), ("state", "layers"))
"""Fields that need not stand in a manifest, nor are in its canonical form, where the model is one fragment (but for
the layers, where the average goes by tensors or matrices travel as factors)."""
MAX_NORMS = 1 << 20
"""Bytes of all norms in one averaged chunk."""
OPTIONAL: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("round", "by"): "steps",
        ("round", "every"): 0,
        ("round", "weights"): "tokens",
        ("round", "average"): "mean",
        ("round", "stale"): "keep",
        ("round", "max_age"): 0,
        ("round", "least_steps"): 0,
        ("codec", "version"): 1,
        ("codec", "rank"): 0,
        ("codec", "window"): 0,
        ("codec", "kept"): 0,
        ("state", "embeddings"): (),
        ("state", "columns"): (),
    }
)
"""Fields that need not stand there, nor do in the canonical form, where they have these values."""
MAX_LAYERS = 4096
MAX_TENSORS = 65536
MAX_RANK = 1024
MAX_KEYS = 64
MAX_TEXT = 4096

Scalar = str | int | float | bool

_DIGEST = r"^[0-9a-f]{64}$"
_HEX = r"^([0-9a-f]{64,256})?$"


class Scalars(dict[str, Scalar]):
    """A flat table of scalars that cannot be changed. Floats with an integral value are integers: 1.0 is 1."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a manifest's table cannot be changed; make a new manifest with Manifest.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Scalars], tuple[dict[str, Scalar]]]:
        return Scalars, (dict(self),)


def _scalars(table: Any) -> Scalars:
    if not isinstance(table, Mapping):
        raise ValueError(f"expected a table, found {shown(table)}")
    problems = []
    if len(table) > MAX_KEYS:
        problems.append(f"expected at most {MAX_KEYS} keys, found {len(table)}")
    values: dict[str, Scalar] = {}
    for key, value in table.items():
        if not isinstance(key, str) or not 0 < len(key) <= 64 or not key.replace("_", "a").replace("-", "a").isalnum():
            problems.append(f"key {shown(key)}: expected 1 to 64 letters, digits, _ or -")
        elif not key.isascii():
            problems.append(f"key {shown(key)}: expected ASCII characters")
        elif isinstance(value, bool):
            values[key] = value
        elif isinstance(value, str):
            if len(value) > MAX_TEXT:
                problems.append(f"{key}: expected at most {MAX_TEXT} characters, found {len(value)}")
            elif any("\ud800" <= letter <= "\udfff" for letter in value):
                problems.append(f"{key}: expected Unicode text, found half a surrogate pair")
            values[key] = value
        elif isinstance(value, int | float):
            if not math.isfinite(value):
                problems.append(f"{key}: expected a finite number, found {value}")
            elif isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER:
                problems.append(f"{key}: expected an integer within ±2^53, found {value}")
            elif isinstance(value, float) and value.is_integer() and abs(value) <= MAX_SAFE_INTEGER:
                values[key] = int(value)
            else:
                values[key] = value
        else:
            problems.append(f"{key}: expected a string, a number or a boolean, found {shown(value)}")
    if problems:
        raise ValueError("; ".join(problems))
    return Scalars(values)


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        below = 1 << (value.bit_length() - 1)
        raise ValueError(f"expected a power of two, found {value} (near it: {below} and {2 * below})")
    return value


def _tuples(value: Any) -> Any:
    """Lists, and lists in them, as tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _peer(text: str) -> str:
    try:
        public_key_of(text)
    except ValueError as error:
        raise ValueError(f"{shown(text)} is not a peer id: {error}") from None
    return text


Table = Annotated[Scalars, PlainValidator(_scalars)]
Count = Annotated[int, Field(ge=1, le=MAX_SAFE_INTEGER)]
Layers = Annotated[
    tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...], BeforeValidator(lambda value: _tuples(value))
]
Numbers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)], ...], BeforeValidator(lambda value: _tuples(value))
]
Columns = Annotated[tuple[Count, ...], BeforeValidator(lambda value: _tuples(value))]
Strings = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class _Section(BaseModel):
    """A typed table: exact types, no unknown keys, no NaN, cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RoundSection(_Section):
    """[round]: how long a round is and who takes part."""

    inner_steps: int = Field(ge=1, le=10**6, description="inner steps between two outer steps (H)")
    fragments: int = Field(
        default=1,
        ge=1,
        le=MAX_FRAGMENTS,
        description="parts of the model (P) that are averaged in turn, each every H steps; 1: all of it at once",
    )
    packing: Literal["balanced", "strided"] = Field(
        default="balanced",
        description='what goes into a fragment: "balanced", whole tensors, so that all are of a size; "strided", every '
        "P-th layer",
    )
    by: By = Field(
        default="steps",
        description='what makes a round due: "steps", a quorum has done inner_steps; "tokens", all peers together hold '
        'so many that are not averaged; "time", so long after the last outer step',
    )
    every: float = Field(default=0, ge=0, le=MAX_SAFE_INTEGER, description="those tokens, or seconds")
    least_steps: int = Field(
        default=0, ge=0, le=10**6,
        description="H falls with the estimated rank (codec.window), in proportion, down to this; 0: H is inner_steps",
    )  # fmt: skip
    quorum: int = Field(ge=1, le=MAX_MEMBERS, description="peers that must be ready before a group is called")
    max_group: int = Field(ge=1, le=MAX_MEMBERS, description="largest averaging group")
    silence: float = Field(ge=0.1, le=120, description="seconds of silence that count as death (T)")
    grace: float = Field(
        ge=0, le=1, description="wait for late peers, as a share of the time that the inner steps take"
    )
    overlap: int = Field(
        ge=0, le=10**6, description="inner steps that a peer may run ahead while its round is in flight (τ); 0: none"
    )
    merge: Literal["carry", "mix", "overwrite", "eager", "delay"] = Field(
        description='what becomes of those steps: "carry" keeps them; "mix", "overwrite", "eager" and "delay" are '
        "other published rules"
    )
    mix: float = Field(ge=0, lt=1, description='share of the local parameters that "mix" keeps (α)')
    average: Literal["mean", "radial"] = Field(
        default="mean",
        description='what becomes of contributions: their weighted "mean", or "radial", tensor by tensor the mean of '
        "their norms times their mean direction (arXiv 2604.21428)",
    )
    weights: Weights = Field(
        default="tokens",
        description='what a contribution weighs in the average: its "tokens"; "tokens2/steps", tokens · tokens / inner '
        'steps (arXiv 2604.21428); "equal"',
    )
    weight_cap: Count = Field(description="most tokens that one contribution counts for")
    stale: Rule = Field(
        default="keep",
        description='what a contribution counts for that has missed rounds: "keep", all of it; "shorten", its tokens, '
        'but no more than the length of a round; "discount", its tokens over 1 + the rounds missed; "drop", nothing, '
        "and its peer begins anew",
    )
    max_age: int = Field(default=0, ge=0, le=1024, description='rounds that it may have missed before "drop" drops it')
    first_lease: Count = Field(description="sample units leased to a newcomer")
    max_lease: Count = Field(description="most sample units in one lease")

    @property
    def in_flight(self) -> int:
        """Rounds that may be in flight at once, each of another fragment (W): as many as begin within the overlap."""
        return max(-(-self.overlap * self.fragments // self.inner_steps), 1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.quorum > self.max_group:
            problems.append(f"quorum = {self.quorum} exceeds max_group = {self.max_group}: no group could be called")
        if self.first_lease > self.max_lease:
            problems.append(f"first_lease = {self.first_lease} exceeds max_lease = {self.max_lease}")
        if self.max_lease < self.inner_steps:
            problems.append(
                f"max_lease = {self.max_lease} is below inner_steps = {self.inner_steps}, and a step takes a unit "
                "or more: no peer could ever finish its inner steps"
            )
        problems += self._overlap_problems()
        problems += self._due_problems()
        problems += self._least_problems()
        if self.max_age and self.stale != "drop":
            problems.append(
                f'max_age = {self.max_age} with stale = "{self.stale}" does nothing; set it to 0, or stale to "drop"'
            )
        if self.stale == "shorten" and self.in_flight > 1:
            problems.append(
                f'stale = "shorten" with overlap = {self.overlap} and fragments = {self.fragments}: who is late stands '
                "still for its round, and rounds of several fragments would be in flight at once; the longest overlap "
                f'is {self.inner_steps // self.fragments} (inner_steps / fragments), or use stale = "drop"'
            )
        if self.stale == "discount" and self.weights == "equal":
            problems.append(
                'stale = "discount" with weights = "equal": there are no tokens to discount; use weights = "tokens", '
                'or stale = "keep"'
            )
        if self.weight_cap < self.inner_steps:
            problems.append(f"weight_cap = {self.weight_cap} is below inner_steps = {self.inner_steps}, a token a step")
        if self.weights == "tokens2/steps" and self.weight_cap**2 > MAX_SAFE_INTEGER * self.inner_steps:
            problems.append(
                f'weight_cap = {self.weight_cap} with weights = "tokens2/steps" lets a contribution weigh more than '
                f"2^53; the largest is {math.isqrt(MAX_SAFE_INTEGER * self.inner_steps)}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _due_problems(self) -> list[str]:
        rule = f'by = "{self.by}"'
        if self.by == "steps":
            does_nothing = (
                f'every = {self.every:g} with {rule} does nothing; leave it out, or set by to "tokens" or "time"'
            )
            return [does_nothing] if self.every else []
        problems = []
        if self.grace:
            problems.append(
                f"grace = {self.grace:g} with {rule}: grace is for those that are about to finish their inner steps, "
                "and these rounds don't wait for any; set grace to 0"
            )
        if self.in_flight > 1:
            problems.append(
                f"overlap = {self.overlap} with {rule}: rounds of several fragments would be in flight at once, and "
                "what makes the next one due counts from the last commit; the longest is "
                f"{self.inner_steps // self.fragments} (inner_steps / fragments)"
            )
        if self.by == "time":
            if not 1 <= self.every <= 10**6:
                nearest = 1 if self.every < 1 else 10**6
                problems.append(
                    f"every = {self.every:g} with {rule}: expected 1 to 1000000 seconds; the nearest is {nearest}"
                )
            return problems
        least, most = self.quorum * self.fragments, self.weight_cap * self.max_group
        if not least <= self.every <= most or self.every % 1:
            nearest = min(max(round(self.every), least), most)
            problems.append(
                f"every = {self.every:g} with {rule}: expected a whole number of tokens, from one of each peer of a "
                f"quorum to what a group of max_group can hand over by weight_cap; the nearest is {nearest}"
            )
        return problems

    def _least_problems(self) -> list[str]:
        least = self.least_steps
        if least > self.inner_steps:
            return [f"least_steps = {least} exceeds inner_steps = {self.inner_steps}; the most is {self.inner_steps}"]
        if least and self.by != "steps":
            return [f'least_steps = {least} with by = "{self.by}" does nothing; leave it out, or set by to "steps"']
        needed = max(self.fragments, self.overlap * self.fragments)
        if 0 < least < needed:
            return [
                f"least_steps = {least} leaves fragments = {self.fragments} rounds with overlap = {self.overlap} no "
                f"room; the least is {needed}"
            ]
        return []

    def _overlap_problems(self) -> list[str]:
        steps, overlap, fragments = self.inner_steps, self.overlap, self.fragments
        if fragments > steps:
            return [
                f"fragments = {fragments} exceeds inner_steps = {steps}: each has a round in that many steps; the most "
                f"is {steps}"
            ]
        if overlap > steps:
            return [
                f"overlap = {overlap} exceeds inner_steps = {steps}: a round would begin before the last one is "
                f"applied; the longest is {steps}"
            ]
        if overlap and steps <= self.max_lease < steps + overlap:
            return [
                f"max_lease = {self.max_lease} is below inner_steps + overlap = {steps + overlap}, and a step takes a "
                "unit or more: no peer would have samples to run ahead with"
            ]
        if self.merge != "carry" and overlap == 0:
            return [
                f'merge = "{self.merge}" with overlap = 0 does nothing, for no step is made while a round is in '
                'flight; set overlap to 1 or more, or merge to "carry"'
            ]
        if overlap == steps and (self.merge == "overwrite" or (self.merge == "mix" and self.mix == 0)):
            rule = 'merge = "overwrite"' if self.merge == "overwrite" else 'merge = "mix" with mix = 0'
            nearest = f"overlap = {steps - 1}" if steps > 1 else 'merge = "carry"'
            return [f"{rule} and overlap = inner_steps = {steps} can lose as many steps as it averages; use {nearest}"]
        return []


class OuterSection(_Section):
    """[outer]: the outer optimizer (DiLoCo, arXiv:2311.08105)."""

    optimizer: Literal["nesterov", "delayed-nesterov", "sgd"] = Field(
        description='"nesterov"; "delayed-nesterov" (arXiv 2401.09135) where a round holds the work of few of the '
        'peers; "sgd" without momentum, as published for sparse contributions (arXiv 2508.15706: lr 1)'
    )
    lr: float = Field(gt=0, le=10, description="outer learning rate")
    momentum: float = Field(ge=0, lt=1, description='outer momentum; 0 with "sgd"')
    period: int = Field(
        ge=1, le=1024, description='outer steps over which "delayed-nesterov" takes its momentum; 1 with the others'
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.optimizer == "sgd" and self.momentum:
            problems.append(
                f'momentum = {self.momentum} with optimizer = "sgd", which has none; set momentum to 0, or optimizer '
                'to "nesterov"'
            )
        if self.optimizer != "delayed-nesterov" and self.period > 1:
            problems.append(
                f'period = {self.period} with optimizer = "{self.optimizer}", which takes its momentum in each step; '
                'set period to 1, or optimizer to "delayed-nesterov"'
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class CodecSection(_Section):
    """[codec]: how pseudo-gradients are packed."""

    name: Literal["float32", "float16", "int8", "int4", "sparse", "lowrank"] = Field(
        description='"float32", "float16", "int8", "int4" (blockwise), "sparse" (the largest 64 of 4096: a round of 2, '
        '4 or 8 peers moves 91, 57 or 34 times less than with "float32", with "int4" 7.5) or "lowrank" (matrices as '
        "factors)"
    )
    version: int = Field(
        default=1, ge=1, le=2**16,
        description="version of that codec's bytes, and of those of its averages: 2 for \"sparse\", 1 for the others",
    )  # fmt: skip
    rank: int = Field(default=0, ge=0, le=MAX_RANK, description='rank of the factors of "lowrank"; 0 with the others')
    window: int = Field(
        default=0, ge=0, le=10**6,
        description="outer steps of a fragment after which the rank is estimated anew, at most rank; 0: never",
    )  # fmt: skip
    kept: float = Field(
        default=0.0, ge=0, lt=1, description="share of the outer momentum's energy that the estimated rank must hold"
    )
    error_feedback: float = Field(
        ge=0, le=1, description="share of the packing error that is carried to the next round; 0: none"
    )

    @model_validator(mode="after")
    def _known_version(self) -> Self:
        known = CODECS[self.name].version
        if self.version != known:
            newer = "update atoll to take part" if self.version > known else "an older atoll is needed to take part"
            raise VersionError(
                f'codec.version = {self.version} with codec.name = "{self.name}", of which this atoll reads and writes '
                f"version {known} (in a manifest without codec.version it is 1); {newer}, and in a manifest of your "
                f"own set codec.version to {known}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.name in ("sparse", "lowrank") and self.error_feedback == 0:
            lost = "63 of 64 values" if self.name == "sparse" else "all but a few directions of each matrix"
            usual = "0.95" if self.name == "sparse" else "1"
            problems.append(
                f'name = "{self.name}" with error_feedback = 0 would throw {lost} away; set error_feedback to {usual}, '
                "or use another codec"
            )
        if self.name == "lowrank" and self.rank == 0:
            problems.append('name = "lowrank" needs a rank; set rank to 1 or more')
        if self.window and self.name != "lowrank":
            problems.append(
                f'window = {self.window} with name = "{self.name}", which has no rank to estimate; leave it out, or '
                'set name to "lowrank"'
            )
        if self.window and not self.kept:
            problems.append(f"window = {self.window} needs kept, a share between 0 and 1; set kept to 0.9")
        if self.kept and not self.window:
            problems.append(f"kept = {self.kept} without window does nothing; leave it out, or set window to 10")
        if self.name != "lowrank" and self.rank:
            problems.append(
                f'rank = {self.rank} with name = "{self.name}" does nothing; leave it out, or set name to "lowrank"'
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class StateSection(_Section):
    """[state]: the shape of the global state and where it starts."""

    parameters: int = Field(ge=1, le=2**40, description="elements of the flattened model")
    chunk: int = Field(ge=64, le=2**22, description="elements in a chunk, a power of two")
    layers: Layers = Field(
        default=(),
        max_length=MAX_LAYERS,
        description="elements of the tensors of each layer, in flat order, by which fragments are cut and tensors "
        'merged; empty with one fragment and average = "mean"',
    )
    embeddings: Numbers = Field(
        default=(),
        max_length=MAX_LAYERS,
        description='numbers of the tensors, from 0 in flat order, that have a weighted mean where average = "radial"',
    )
    columns: Columns = Field(
        default=(), max_length=MAX_TENSORS, description='columns of each of these tensors, for "lowrank"; else empty'
    )
    theta0: str = Field(pattern=_DIGEST, description="digest of the initial state, hex")
    checkpoint_every: int = Field(ge=1, le=10**6, description="outer steps from one checkpoint to the next (K)")

    _check_chunk = field_validator("chunk")(_power_of_two)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        chunks = -(-self.parameters // self.chunk)
        if chunks > MAX_CHUNKS:
            raise ValueError(
                f"parameters = {self.parameters} makes {chunks} chunks of {self.chunk}, and {MAX_CHUNKS} are allowed; "
                "use larger chunks"
            )
        size = sum(sum(layer) for layer in self.layers)
        if self.layers and size != self.parameters:
            raise ValueError(f"layers of {size} elements together, and parameters = {self.parameters}")
        sizes = [size for layer in self.layers for size in layer]
        if self.columns and len(self.columns) != len(sizes):
            raise ValueError(f"columns of {len(self.columns)} tensors, and layers have {len(sizes)}")
        for size, width in zip(sizes, self.columns, strict=False):
            if size % width:
                raise ValueError(f"columns: {width} columns do not divide a tensor of {size} elements")
        return self


class BudgetSection(_Section):
    """[budget]: how much the run does."""

    rounds: int = Field(
        ge=1, le=10**7, description="outer steps of the whole run, of each fragment; schedules follow them"
    )


class AccessSection(_Section):
    """[access]: who may take part."""

    admit: Literal["open", "list"] = Field(description='"open": whoever comes; "list": only the peers listed')
    peers: Strings = Field(max_length=MAX_PEERS, description="the peer ids admitted by a list")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        for peer in self.peers:
            try:
                _peer(peer)
            except ValueError as error:
                problems.append(str(error))
        problems += [f"{peer} is listed {count} times" for peer, count in Counter(self.peers).items() if count > 1]
        if self.admit == "list" and not self.peers:
            problems.append('admit = "list" with no peers listed: nobody could take part')
        if self.admit == "open" and self.peers:
            problems.append('peers are listed, but admit = "open" ignores them; use admit = "list" or peers = []')
        if problems:
            raise ValueError("; ".join(problems[:5]))
        return self


class Manifest(_Section):
    """A run's manifest. Immutable; every instance is valid by itself, signed or not."""

    protocol: int = Field(description="version of the protocol")
    name: str = Field(min_length=1, max_length=64, description="name of the run, for people")
    owner: str = Field(default="", max_length=128, description="peer id of who signed; empty until signed")
    signature: str = Field(default="", pattern=_HEX, description="the owner's signature, hex; empty until signed")
    model: Table = Field(description="the model; read by the node")
    data: Table = Field(description="the training data; read by the node")
    inner: Table = Field(description="the inner optimizer; read by the node")
    round: RoundSection = Field(description="how long a round is and who takes part")
    outer: OuterSection = Field(description="the outer optimizer")
    codec: CodecSection = Field(description="how pseudo-gradients are packed")
    state: StateSection = Field(description="the global state and where it starts")
    budget: BudgetSection = Field(description="how much the run does")
    access: AccessSection = Field(description="who may take part")

    SUGGESTED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "round": {
            "inner_steps": 50,
            "fragments": 1,
            "packing": "balanced",
            "quorum": 2,
            "max_group": 16,
            "silence": 5.0,
            "grace": 0.25,
            "overlap": 0,
            "merge": "carry",
            "mix": 0.5,
        },
        "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6, "period": 1},
        "codec": {"name": "int8", "error_feedback": 1.0},
        "state": {"checkpoint_every": 10, "layers": ()},
        "budget": {"rounds": 60},
        "access": {"admit": "open", "peers": []},
    }
    """What :meth:`make` fills in. Never used for a manifest that is read: there every field must stand."""

    @field_validator("protocol")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != PROTOCOL:
            newer = "update atoll to take part" if value > PROTOCOL else "an older atoll is needed to take part"
            raise VersionError(f"the run speaks protocol version {value}, and this atoll speaks {PROTOCOL}; {newer}")
        return value

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable() or value.strip() != value or "/" in value or "\\" in value:
            raise ValueError(f"expected printable characters without slashes or outer blanks, found {shown(value)}")
        return value

    @field_validator("owner")
    @classmethod
    def _owner(cls, value: str) -> str:
        return value and _peer(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.access.admit == "list" and self.round.quorum > len(self.access.peers):
            raise ValueError(
                f"round.quorum = {self.round.quorum} exceeds the {len(self.access.peers)} peers of access.peers: "
                "no group could be called"
            )
        if self.round.merge == "eager" and self.outer.optimizer == "delayed-nesterov":
            raise ValueError(
                'round.merge = "eager" previews the outer step of "nesterov" or "sgd", which outer.optimizer = '
                '"delayed-nesterov" does not take; use round.merge = "carry"'
            )
        self._check_rank()
        self._check_fragments()
        self._check_tensors()
        if self.signature and not self.owner:
            raise ValueError("there is a signature, but no owner; sign it again")
        size = len(canonical_json(self._signed_part()))
        if size > MAX_MANIFEST:
            raise ValueError(f"expected at most {MAX_MANIFEST} bytes, found {size}")
        return self

    def _check_rank(self) -> None:
        """Whether matrices can travel as factors, if they are to."""
        codec, state = self.codec, self.state
        if self.round.least_steps and not codec.window:
            raise ValueError(
                f"round.least_steps = {self.round.least_steps} without codec.window does nothing; leave it out, or let "
                'the rank of codec.name = "lowrank" be estimated anew with codec.window = 10 and codec.kept = 0.9'
            )
        if codec.name != "lowrank":
            if state.columns:
                raise ValueError(f'state.columns with codec.name = "{codec.name}" does nothing; leave it out')
            return
        rules = self.round
        if codec.window and rules.overlap > rules.inner_steps // rules.fragments:
            raise ValueError(
                f"codec.window = {codec.window} with overlap = {rules.overlap}: a rank is estimated between two "
                "rounds, and several would be in flight at once; the longest overlap is "
                f"{rules.inner_steps // rules.fragments}"
            )
        if self.outer.optimizer == "sgd":
            raise ValueError(
                'codec.name = "lowrank" finds the directions of its factors in the outer momentum, and outer.optimizer '
                '= "sgd" has none; use outer.optimizer = "nesterov" (its momentum may be 0)'
            )
        if self.round.average == "radial":
            raise ValueError(
                'codec.name = "lowrank" sends parts of tensors, of which round.average = "radial" takes norms; use '
                'round.average = "mean", or codec.name = "int4"'
            )
        if not state.layers or not state.columns:
            raise ValueError(
                'codec.name = "lowrank" needs state.layers and state.columns, the shapes of the model\'s tensors; '
                "signing puts them in"
            )

    def _check_largest_rank(self) -> None:
        layout, rank = self.layout, self.codec.rank
        if not isinstance(layout, LowRankLayout):
            return
        shapes = [(piece.rows, piece.columns) for pieces in layout.pieces for piece in pieces]
        most = largest_rank(shapes)
        if most == 0:
            raise ValueError(
                'codec.name = "lowrank" makes no matrix of the model, in chunks of state.chunk = '
                f'{self.state.chunk} elements, half as large; use larger chunks, or codec.name = "int4"'
            )
        if rank > most:
            rows, columns = max(shapes, key=lambda shape: largest_rank([shape]))
            raise ValueError(
                f"codec.rank = {rank} makes no matrix of the model half as large: the largest in one chunk has {rows} "
                f"rows and {columns} columns; the most is {most}"
            )

    def _check_fragments(self) -> None:
        rules, state = self.round, self.state
        if rules.fragments == 1 and self.codec.name == "lowrank":
            if rules.packing != "balanced":
                raise ValueError(
                    f'round.packing = "{rules.packing}" with round.fragments = 1 does nothing; leave it out, or set '
                    "round.fragments to 2 or more"
                )
            self._check_count()
            return
        if rules.fragments == 1:
            idle = state.layers and rules.average == "mean"
            if rules.packing != "balanced" or idle:
                what = "state.layers" if idle else f'round.packing = "{rules.packing}"'
                raise ValueError(
                    f"{what} with round.fragments = 1 does nothing; leave it out, or set round.fragments to 2 or more"
                )
            return
        if not state.layers:
            raise ValueError(
                f"round.fragments = {rules.fragments} needs state.layers, the sizes of the model's tensors; signing "
                "puts them in"
            )
        tensors, layers = sum(map(len, state.layers)), len(state.layers)
        most, what = (tensors, "tensors") if rules.packing == "balanced" else (layers, "layers")
        if rules.fragments > most:
            raise ValueError(
                f"round.fragments = {rules.fragments} exceeds the {most} {what} of the model (state.layers); the most "
                f"is {most}"
            )
        self._check_count()

    def _check_count(self) -> None:
        if self.layout.count > MAX_CHUNKS:
            raise ValueError(
                f"round.fragments = {self.round.fragments} makes {self.layout.count} chunks, and {MAX_CHUNKS} are "
                "allowed; use larger chunks"
            )
        self._check_largest_rank()

    def _check_tensors(self) -> None:
        rules, state = self.round, self.state
        if rules.average == "mean":
            if state.embeddings:
                raise ValueError(
                    'state.embeddings with round.average = "mean" does nothing, for all tensors have a mean; leave it '
                    'out, or set round.average to "radial"'
                )
            return
        if not state.layers:
            raise ValueError(
                'round.average = "radial" needs state.layers, the sizes of the model\'s tensors; signing puts them in'
            )
        tensors = sum(map(len, state.layers))
        last = -1
        for number in state.embeddings:
            if not last < number < tensors:
                raise ValueError(
                    f"state.embeddings: expected rising numbers of tensors from 0 to {tensors - 1}, found {number} "
                    f"after {last}" if last >= 0 else
                    f"state.embeddings: expected numbers of tensors from 0 to {tensors - 1}, found {number}"
                )  # fmt: skip
            last = number
        if len(state.embeddings) == tensors:
            raise ValueError(
                'round.average = "radial" with all tensors in state.embeddings is the mean; set round.average to "mean"'
            )
        most = MAX_NORMS // (NORM_BYTES * self.merging.most_norms)
        if rules.max_group > most:
            raise ValueError(
                f'round.max_group = {rules.max_group} with round.average = "radial" makes more than {MAX_NORMS} bytes '
                f"of norms a chunk, of {self.merging.most_norms} tensors; the most is {most}, or use smaller chunks"
            )

    @cached_property
    def layout(self) -> ChunkLayout:
        """How the model is cut into fragments and chunks."""
        state, rules = self.state, self.round
        return make_layout(
            state.parameters, state.chunk, state.layers, rules.fragments, rules.packing, state.columns, self.codec.rank
        )

    @cached_property
    def merging(self) -> Merging:
        """How contributions become an average."""
        rules, state = self.round, self.state
        radial = Radial(self.layout, state.layers, state.embeddings) if rules.average == "radial" else None
        return Merging(rules.weights, rules.weight_cap, rules.inner_steps, radial)

    @property
    def stale(self) -> Stale:
        """What becomes of contributions that have missed rounds."""
        return Stale(self.round.stale, self.round.max_age, self.round.inner_steps)

    @cached_property
    def schedule(self) -> Schedule:
        """When rounds are due."""
        rules, fragments = self.round, self.round.fragments
        regular = self.budget.rounds * fragments
        return Schedule(rules.by, rules.every, rules.quorum, fragments, rules.weight_cap, regular)

    def inner_steps(self, rank: int) -> int:
        """H in a round with factors of that rank: what a round sends and how often it does stay in proportion, as in
        DiLoCoX (arXiv 2506.21263). 0: the manifest's own."""
        rules = self.round
        if not rank or not rules.least_steps:
            return rules.inner_steps
        return max(-(-rules.inner_steps * rank // self.codec.rank), rules.least_steps)

    @property
    def regular_steps(self) -> int:
        """Outer steps until the run winds up: ``budget.rounds`` of each fragment."""
        return self.budget.rounds * self.round.fragments

    @property
    def outer_steps(self) -> int:
        """Outer steps of the whole run: ``budget.rounds`` of each fragment. What is trained between the last round of
        a fragment and the end is averaged in one more, so that each but the last in order has that."""
        return self.regular_steps + self.round.fragments - 1

    # ------------------------------------------------------------------ making one

    @classmethod
    def make(
        cls,
        name: str,
        *,
        parameters: int,
        theta0: str,
        model: Mapping[str, Scalar] | None = None,
        data: Mapping[str, Scalar] | None = None,
        inner: Mapping[str, Scalar] | None = None,
        **sections: Mapping[str, Any],
    ) -> Manifest:
        """An unsigned manifest, with :attr:`SUGGESTED` values for what ``sections`` (round, outer, …) leave out.

        parameters: elements of the flattened model. theta0: the initial state's digest, hex.
        What depends on the model's batch is guessed with one sequence of 64 tokens a step: callers who know better
        pass round = {weight_cap, first_lease, max_lease}.
        """
        raw: dict[str, Any] = {"protocol": PROTOCOL, "name": name}
        raw |= {"model": model or {}, "data": data or {}, "inner": inner or {}}
        for section, values in cls.SUGGESTED.items():
            raw[section] = {**values, **sections.pop(section, {})}
        raw |= sections
        raw["codec"] = with_version(raw["codec"])
        chunk = suggested_chunk(parameters, raw["round"].get("fragments"))
        raw["state"] = {"parameters": parameters, "theta0": theta0, "chunk": chunk} | raw["state"]
        steps = raw["round"]["inner_steps"]
        if isinstance(steps, int):
            first = raw["round"].setdefault("first_lease", 2 * steps)
            if isinstance(first, int):
                raw["round"].setdefault("max_lease", 4 * first)
            raw["round"].setdefault("weight_cap", 8 * steps * 64)
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Manifest:
        """Validate plain values.

        Raises :class:`VersionError` for another protocol version and :class:`ManifestError`, naming every problem in
        one line, for anything else.
        """
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            raise ManifestError(explain(error, cls)) from None

    def replace(self, **changes: Any) -> Manifest:
        """This manifest with some fields changed, unsigned: ``manifest.replace(name="x", budget={"rounds": 12})``.

        Tables are merged; other fields are replaced.
        """
        raw = self.model_dump(exclude={"owner", "signature"})
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(value, Mapping) and key in raw else value
            if key == "codec" and isinstance(value, Mapping) and "version" not in value:
                del raw[key]["version"]
                raw[key] = with_version(raw[key])
        return self.from_dict(raw)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's copy, but validated."""
        return self.model_validate(self.model_dump() | dict(update or {}))

    # ------------------------------------------------------------------ identity

    def written(self) -> dict[str, Any]:
        """All fields as they stand in a file: those of :data:`LATER` with several fragments only, those of
        :data:`OPTIONAL` where they say something, so that whoever does not know them can read all other manifests, and
        these keep their run ids."""
        values = self.model_dump()
        if self.round.fragments == 1:
            for section, key in LATER:
                if key != "layers" or not values[section][key]:
                    del values[section][key]
        for (section, key), usual in OPTIONAL.items():
            if values[section][key] == usual:
                del values[section][key]
        return values

    def _signed_part(self) -> dict[str, Any]:
        signed = self.written()
        del signed["signature"]
        return signed

    def canonical(self) -> bytes:
        """The canonical form: RFC 8785 JSON of everything but the signature (and :data:`LATER`, :data:`OPTIONAL`)."""
        return canonical_json(self._signed_part())

    @cached_property
    def run_id(self) -> bytes:
        """BLAKE3 of the canonical form, 32 bytes. Signing changes it, for the owner is part of it."""
        return blake3(self.canonical()).digest()

    def sign(self, signer: Signer) -> Manifest:
        """This manifest with ``signer`` as its owner, and signed."""
        owned = self.from_dict(self._signed_part() | {"owner": signer.peer_id})
        return self.from_dict(owned._signed_part() | {"signature": signer.sign(manifest_bytes(owned.run_id)).hex()})

    def check_signature(self, path: str | os.PathLike[str] = "FILE") -> None:
        """Raise :class:`SignatureError` unless the owner's signature is there and verifies. path: whence it was read,
        for the message."""
        if not self.owner or not self.signature:
            command = f"atoll manifest sign {shlex.quote(os.fspath(path))} --key owner.key"
            raise SignatureError(f"the manifest is not signed yet; sign it with: {command}")
        if not verify(PeerId(self.owner), manifest_bytes(self.run_id), bytes.fromhex(self.signature)):
            raise SignatureError(
                f"the signature of the manifest is not {self.owner}'s: it was changed after signing; get the "
                "original, or sign it again if it is yours"
            )

    def __hash__(self) -> int:
        return hash((self.run_id, self.signature))

    def admits(self, peer: str) -> bool:
        """Whether the access rule lets ``peer`` take part."""
        return self.access.admit == "open" or peer in self._admitted

    @cached_property
    def _admitted(self) -> frozenset[str]:
        return frozenset(self.access.peers)

    # ------------------------------------------------------------------ as text

    @classmethod
    def from_toml(cls, text: str | bytes) -> Manifest:
        """Read a manifest. Does not check the signature. Errors as :meth:`from_dict`."""
        return cls.from_dict(read_toml(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read a manifest file. Errors as :meth:`from_dict`, with the path in front."""
        try:
            return cls.from_toml(read_manifest_file(path))
        except VersionError as error:
            raise VersionError(f"{path}: {error}") from None
        except ManifestError as error:
            raise ManifestError(_in_file(path, error)) from None

    def to_toml(self, comments: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> str:
        """The manifest as TOML, each field with a comment that teaches it; :meth:`from_toml` reads it back.

        comments: by table and key, for the tables that are opaque here.
        """
        values = self.written()
        lines = ["# Manifest of an atoll run. Its hash is the run id; whoever changes a value makes another run.", ""]
        tables = []
        for key, field in type(self).model_fields.items():
            if isinstance(values[key], dict):
                tables += ["", f"# {field.description}", f"[{key}]"]
                section = getattr(type(getattr(self, key)), "model_fields", {})
                for inner, value in values[key].items():
                    known = section[inner].description if inner in section else comments.get(key, {}).get(inner)
                    tables.append(_line(inner, value, known or ""))
            else:
                lines.append(_line(key, values[key], field.description or ""))
        return "\n".join(lines + tables) + "\n"


def _line(key: str, value: Any, comment: str) -> str:
    text = toml_array(value) if isinstance(value, list | tuple) else toml_value(value)
    return wrapped_comment(f"{key} = {text}", comment)


def _in_file(path: str | os.PathLike[str], error: ManifestError) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def with_version(codec: Mapping[str, Any]) -> dict[str, Any]:
    """The codec's table with the version that this package writes, where it names none."""
    name = codec.get("name")
    known = CODECS.get(name) if isinstance(name, str) else None
    return {"version": known.version, **codec} if known is not None else dict(codec)


def manifest_bytes(run_id: bytes) -> bytes:
    """What the owner signs under a manifest."""
    return b"atoll manifest 1\0" + run_id


def suggested_chunk(parameters: int, fragments: object = 1, largest: int = 0) -> int:
    """Elements in a chunk: a power of two near a 128th of what a round averages, one of so many ``fragments`` of the
    model (all of it where an unchecked manifest says nonsense there), between 2^12 and 2^20; and where matrices travel
    as factors, the largest of them having so many elements, one that holds it whole, up to 2^20. The first average of
    a part can go out when its first chunk is in, so few chunks make a link wait; each costs a little time of a
    processor, so many do, too."""
    if largest:
        return max(min(1 << (largest - 1).bit_length(), 1 << 20), suggested_chunk(parameters, fragments))
    if isinstance(fragments, int) and fragments > 0:
        parameters //= fragments
    return min(max(1 << max(parameters // 128, 1).bit_length() - 1, 1 << 12), 1 << 20)


def read_manifest_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a manifest file, bounded. Raises :class:`ManifestError` when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_MANIFEST + 1)
    except FileNotFoundError:
        raise ManifestError(f"there is no manifest at {path}; write one with: atoll manifest new -o {path}") from None
    except OSError as error:
        raise ManifestError(f"{why_unreadable(path, error)}; expected a manifest, a TOML file") from None
    return data


def read_toml(text: str | bytes) -> dict[str, Any]:
    """Parse the text of a manifest, bounded. Raises :class:`ManifestError`."""
    try:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > MAX_MANIFEST:
            raise ManifestError(f"the manifest is too long: expected at most {MAX_MANIFEST} bytes")
        return tomllib.loads(data.decode())
    except UnicodeError:
        raise ManifestError("the manifest is not a TOML file: it is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ManifestError(f"the manifest is not a TOML file: {error}") from None
