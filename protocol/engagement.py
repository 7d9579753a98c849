"""What a peer is engaged in until a roster is sealed: its own call, or another's that it enters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .calling import Calling
from .commits import check_seal
from .control import Call, Sealed
from .core import Core
from .errors import PeerMisbehaved
from .messages import hash_of, seal_bytes
from .succession import Succession
from .transport import PeerId


@dataclass
class Invitation:
    """A call of another that this peer is to enter."""

    coordinator: PeerId
    call: Call


class Engagement:
    """At most one call at a time."""

    def __init__(self, core: Core, succession: Succession) -> None:
        self._core = core
        self._succession = succession
        self._signer = core.signer
        self._manifest = core.manifest
        self._layout = core.layout
        self._flights = core.flights
        self._refuse = core.refuse
        self._wake = core.agenda.wake
        self.calling: Calling | None = None
        """The own call in progress."""
        self.whose: PeerId | None = None
        """Whose call this peer is engaged in, itself included, up to the end of its round where there is one at
        a time."""
        self.invitation: Invitation | None = None
        """A call that is to be entered."""
        self.awaited: Call | None = None
        """The call that was entered, whose seal is waited for …"""
        self.sealed: asyncio.Future[Sealed | None] | None = None
        """… with this."""

    def begin_call(self, calling: Calling) -> None:
        """This peer calls."""
        self.calling, self.whose = calling, self._core.me

    def end_call(self) -> None:
        """No more answers to the own call are taken."""
        self.calling = None

    def enter(self, coordinator: PeerId, call: Call) -> None:
        """Another's call is entered, and its seal waited for."""
        self.whose, self.awaited = coordinator, call
        self.sealed = asyncio.get_running_loop().create_future()

    def wait_no_more(self) -> None:
        """No seal is waited for."""
        self.sealed = self.awaited = None

    def be_free(self) -> None:
        """What this peer was engaged in is over."""
        self.whose = None

    def invite(self, invitation: Invitation) -> None:
        self.invitation = invitation

    def take_invitation(self) -> Invitation | None:
        """The call that is to be entered, which nobody else takes then."""
        invitation, self.invitation = self.invitation, None
        return invitation

    def release(self, peer: PeerId, call: bytes) -> None:
        """A coordinator takes back what it has called for."""
        if self.awaited is not None and self.awaited.call == call and peer == self.whose:
            self.resolve(None)
        invitation = self.invitation
        if invitation is not None and (invitation.coordinator, invitation.call.call) == (peer, call):
            self.invitation = None

    def taken_back(self, peer: PeerId, call: bytes) -> None:
        """A coordinator cannot lead what it has called for: it stands behind the others on this base."""
        if self.awaited is not None and self.awaited.call == call and peer == self.whose:
            self._succession.void(peer)
            self.resolve(None)

    def offer_seal(self, sender: PeerId, sealed: Sealed) -> None:
        """A seal has come, from its coordinator or by way of another: take it if it is the one waited for."""
        call, seal = self.awaited, sealed.seal
        if call is None or self.whose != seal.coordinator or seal.nonce != call.call:
            return
        coordinator = PeerId(seal.coordinator)
        if not self._signer.verify(coordinator, seal_bytes(hash_of(seal)), sealed.signature):
            # Whoever forged it: the coordinator's own may still come.
            self._refuse(sender, "a seal whose signature does not verify")
            return
        try:
            check_seal(seal, self._manifest, self._layout)
            if (seal.round, seal.leases, seal.fragment) != (call.round, call.leases, call.fragment):
                raise PeerMisbehaved("a seal that is not what was called for")
            if seal.rank != self._core.replica.rank:
                raise PeerMisbehaved(f"a seal with rank {seal.rank} where {self._core.replica.rank} is in force")
        except PeerMisbehaved as error:
            self._refuse(coordinator, str(error))
            self._succession.sealless.add(coordinator)
            self._succession.void(coordinator)
            self.resolve(None)
            return
        self.resolve(sealed)

    def resolve(self, sealed: Sealed | None) -> None:
        """End the waiting for a seal; None: none will come."""
        if self.sealed is not None and not self.sealed.done():
            self.sealed.set_result(sealed)
            if self._flights.several:
                self._wake.set()
