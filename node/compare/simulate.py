"""One run of a manifest with simulated peers, in one process and without a network.

The peers' training is the node's own (:class:`~atoll.node.learner.Learner`), what they exchange goes through the
protocol's codecs, and global and local parameters change by its outer step and its rules of overlap. Simulated are only
time, which goes by in ticks (:class:`.scenario.Scenario`), and what happens to messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from atoll.node.evaluate import Evaluator
from atoll.node.learner import Learner
from atoll.node.optim import InnerOptimizer
from atoll.node.run_defaults import Tables
from atoll.node.specs import tensor_specs
from atoll.protocol.codecs import averages_codec, get_codec
from atoll.protocol.codecs.base import MAX_MAGNITUDE, Codec
from atoll.protocol.lowrank import Factors, LowRankLayout
from atoll.protocol.manifest import Manifest, RoundSection
from atoll.protocol.outer import outer_step
from atoll.protocol.overlap import Merge, Overlap, left, move
from atoll.protocol.radial import Norms, Part, normalise, radius, read, scales, squares
from atoll.protocol.stale import shorten
from atoll.protocol.theta0 import theta0

from .link import Transfer, pack_transfers
from .lowrank import LowRank
from .scenario import Scenario

Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Told the inner steps done and the inner steps of the whole run."""

POINTS = 8
"""Points of the curve, besides the end."""
SAMPLE = 8
"""The curve is scored on every eighth batch of the held-out text, the end on all of it."""


def run_ticks(scenario: Scenario, rounds: int, section: RoundSection, step_tokens: int) -> int:
    """Ticks in which so many rounds can be had, none being dead. step_tokens: of one inner step."""
    return -(-rounds * round_ticks(scenario, section, step_tokens) // groups(scenario, section))


def round_ticks(scenario: Scenario, section: RoundSection, step_tokens: int) -> int:
    """Ticks until a round is due, none being dead: until as many peers as the quorum asks for have done their inner
    steps, or all together the tokens that the manifest asks for, or until the time has come for each fragment (where
    nobody says how long a step takes, as of real nodes, the manifest's inner steps stand for it)."""
    if scenario.method == "data-parallel":
        return section.inner_steps
    fastest = sorted((scenario.speed(peer) for peer in range(scenario.peers)), reverse=True)
    if section.by == "tokens":
        ticks = 1
        while sum(int(ticks * speed) for speed in fastest) * step_tokens < section.every:
            ticks += 1
        return ticks
    timed = section.by == "time" and scenario.step_time is not None
    speed = fastest[min(section.quorum, scenario.peers) - 1]
    ticks = 1
    while int(ticks * speed) < (1 if timed else section.inner_steps):
        ticks += 1
    if timed:
        # from one outer step to the next a round of one fragment has to be due, and then to be over
        return (max(ticks, pause_ticks(scenario, section)) + section.overlap) * section.fragments
    return ticks


def pause_ticks(scenario: Scenario, section: RoundSection) -> int:
    """Ticks from an outer step to the next round, of whatever fragment, if rounds go by time: inner steps are not
    interrupted, so the last of them ends when that time is over."""
    assert scenario.step_time is not None
    return max(math.ceil(section.every / section.fragments / scenario.step_time - 1e-9), 1)


def groups(scenario: Scenario, section: RoundSection) -> int:
    """Rounds that it takes for everyone to contribute once."""
    return 1 if scenario.method == "data-parallel" else -(-scenario.peers // section.max_group)


class _Stated(NamedTuple):
    """What a member of a roster says of its contribution."""

    weight: int
    steps: int


@dataclass
class _Frozen:
    """What one peer has entered a round with."""

    theta: list[Floats]
    """Its parameters, a vector a chunk of the fragment; so are the following."""
    x: list[Floats]
    """Its progress and residual."""
    sent: list[Floats]
    """What the others decode from its payloads."""
    payloads: list[bytes]
    start: list[Floats]
    """What it went on training from."""
    weight: float
    steps: int
    tokens: int


@dataclass
class _Round:
    """One fragment's round in flight."""

    number: int
    due: int
    """Tick at which it ends."""
    entered: dict[int, _Frozen]


@dataclass
class _Peer:
    learner: Learner
    residual: Floats
    steps: list[int]
    """Inner steps that have not been handed over, one a fragment; so are the tokens."""
    tokens: list[int]
    ages: list[int]
    """Rounds that each fragment's contribution has missed."""
    short: list[int]
    """Inner steps by which it has been shortened."""
    before: list[int]
    """Those of it that were made before the fragment's last commit."""
    alive: bool = True

    @property
    def theta(self) -> Floats:
        """The local parameters, in place (the learner runs on the CPU)."""
        return self.learner.host.numpy()


@dataclass
class Traffic:
    """What crossed the network, and when."""

    total: int = 0
    """Bytes sent by all peers together: contributions and averages, no messages around them."""
    transfers: list[Transfer] = field(default_factory=list)


class Simulation:
    """A run from θ₀ to its end; :meth:`run` once.

    ``manifest`` must be complete; its rounds are those of the whole run. ``seed`` draws what gets lost; the seeds of
    the initial parameters and of the text are the manifest's.
    """

    def __init__(self, manifest: Manifest, scenario: Scenario, seed: int, on_progress: Progress) -> None:
        self.manifest, self.scenario, self.seed, self.on_progress = manifest, scenario, seed, on_progress
        tables = Tables.of(manifest.model_dump())
        self.model = tables.model
        rate = scenario.rate
        self.inner = tables.inner.model_copy(
            update={"lr": tables.inner.lr * rate, "adamw_lr": tables.inner.adamw_lr * rate}
        )
        self.specs = tensor_specs(self.model)
        self.params = theta0(self.model.seed, self.specs)
        self.momentum = np.zeros_like(self.params)
        self.evaluator = Evaluator(self.model, tables.data)
        self.traffic = Traffic()
        self.cursor = 0
        self.tokens = self.steps = 0
        self.commits = self.voids = self.lost = 0
        self.stepped = 0
        """Tick of the last outer step."""
        self.curve: list[dict[str, Any]] = []
        self.training_seconds = 0.0
        self.inner_steps = manifest.round.inner_steps
        step_tokens = self.inner.batch * self.model.context
        self.ticks = run_ticks(scenario, manifest.budget.rounds, manifest.round, step_tokens)

    # ---------------------------------------------------------------- what the baseline does otherwise

    def begin(self) -> None:
        """Make the peers."""
        outer, codec = self.manifest.outer, self.manifest.codec
        self.codec: Codec = get_codec(codec.name)
        self.averages: Codec = averages_codec(codec.name)
        self.feedback = 0.0 if self.codec.lossless and not self.scenario.rank else codec.error_feedback
        rules = self.manifest.round
        self.tau = rules.overlap
        self.overlap = Overlap(Merge(rules.merge), outer.lr, outer.momentum, rules.mix)
        self.fragments = self._fragments()
        layout = self.manifest.layout
        self.places = {layout.span(place).start: place for place in range(layout.count)}
        self.factors: Factors | None = None
        self._find_factors()
        self.rounds: list[_Round | None] = [None] * len(self.fragments)
        self.numbers = [0] * len(self.fragments)
        self.outer_steps = [0] * len(self.fragments)
        self.lowrank = LowRank(self.specs, self.scenario.rank, self.seed) if self.scenario.rank else None
        count = len(self.fragments)
        self.peers = []
        for _ in range(self.scenario.peers):
            # the first rounds of the fragments are staggered over one round, and the last one's is a whole round
            early = [self.inner_steps - (f + 1) * self.inner_steps // count for f in range(count)]
            learner = self._learner(self.params.copy())
            tokens, ages, short, before = ([0] * count for _ in range(4))
            self.peers.append(_Peer(learner, np.zeros_like(self.params), early, tokens, ages, short, before))

    def tick(self, now: int) -> None:
        share = (now - 1) / self.ticks
        for number, peer in enumerate(self.peers):
            alive = self.scenario.alive(number, share)
            if alive and not peer.alive:
                self._return(peer)
            elif peer.alive and not alive:
                for flight in self.rounds:
                    if flight is not None:
                        flight.entered.pop(number, None)
            peer.alive = alive
            speed = self.scenario.speed(number)
            for _ in range(int(speed * now) - int(speed * (now - 1)) if alive else 0):
                if not (self.scenario.idle and self._done(peer)):
                    self._train(number)
        last = now == self.ticks
        for fragment, flight in enumerate(self.rounds):
            if flight is not None and (last or flight.due <= now):
                self._end(fragment, flight, now)
        for fragment in range(len(self.fragments)):
            if not last and self.rounds[fragment] is None and self._ready(fragment, now):
                flight = self._freeze(fragment, now)
                if self.tau == 0:
                    self._end(fragment, flight, now)
            while last and self._able(fragment):
                self._end(fragment, self._freeze(fragment, now), now, flush=True)

    def _fragments(self) -> list[list[slice]]:
        """The chunks of each fragment: the manifest's or, in an experiment with rounds of several fragments in flight
        at once, runs of the flat vector, as even as chunks allow."""
        layout = self.manifest.layout
        if layout.fragments > 1:
            parts = [layout.fragment(number) for number in range(layout.fragments)]
            return [[part.span(index) for index in range(part.count)] for part in parts]
        if self.scenario.rank:
            # matrices are sent whole
            return [[slice(0, self.params.size)]]
        chunks = [layout.span(index) for index in range(layout.count)]
        count = self.scenario.fragments
        return [chunks[f * len(chunks) // count : (f + 1) * len(chunks) // count] for f in range(count)]

    def _find_factors(self) -> None:
        """The outer momentum is another, and so are the directions that matrices travel along."""
        if isinstance(layout := self.manifest.layout, LowRankLayout):
            self.factors = Factors(layout)

    # ---------------------------------------------------------------- the run

    def run(self) -> dict[str, Any]:
        """Train to the end; everything that is to be known of the run, as plain values."""
        began = time.process_time()
        self.begin()
        marks = [round(self.ticks * (k + 1) / (POINTS + 1)) for k in range(POINTS)]
        before = -1
        for now in range(1, self.ticks + 1):
            self.tick(now)
            self.on_progress(now, self.ticks)
            if marks and now >= marks[0] and self.commits > before:
                marks = [mark for mark in marks if mark > now]
                before = self.commits
                self._point(now)
        self._point(self.ticks)
        loss = self.evaluator.loss(self.params)
        return {
            "loss": loss,
            "tokens": self.tokens,
            "steps": self.steps,
            "ticks": self.ticks,
            "commits": self.commits,
            "voids": self.voids,
            "lost": self.lost,
            "bytes": self.traffic.total,
            "curve": self.curve,
            "transfers": pack_transfers(self.traffic.transfers),
            "step_seconds": self.training_seconds / max(self.steps, 1),
            "cpu_seconds": time.process_time() - began,
            "digest": blake3(self.params.tobytes()).hexdigest()[:16],
        }

    def _point(self, now: int) -> None:
        if self.curve and self.curve[-1]["tick"] == now:
            return
        self.curve.append(
            {
                "tick": now,
                "tokens": self.tokens,
                "bytes": self.traffic.total,
                "loss": self.evaluator.loss(self.params, every=SAMPLE),
            }
        )

    def _learner(self, host: Floats, batch: int | None = None) -> Learner:
        inner = self.inner if batch is None else self.inner.model_copy(update={"batch": batch})
        text, rounds = self.evaluator.corpus.train, self.manifest.budget.rounds
        learner = Learner(
            self.model, inner, self.inner_steps, rounds, text, host, device="cpu", micro_batch=self.inner.batch
        )
        learner.units.seed += self.scenario.data_seed
        return learner

    def _step(self, learner: Learner, outer: int, steps: int) -> int:
        """One inner step on the next units; its tokens."""
        began = time.process_time()
        units = np.arange(self.cursor, self.cursor + learner.inner.batch)
        self.cursor += learner.inner.batch
        learner.step(units, outer, steps)
        self.training_seconds += time.process_time() - began
        self.steps += 1
        self.tokens += learner.tokens_per_step
        return learner.tokens_per_step

    # ---------------------------------------------------------------- peers

    def _train(self, number: int) -> None:
        peer = self.peers[number]
        # as in the protocol: outer steps of the run, and steps since the last contribution
        outer, done = self.commits // len(self.fragments), peer.steps[-1]
        last = self.rounds[-1]
        if last is not None and number in last.entered:
            outer, done = outer + 1, done - last.entered[number].steps
        tokens = self._step(peer.learner, outer, done)
        for fragment in range(len(self.fragments)):
            peer.steps[fragment] += 1
            peer.tokens[fragment] += tokens

    def _return(self, peer: _Peer) -> None:
        """Back from the dead: the global parameters, and nothing else of what it had."""
        peer.theta[:] = self.params
        peer.residual.fill(0)
        peer.steps = [0] * len(self.fragments)
        peer.tokens = [0] * len(self.fragments)
        peer.ages = [0] * len(self.fragments)
        peer.short = [0] * len(self.fragments)
        peer.before = [0] * len(self.fragments)
        peer.learner.optimizer = InnerOptimizer(peer.learner.model, peer.learner.inner)

    def _done(self, peer: _Peer) -> bool:
        return all(steps >= self.inner_steps for steps in peer.steps)

    def _ready(self, fragment: int, now: int) -> bool:
        rules, able = self.manifest.round, self._able(fragment)
        quorum = min(rules.quorum, self.scenario.peers)
        if rules.by == "tokens":
            held = sum(min(self.peers[number].tokens[fragment], rules.weight_cap) for number in able)
            turn = len(self.fragments) if self.numbers[fragment] else fragment + 1
            return len(able) >= quorum and held >= rules.every * turn / len(self.fragments)
        if rules.by == "time":
            # as in the protocol one round at a time, fragment after fragment, counted from the last outer step
            turn = self.commits % len(self.fragments) == fragment and not any(self.rounds)
            return turn and len(able) >= quorum and now - self.stepped >= pause_ticks(self.scenario, rules)
        return sum(self.peers[number].steps[fragment] >= self.inner_steps for number in able) >= quorum

    # ---------------------------------------------------------------- rounds

    def _able(self, fragment: int) -> list[int]:
        """Those who have something to contribute."""
        return [n for n, peer in enumerate(self.peers) if peer.alive and peer.tokens[fragment] > 0]

    def _freeze(self, fragment: int, now: int) -> _Round:
        """Everybody alive contributes what it has; if that are more than a group holds, those with the most."""
        chunks = self.fragments[fragment]
        able = sorted(self._able(fragment), key=lambda number: (-self.peers[number].tokens[fragment], number))
        members = sorted(able[: self.manifest.round.max_group])
        entered = {number: self._contribution(self.peers[number], fragment, chunks) for number in members}
        self.numbers[fragment] += 1
        flight = self.rounds[fragment] = _Round(self.numbers[fragment], now + self.tau, entered)
        if self.lowrank is None:
            sent = sum(len(payload) for payload in entered[members[0]].payloads)
            received = sum(self._average_size(index, chunk, entered) for index, chunk in enumerate(chunks))
            self._account(now, len(members), sent + received)
        return flight

    def _average_size(self, index: int, chunk: slice, entered: dict[int, _Frozen]) -> int:
        """Bytes of the average of a chunk, of all that have entered."""
        if self.averages.fixed:
            return self.averages.encoded_size(self._travelling(chunk))
        kept = np.zeros(chunk.stop - chunk.start, np.float32)
        for frozen in entered.values():
            np.maximum(kept, np.abs(frozen.sent[index]), out=kept)
        return len(self.averages.encode(kept))

    def _account(self, now: int, members: int, size: int) -> None:
        """A reduction in which every member sends 1/n of ``size`` bytes to each other one."""
        self.traffic.total += (members - 1) * size
        self.traffic.transfers.append(Transfer(now, self.tau, (members - 1) * size // members))

    def _contribution(self, peer: _Peer, fragment: int, chunks: Sequence[slice]) -> _Frozen:
        steps, tokens = peer.steps[fragment], peer.tokens[fragment]
        self._shorten(peer, fragment, chunks)
        counted, over = self.manifest.stale.stated(tokens, steps, peer.ages[fragment])
        stated = _Stated(min(counted, self.manifest.round.weight_cap), over)
        frozen = _Frozen([], [], [], [], [], float(self.manifest.merging.weight(stated)), steps, tokens)
        for chunk in chunks:
            params, theta = self.params[chunk], peer.theta[chunk]
            before = theta.copy()
            x = params - before
            if self.feedback:
                x += np.float32(self.feedback) * peer.residual[chunk]
            frozen.theta.append(before)
            frozen.x.append(x)
            if self.lowrank is None:
                payload = self._packed(chunk, x, self.codec)
                frozen.payloads.append(payload)
                frozen.sent.append(self._unpacked(chunk, payload, self.codec))
            start = self.overlap.start(before, params, self.momentum[chunk], np.empty_like(x))
            if self.overlap.departs:
                theta[:] = start
            frozen.start.append(start)
        return frozen

    def _shorten(self, peer: _Peer, fragment: int, chunks: Sequence[slice]) -> None:
        """What is late becomes no longer than a round where the manifest says so."""
        steps = peer.steps[fragment]
        length = steps - peer.short[fragment]
        share = self.manifest.stale.share(peer.ages[fragment], length, steps - peer.before[fragment])
        if share < 1:
            for chunk in chunks:
                shorten(peer.theta[chunk], self.params[chunk], share)
            peer.short[fragment] = steps - round(length * share)

    def _end(self, fragment: int, flight: _Round, now: int, *, flush: bool = False) -> None:
        """The round's commit reaches everybody, or it has come to nothing. With ``flush`` nothing gets lost: what the
        run is judged by holds the steps of everyone."""
        self.rounds[fragment] = None
        lost = 0.0 if flush else self.scenario.lost
        arrived = {number for number in flight.entered if self._draw(fragment, flight.number, number) >= lost}
        self.lost += len(flight.entered) - len(arrived)
        void = not flush and self._draw(fragment, flight.number, len(self.peers)) < self.scenario.void
        if void or not arrived:
            self.voids += 1
            self._abort(fragment, flight)
            return
        self.commits += 1
        self.stepped = now
        means = self._means(fragment, [flight.entered[number] for number in sorted(arrived)], flight)
        outer = self.manifest.outer
        phase = self.outer_steps[fragment] % outer.period
        self.outer_steps[fragment] += 1
        for index, (chunk, mean) in enumerate(zip(self.fragments[fragment], means, strict=True)):
            old = self.params[chunk].copy()
            outer_step(
                self.params[chunk], self.momentum[chunk], mean, outer.lr, outer.momentum, outer.optimizer,
                phase=phase, period=outer.period,
            )  # fmt: skip
            for number, peer in enumerate(self.peers):
                if peer.alive:
                    self._apply(peer, chunk, index, old, flight.entered.get(number), number in arrived)
        self._find_factors()
        for number, frozen in flight.entered.items():
            peer = self.peers[number]
            gone = 1.0 if number in arrived or self.scenario.left_out != "keep" else 0.0
            peer.steps[fragment] = self.overlap.remaining(peer.steps[fragment], frozen.steps, gone)
            peer.tokens[fragment] = self.overlap.remaining(peer.tokens[fragment], frozen.tokens, gone)
            peer.short[fragment] = left(peer.short[fragment], gone)
        for number, peer in enumerate(self.peers):
            peer.before[fragment] = peer.steps[fragment]
            if peer.alive:
                self._grow_old(peer, fragment, missed=number not in arrived)

    def _grow_old(self, peer: _Peer, fragment: int, *, missed: bool) -> None:
        """What a round has missed is a round older, and dropped where the manifest says so."""
        peer.ages[fragment] = peer.ages[fragment] + 1 if missed and peer.tokens[fragment] else 0
        if self.manifest.stale.drops(peer.ages[fragment]):
            for chunk in self.fragments[fragment]:
                peer.theta[chunk] = self.params[chunk]
            peer.steps[fragment] = peer.tokens[fragment] = peer.ages[fragment] = peer.before[fragment] = 0

    def _apply(self, peer: _Peer, chunk: slice, index: int, old: Floats, frozen: _Frozen | None, arrived: bool) -> None:
        theta, new = peer.theta[chunk], self.params[chunk]
        if frozen is None:
            theta += new - old
            return
        shift = np.empty_like(new)
        if not arrived and self.scenario.left_out == "keep":
            keep = self.overlap.left_out(frozen.theta[index], frozen.start[index], old, new, shift)
        else:
            keep = self.overlap.committed(frozen.start[index], new, shift)
            if self.feedback:
                if arrived:
                    np.subtract(frozen.x[index], frozen.sent[index], out=peer.residual[chunk])
                elif self.scenario.left_out == "residual":
                    peer.residual[chunk] = frozen.x[index]
        move(theta, keep, shift)

    def _abort(self, fragment: int, flight: _Round) -> None:
        for number, frozen in flight.entered.items():
            for index, chunk in enumerate(self.fragments[fragment]):
                shift = np.empty_like(frozen.x[index])
                keep = self.overlap.aborted(frozen.theta[index], frozen.start[index], shift)
                move(self.peers[number].theta[chunk], keep, shift)

    def _draw(self, *place: int) -> float:
        """A number in [0, 1) that depends on the seed and the place alone, so that rows lose the same."""
        return float(np.random.default_rng([self.seed, *place]).random())

    # ---------------------------------------------------------------- averages

    def _means(self, fragment: int, contributions: list[_Frozen], flight: _Round) -> list[Floats]:
        """The mean of each chunk, as everybody decodes it."""
        if self.lowrank is not None:
            return self._low_rank(contributions, flight)
        weights = [frozen.weight for frozen in contributions]
        chunks = self.fragments[fragment]
        part = self.manifest.merging.of(fragment).part
        if part is not None:
            return self._radial(part, contributions)
        means = []
        for index, chunk in enumerate(chunks):
            total = np.zeros(self._travelling(chunk), np.float32)
            for frozen in contributions:
                self.codec.accumulate(frozen.payloads[index], frozen.weight, total)
            total /= np.float32(sum(weights))
            np.clip(total, -MAX_MAGNITUDE, MAX_MAGNITUDE, out=total)
            means.append(self._unpacked(chunk, bytes(self.averages.encode(total)), self.averages))
        return means

    def _radial(self, part: Part, contributions: list[_Frozen]) -> list[Floats]:
        """As a reducer averages directions, and everybody lengthens them again."""
        whole = sum(int(frozen.weight) for frozen in contributions)
        senders = [Norms(part, frozen.sent.__getitem__, self.manifest.state.chunk) for frozen in contributions]
        means: list[Floats] = []
        found: list[tuple[list[float], list[float]]] = []
        for index in range(len(contributions[0].sent)):
            pieces, norms = part.pieces(index), [read(sender.of(index)) for sender in senders]
            total = np.zeros_like(contributions[0].sent[index])
            for frozen, own in zip(contributions, norms, strict=True):
                values = frozen.sent[index].copy()
                normalise(values, pieces, own)
                values *= np.float32(frozen.weight)
                total += values
            total /= np.float32(whole)
            mean = self._through(total, self.averages)[0]
            means.append(mean)
            weights = [int(frozen.weight) for frozen in contributions]
            sums = [squares(mean[piece.place]) for piece in pieces]
            found.append((sums, [radius(weights, [float(own[k]) for own in norms]) for k in range(len(pieces))]))
        for index, factors in enumerate(scales(part, found)):
            for piece, factor in zip(part.pieces(index), factors, strict=True):
                means[index][piece.place] *= factor
        return means

    def _travelling(self, chunk: slice) -> int:
        """Values that travel of a chunk."""
        if self.factors is None:
            return int(chunk.stop - chunk.start)
        return self.factors.size(self.places[chunk.start])

    def _packed(self, chunk: slice, x: Floats, codec: Codec) -> bytes:
        if self.factors is not None:
            x = self.factors.project(self.places[chunk.start], x, self.momentum)
        return bytes(codec.encode(np.ascontiguousarray(x)))

    def _unpacked(self, chunk: slice, payload: bytes, codec: Codec) -> Floats:
        out = np.empty(chunk.stop - chunk.start, np.float32)
        values = out if self.factors is None else np.empty(self._travelling(chunk), np.float32)
        codec.decode(payload, len(values), values)
        if self.factors is not None:
            self.factors.expand(self.places[chunk.start], values, self.momentum, out)
        return out

    def _low_rank(self, contributions: list[_Frozen], flight: _Round) -> list[Floats]:
        """Matrices as factors, what does not gain by them whole. One fragment, in one piece."""
        assert self.lowrank is not None
        weights = [frozen.weight for frozen in contributions]
        whole = [frozen.x[0] for frozen in contributions]
        for frozen in contributions:
            frozen.sent = [np.empty_like(frozen.x[0])]
        mean = np.empty_like(self.params)
        size = at = 0
        for spec in self.specs:
            part = slice(at, at + spec.size)
            at += spec.size
            if spec.name in self.lowrank.factors:
                found = self.lowrank.reduce(
                    spec.name,
                    [x[part].reshape(spec.shape) for x in whole],
                    weights,
                    lambda values: self._through(values, self.codec),
                    lambda values: self._through(values, self.averages),
                )
                for frozen, decoded in zip(contributions, found.parts, strict=True):
                    frozen.sent[0][part] = decoded.ravel()
                mean[part] = found.mean.ravel()
                size += found.sent + found.received
                continue
            total = np.zeros(spec.size, np.float32)
            for frozen in contributions:
                frozen.sent[0][part], sent = self._through(frozen.x[0][part], self.codec)
                total += np.float32(frozen.weight / sum(weights)) * frozen.sent[0][part]
            mean[part], received = self._through(total, self.averages)
            size += sent + received
        self._account(flight.due - self.tau, len(flight.entered), size)
        return [mean]

    def _through(self, values: Floats, codec: Codec) -> tuple[Floats, int]:
        """``values`` as they come out of a codec, and the bytes they took."""
        payload = codec.encode(np.ascontiguousarray(values))
        decoded = np.empty_like(values)
        codec.decode(payload, len(values), decoded)
        return decoded, len(payload)


class DataParallel(Simulation):
    """The baseline: one optimizer, whose gradient in every step is the mean over one batch of each peer.

    Its traffic is that of a ring all-reduce of float32 gradients in every step.
    """

    def begin(self) -> None:
        self.learner = self._learner(self.params, self.inner.batch * self.scenario.peers)

    def tick(self, now: int) -> None:
        outer, steps = divmod(now - 1, self.inner_steps)
        self._step(self.learner, outer, steps)
        self.commits = now
        members = self.scenario.peers
        size = 2 * 4 * self.params.size
        self.traffic.total += (members - 1) * size
        self.traffic.transfers.append(Transfer(now, 0, (members - 1) * size // members))


def simulate(manifest: Manifest, scenario: Scenario, seed: int, on_progress: Progress) -> dict[str, Any]:
    """Run it on one thread; see :meth:`Simulation.run`."""
    torch.set_num_threads(1)
    kind = DataParallel if scenario.method == "data-parallel" else Simulation
    return kind(manifest, scenario, seed, on_progress).run()
