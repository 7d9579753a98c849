"""What all parts of a peer work with, and where it stands on the chain. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from .anchoring import Guide
from .codecs import Codec
from .control import Heard, Report
from .directory import Directory
from .encoder import Encoder
from .errors import Fault
from .fetch import Fetcher
from .flights import Flights
from .identity import Signer
from .island import Island
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import GENESIS, MAX_ROUND_GAP, Head
from .messenger import Messenger
from .rates import Rates
from .records import State
from .refusals import Refusals
from .replica import Replica
from .store import Store
from .tasks import Tasks
from .transport import PeerId, Transport
from .wakeup import Agenda


@dataclass(eq=False, kw_only=True)
class Core:
    """One of a peer, shared by its parts. ``island``: None for a peer that follows without training."""

    transport: Transport
    signer: Signer
    manifest: Manifest
    layout: ChunkLayout
    codec: Codec
    store: Store
    island: Island | None
    reachable: bool
    events: Refusals
    nonce: bytes
    """Of this process start."""
    messenger: Messenger
    directory: Directory
    guide: Guide
    fetcher: Fetcher
    flights: Flights
    rates: Rates
    tasks: Tasks
    agenda: Agenda
    """The main task's."""
    state: State = "joining"
    stopping: bool = False
    last_round: int = 0
    """The highest round on this head that anyone has told of."""
    replica: Replica = field(init=False)
    """Set before anything but :attr:`head` reads it."""

    def __post_init__(self) -> None:
        self.me = self.transport.peer_id
        self.silence = self.manifest.round.silence
        self._outer_steps = self.manifest.outer_steps
        self._reasoned = False
        """Whether the state was last told with a reason."""
        self.replica = None  # type: ignore[assignment]
        self.base_since = self.transport.now()
        """When this peer came to its head."""
        self._stepped = (-1, self.base_since)
        """The outer step of the head, and when this peer came to that."""

    @property
    def head(self) -> Head:
        """The newest commit that this peer has applied."""
        return self.replica.position.head if self.replica is not None else GENESIS

    @property
    def finished(self) -> bool:
        """Whether the run's budget of outer steps is used up at this head."""
        return self.head.outer_step >= self._outer_steps

    @property
    def winding_up(self) -> bool:
        """Whether all inner steps are done, and what is left of them is averaged, fragment after fragment."""
        return self.head.outer_step >= self.manifest.regular_steps and not self.finished

    @property
    def fragment(self) -> int:
        """The fragment of the next round to be called."""
        at = self.flights.next(self.head)
        return self.layout.due(self.head.outer_step if at is None else at)

    @property
    def encoder(self) -> Encoder | None:
        return self.island.encoder if self.island is not None else None

    def elapsed(self) -> float:
        """Seconds since this peer saw the last outer step, or began."""
        return self.transport.now() - self._stepped[1]

    def new_head(self) -> None:
        """The head has changed."""
        self.base_since = self.transport.now()
        if self.head.outer_step != self._stepped[0]:
            self._stepped = (self.head.outer_step, self.base_since)
        self.last_round = max([self.head.round, *(flight.round.seal.round for flight in self.flights)])

    def hear_round(self, message: Report | Heard) -> None:
        """Another tells of the last round that it knows."""
        if message.round <= self.last_round:
            return
        head = self.head
        if message.head == head and message.round <= head.round + MAX_ROUND_GAP // 2:
            self.last_round = message.round

    def set_state(self, state: State, reason: str = "") -> None:
        """Say what this peer does now, and why it does no more; told once, until the state, or that there is a reason,
        is another."""
        changed = state != self.state
        if changed or bool(reason) != self._reasoned:
            self.state, self._reasoned = state, bool(reason)
            self.events("state", state=state, **({"reason": reason} if reason else {}))
        if changed:
            self.directory.publish_soon()

    def refuse(self, peer: PeerId, reason: str, fault: Fault = Fault.HOSTILE) -> None:
        self.events.refuse(peer, reason, fault)
