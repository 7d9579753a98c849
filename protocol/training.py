"""What one peer does with its island: freezing, going on, what is handed over and what is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .control import Call
from .core import Core
from .encoder import Encoded, Encoder
from .errors import ResourceError
from .flights import Brought, Entering
from .fragments import Accounts
from .island import Progress, Run, Snapshot
from .messages import GENESIS, Body, Member
from .overlap import Merge, Overlap
from .places import place
from .stale import HALF, shorten

Floats = NDArray[np.float32]


class Training:
    """The island as the round sees it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._transport = core.transport
        self._me = core.me
        self._manifest = core.manifest
        self._layout = core.layout
        self._store = core.store
        self._island = core.island
        self._flights = core.flights
        self._events = core.events
        self._nonce = core.nonce
        rules, outer = core.manifest.round, core.manifest.outer
        momentum = outer.momentum if outer.optimizer == "nesterov" else 0.0
        self.rule = Overlap(Merge(rules.merge), lr=outer.lr, mu=momentum, alpha=rules.mix)
        self.accounts = Accounts(core.layout, rules.inner_steps)
        """What is not handed over yet, by fragment."""
        self.frozen = True
        """Whether the island has been frozen and not resumed since; it begins so."""
        self.ahead = False
        """Whether it trains ahead of a round: a snapshot was taken that no commit has followed, nor an abort."""
        self.rewritten = False
        """Whether ``local`` of the frozen island is another than it froze with."""
        self.encoded: Encoded | None = None
        """What an island that encodes has frozen for the round; None when nothing is brought."""
        self.lossy = core.island is not None and not core.codec.lossless and core.manifest.codec.error_feedback > 0
        """Whether there is a residual, here or at the island."""
        self._life = core.island.life if core.island is not None else 0
        """The island's life that the accounts are of."""

    async def begin(self, theta: Floats | None) -> None:
        """Begin to train, from the global parameters or from ``theta``, which an earlier life of this process had come
        to."""
        assert self._island is not None
        encoding = self._core.encoder is not None and await self._begin_encoding(self._core.encoder, theta)
        if not encoding:
            anew = theta is None or self._core.encoder is not None
            self._island.local[:] = self._core.replica.params if anew else theta
        self.frozen = False
        self.accounts.inner_steps = self._manifest.inner_steps(self._core.replica.rank)
        outer_step = self._core.head.outer_step
        if theta is not None:
            ahead = self.may_step()
            await self._island.resume(reload=not encoding, spent=0.0, outer_step=outer_step, ahead=ahead)
        else:
            self.accounts.clear(self._core.fragment)
            await self._island.resume(reload=not encoding, spent=1.0, outer_step=outer_step)

    async def _begin_encoding(self, encoder: Encoder, theta: Floats | None) -> bool:
        """Give an island that encodes what it keeps itself. False when it died of it: then it begins from g."""
        residual = None
        if self.lossy and self._core.head != GENESIS:
            residual = await self._transport.offload(self._store.load_residual, self._core.head.id)
        try:
            await encoder.begin(self._core.replica.params, commit_id=self._core.head.id, residual=residual, theta=theta)
        except ResourceError as error:
            self._events("warning", message=f"the island did not take over what was saved: {error}")
            return False
        return True

    def note_life(self) -> None:
        """An island that encodes may have died, and begun anew from the global parameters by itself: then nothing of
        what it had done is left. Its next life may leave the encoding to this side, which then needs a residual."""
        if self._island is None or self._island.life == self._life:
            return
        self._life = self._island.life
        self.accounts.clear(self._core.fragment)
        if self.lossy and self._core.encoder is None and self._core.replica.residual is None:
            self._core.replica.residual = np.zeros(self._layout.parameters, np.float32)

    async def enter(self, call: Call) -> tuple[Member, Snapshot]:
        """Say what this peer brings, frozen; or, into a call for leases alone, without stopping for it.

        Raises ResourceError when the island is gone.
        """
        assert self._island is not None
        rules, weight = self._manifest.round, 0
        self.encoded = None
        if call.leases:
            snapshot = self.counted()
        else:
            snapshot = await self._set_out(call)
            self.note_life()
            weight = self._stated(snapshot, call.fragment)[0]
        share = self._shorten(snapshot, call.fragment) if weight else 1.0
        if weight and not await self._sendable(call.fragment, share):
            reason = "the local parameters are not finite, or huge; they are dropped, with their tokens"
            self._events("warning", message=reason)
            await self.reload()
            snapshot, weight = await self._set_out(call), 0
        brought = self.accounts.snapshot(snapshot, call.fragment)
        target = rules.first_lease if not brought.units and not brought.leased else 2 * brought.units
        target = min(max(target, rules.first_lease // 2), rules.max_lease)
        if call.leases and brought.leased:
            target = 0  # whoever has samples waits for the next round with its wishes
        want = max(target - brought.leased - self._flights.wanted(), 0)
        total = self.accounts.total(snapshot, call.fragment)
        self._flights.entering = Entering(Brought(snapshot, total), self.ahead, self.frozen)
        member = Member(
            peer=self._me, nonce=self._nonce, weight=weight,
            steps=self._stated(snapshot, call.fragment)[1], want=want, upload=self._core.rates.upload,
            download=self._core.rates.download, reachable=self._core.reachable,
        )  # fmt: skip
        return member, snapshot

    def counted(self) -> Snapshot:
        """The island's counters as they are now."""
        assert self._island is not None
        now = self._island.progress()
        return Snapshot(now.steps, now.tokens, now.units, now.leased)

    def _stated(self, snapshot: Snapshot, fragment: int) -> tuple[int, int]:
        """Tokens and steps that this peer states of what it has frozen of a fragment."""
        brought = self.accounts.snapshot(snapshot, fragment)
        age = self.accounts.age(fragment)
        tokens, steps = self._manifest.stale.stated(brought.tokens, brought.steps, age)
        return min(tokens, self._manifest.round.weight_cap), steps

    def grow_old(self, body: Body, share: float) -> int:
        """A commit has averaged a share of this peer's contribution: the tokens that are too old now, to be dropped."""
        if self._island is None or not body.chunks or body.outer_step >= self._manifest.outer_steps:
            return 0
        tokens = self.accounts.progress(self._island.progress(), body.fragment).tokens
        age = self.accounts.grow_old(body.fragment, tokens > 0 and share < HALF)
        if not self._manifest.stale.drops(age):
            return 0
        self.accounts.grow_old(body.fragment, False)
        return tokens

    def _share(self, steps: int, fragment: int) -> float:
        """What the Δ of so many steps is to be shortened to."""
        if any(void.theta is not None and void.round.seal.fragment == fragment for void in self._core.flights.limbo):
            return 1.0  # that roster may still turn out committed, and then all that was frozen for it leaves θ
        rule = replace(self._manifest.stale, inner_steps=self.accounts.inner_steps)
        return rule.share(self.accounts.age(fragment), *self.accounts.length(steps, fragment))

    def _shorten(self, snapshot: Snapshot, fragment: int) -> float:
        """Note that what was frozen is shortened, if it stands still; to what share of it."""
        if not self.frozen:
            return 1.0
        steps = self.accounts.snapshot(snapshot, fragment).steps
        share = self._share(steps, fragment)
        if share < 1:
            self.accounts.shorten(steps, fragment, share)
        return share

    async def _sendable(self, fragment: int, share: float) -> bool:
        """Whether all of what this peer brings, shortened to that share, can be sent; an island that encodes has done
        so then."""
        encoder = self._core.encoder
        if encoder is None:
            if share < 1:
                assert self._island is not None
                self.rewritten = True
                for part in self._layout.fragment(fragment).stretches():
                    theta, params = self._island.local[part], self._core.replica.params[part]
                    await self._transport.offload(shorten, theta, params, share)
            return await self._transport.offload(self._core.replica.sendable, self._local(), fragment)
        self.encoded = await encoder.encode(fragment, share)
        return self.encoded is not None

    async def freeze(self) -> Snapshot:
        """Pause the island. Raises ResourceError when it is gone, or hangs."""
        assert self._island is not None
        self.frozen = True
        return await self._island.freeze()

    async def _set_out(self, call: Call) -> Snapshot:
        """Freeze what a round is to average; with overlap, training goes on from there."""
        island, ahead, fragment = self._island, self._manifest.round.overlap, call.fragment
        assert island is not None
        # In the last rounds there is nothing to run ahead for.
        last = place(call.base, fragment, self._layout) + 1 >= self._manifest.regular_steps
        late = self._share(self.accounts.progress(island.progress(), fragment).steps, fragment) < 1
        if not ahead or island.frozen is None or last or late:  # what is shortened is θ itself
            return await self.freeze()
        self.frozen = True
        until = self._flights.until()
        if self.rule.departs:
            snapshot = await island.freeze()
            for part in self._layout.fragment(fragment).stretches():
                await self._transport.offload(np.copyto, island.frozen[part], island.local[part])
            await self._transport.offload(self._core.replica.start, self.rule, island.frozen, island.local, fragment)
            await island.resume(
                reload=True, spent=0.0, outer_step=self._core.head.outer_step, ahead=ahead, until=until
            )  # fmt: skip
        else:
            snapshot = await island.snapshot(ahead, self._layout.fragment(fragment).stretches(), until)
        self.frozen, self.ahead = False, True
        return snapshot

    def go_on(self, *, ahead: bool) -> None:
        """The island trains on: it was told so by a commit. ahead: whether it does so ahead of a round, still."""
        self.frozen, self.ahead = False, ahead

    def take_rewritten(self) -> bool:
        """Whether this peer has rewritten θ, which the island is now told to take."""
        rewritten, self.rewritten = self.rewritten, False
        return rewritten

    def run_ahead(self, ahead: bool) -> None:
        """Of the rounds in flight another is looked at now: whether the island trains ahead of that."""
        self.ahead = ahead

    def theta(self) -> Floats | Encoded | None:
        """What the round averages: θ at the freeze, or what the island has encoded of it."""
        return self._local() if self._core.encoder is None else self.encoded

    def _local(self) -> Floats:
        assert self._island is not None
        if self.ahead:
            assert self._island.frozen is not None
            return self._island.frozen
        return self._island.local

    async def reload(self, *, residual: bool = False) -> None:
        """The local parameters become the global ones; what had not been handed over is gone. So is the residual,
        unless it is to be kept."""
        assert self._island is not None
        if not self.frozen:
            try:
                await self.freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        self._island.local[:] = self._core.replica.params
        if self._core.replica.residual is not None and not residual:
            self._core.replica.residual.fill(0)
        self._flights.ground()
        self.frozen = self.ahead = self.rewritten = False
        self.encoded = None
        self.accounts.clear(self._core.fragment)
        await self._island.resume(reload=True, spent=1.0, outer_step=self._core.head.outer_step)

    async def thaw(self, fragment: int) -> None:
        """Go on training as before, if a freeze stopped it, or ahead of a round of that fragment that has come to
        nothing."""
        assert self._island is not None
        until = self._flights.until()
        if self.frozen:
            reload = self.take_rewritten()
            self.frozen = self.ahead = False
            await self._island.resume(
                reload=reload, spent=0.0, outer_step=self._core.head.outer_step, ahead=self.may_step(), until=until
            )  # fmt: skip
        elif self.ahead:
            self.ahead = False
            if self.rule.departs:
                assert self._island.frozen is not None
                runs = await self._transport.offload(self._core.replica.abort, self.rule, self._island.frozen, fragment)
                await self.move(runs, spent=0.0, of=None)
            else:
                await self._island.resume(reload=False, spent=0.0, outer_step=self._core.head.outer_step, until=until)

    async def withdraw(self, call: Call) -> None:
        """A call that was entered has come to nothing."""
        entering, self._flights.entering = self._flights.entering, None
        if entering is not None and entering.grounded:
            self.ahead = False
        await self.thaw(call.fragment)

    def may_step(self, tokens: int | None = None) -> int | None:
        """How many inner steps an island that goes on may make: any number, but none while the run winds up and it
        still has something to hand over. tokens: those that its own counters hold."""
        if not self._core.winding_up:
            return None
        assert self._island is not None
        counted = self._island.progress() if tokens is None else Progress(tokens=tokens)
        return 0 if self.accounts.progress(counted, self._core.fragment).tokens else None

    async def move(self, runs: list[Run], *, spent: float, of: Snapshot | None) -> Snapshot | None:
        """Change the local parameters of an island that trains, by the shift in its ``frozen``; its counters as they
        were then. None when it died of it: then it has begun anew from the global parameters."""
        assert self._island is not None
        self.ahead = False
        until = self._flights.until()
        try:
            moved = await self._island.move(
                runs, spent=spent, outer_step=self._core.head.outer_step, of=of, until=until
            )  # fmt: skip
        except ResourceError as error:
            self.frozen = True
            self._events("warning", message=f"{error}; the inner steps since the last commit are lost")
            await self.reload(residual=True)
            return None
        self._flights.lower(moved, spent, of)
        return moved
