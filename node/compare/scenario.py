"""What a manifest does not say of a swarm: how many peers, how fast, what gets lost, who dies, what is tried out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from atoll.protocol.errors import ConfigError
from atoll.protocol.explain import explain


class Death(NamedTuple):
    """A peer that is gone for a while and comes back with nothing but the global parameters."""

    peer: int
    """Number of the peer, from 0."""
    begins: float
    """Share (0 … 1) of the run at which it dies."""
    ends: float
    """Share at which it is back; 1: never."""


def _tuples(value: Any) -> Any:
    return tuple(tuple(v) if isinstance(v, list) else v for v in value) if isinstance(value, list | tuple) else value


Speeds = Annotated[tuple[Annotated[float, Field(gt=0, le=64)], ...], BeforeValidator(_tuples)]
Deaths = Annotated[tuple[Death, ...], BeforeValidator(_tuples)]


_NOT_REAL = {
    "method": "it is one process, and simulated",
    "speeds": "the nodes of one machine are equally fast",
    "idle": "real nodes train on until they are called",
    "lost": "nothing gets lost on loopback",
    "void": "rounds come to nothing when something fails",
    "left_out": "the protocol keeps what is left out",
    "deaths": "nobody ends the processes",
    "fragments": "set manifest.round.fragments",
    "rank": 'set manifest.codec.name to "lowrank" and manifest.codec.rank',
    "data_seed": "the order of the text follows from manifest.model.seed",
}
"""What real nodes cannot be told, and why."""


class Scenario(BaseModel):
    """The circumstances of one run. In simulated ones time is counted in *ticks*: a peer of speed 1 takes one inner
    step in each, one of speed v takes v."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    method: Literal["diloco", "data-parallel"] = "diloco"
    """``data-parallel``: one optimizer, gradients averaged in every step over batches of all peers."""
    peers: int = Field(default=4, ge=1, le=64)
    budget: Literal["tokens", "time"] = "tokens"
    """What is equal between rows: tokens of all peers together, or ticks."""
    speeds: Speeds = ()
    """One a peer; empty: all 1."""
    idle: bool = False
    """Whether a peer that has its H steps stands still until the round (classic DiLoCo); else it trains on."""
    lost: float = Field(default=0.0, ge=0, lt=1)
    """Share of the contributions that do not arrive."""
    void: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rounds that end without a commit."""
    left_out: Literal["keep", "drop", "residual"] = "keep"
    """What becomes of a contribution that did not arrive: it stays in the local weights (the protocol's rule), is
    forgotten, or goes into the residual."""
    deaths: Deaths = ()
    fragments: int = Field(default=1, ge=1, le=64)
    """Parts of the model that have rounds of their own, staggered over H steps (Streaming DiLoCo, arXiv 2501.18512). An
    experiment beside the manifest's ``round.fragments``: here rounds may be in flight for longer than it is from one to
    the next."""
    rank: int = Field(default=0, ge=0, le=1024)
    """Rank of low-rank factors that matrices are sent as, packed by the manifest's codec; 0: whole."""
    rate: float = Field(default=1.0, gt=0, le=100)
    """Factor on the inner learning rates."""
    data_seed: int = Field(default=0, ge=0, le=2**31)
    """Added to the seed that orders the training text, and not to that of the initial parameters."""
    step_time: float | None = Field(default=None, gt=0, le=10_000)
    """Seconds of a tick, where a manifest's rounds go by time; None: not known before the run."""
    real: bool = False
    """Whether real nodes run it, on this machine, instead of simulated peers."""
    again: int = Field(default=0, ge=0, le=2**31)
    """Number of a repetition of a real run, which does not repeat to the bit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.speeds and len(self.speeds) != self.peers:
            problems.append(f"speeds names {len(self.speeds)} peers, and there are peers = {self.peers}")
        for death in self.deaths:
            if not 0 <= death.peer < self.peers:
                problems.append(f"deaths: there is no peer {death.peer}; expected 0 to {self.peers - 1}")
            if not 0 <= death.begins < death.ends <= 1:
                problems.append(f"deaths: expected shares 0 ≤ begins < ends ≤ 1, found {death.begins}, {death.ends}")
        if self.fragments > 1 and self.rank:
            problems.append(f"fragments = {self.fragments} does not go with rank; leave one of them out")
        if self.method == "data-parallel":
            plain = Scenario.model_construct(peers=self.peers)
            kept = {"method", "peers", "budget", "rate", "data_seed"}
            extra = [k for k in type(self).model_fields if k not in kept and getattr(self, k) != getattr(plain, k)]
            if extra:
                problems.append(f'method = "data-parallel" knows no {", ".join(extra)}; leave them out')
        if self.real:
            usual = Scenario.model_construct(peers=self.peers)
            refused = [f"{key} ({why})" for key, why in _NOT_REAL.items() if getattr(self, key) != getattr(usual, key)]
            if refused:
                problems.append(f"real nodes know no {', '.join(refused)}; leave it out, or real")
        elif self.again:
            problems.append("again is for real nodes: a simulated run repeats to the bit; set data_seed instead")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str) -> Scenario:
        """Raises :class:`ConfigError` naming every problem, with ``where`` in front."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error, cls)}") from None

    def speed(self, peer: int) -> float:
        return self.speeds[peer] if self.speeds else 1.0

    def alive(self, peer: int, share: float) -> bool:
        """Whether ``peer`` lives at this share of the run."""
        return not any(d.peer == peer and d.begins <= share < d.ends for d in self.deaths)
