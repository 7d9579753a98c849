"""What a commit's averages must come to, computed anew from what its contributors brought: in float64, by the formulas
of the documents and none of the protocol's code."""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np

from atoll.protocol.commits import members_in
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body


def weights(body: Body, manifest: Manifest) -> list[int]:
    """What each member's contribution weighs."""
    rules = manifest.round
    found = []
    for member in body.seal.members:
        t, s = member.weight, member.steps
        if rules.weights == "equal":
            found.append(int(t > 0))
        elif rules.weights == "tokens" or not t:
            found.append(t)
        else:
            found.append(max(int(t * t // max(s, -(-t * rules.inner_steps // rules.weight_cap))), 1))
    return found


def expected(body: Body, manifest: Manifest, x: list[np.ndarray | None]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each chunk the merged values, and for each of them the magnitude that the codec's error is a share of.

    x: what each member brought, as it travels (one element a model parameter, unless matrices travel as factors); None
    for those who brought nothing.
    """
    part = manifest.layout.wire(body.fragment, body.seal.rank)
    count, weight = len(body.seal.members), weights(body, manifest)
    radial = manifest.round.average == "radial"
    sizes = list(chain.from_iterable(manifest.state.layers)) if radial else []
    starts = [0, *accumulate(sizes)]
    plain = set(manifest.state.embeddings)

    def norm(i: int, tensor: int) -> float:
        values = x[i]
        assert values is not None
        return float(np.linalg.norm(values[starts[tensor] : starts[tensor + 1]].astype(np.float64)))

    directions: list[np.ndarray] = []
    bounds: list[np.ndarray] = []
    radii: dict[tuple[int, int], float] = {}
    squares: dict[int, float] = {}
    present: dict[int, int] = {}
    for index, entry in enumerate(body.chunks):
        span, inside = part.span(index), members_in(entry.contributors, count)
        whole = sum(weight[i] for i in inside)
        sums, largest = np.zeros(span.stop - span.start), 0.0
        values = {i: np.asarray(x[i])[span].astype(np.float64) for i in inside}
        for tensor, size in enumerate(sizes):
            a, b = max(starts[tensor], span.start), min(starts[tensor] + size, span.stop)
            if a >= b or tensor in plain or not inside:
                continue
            norms = {i: norm(i, tensor) for i in inside}
            for i in inside:
                values[i][a - span.start : b - span.start] /= norms[i] or np.inf
            others = {i: max((norms[j] for j in inside if j != i), default=0.0) for i in inside}
            bound = {i: min(norms[i], 100 * others[i]) if others[i] else norms[i] for i in inside}
            radii[index, tensor] = sum(weight[i] * bound[i] for i in inside) / whole
            present[tensor] = present.get(tensor, 0) + b - a
        for i in inside:
            sums += weight[i] * values[i]
            largest += weight[i] * float(np.abs(values[i]).max())
        mean = sums / whole if inside else sums
        directions.append(mean)
        bounds.append(np.full(len(mean), float(np.abs(mean).max()) + (largest / whole if inside else 0.0)))
        for tensor, size in enumerate(sizes):
            if (index, tensor) in radii:
                a, b = max(starts[tensor], span.start), min(starts[tensor] + size, span.stop)
                squares[tensor] = squares.get(tensor, 0.0) + float(np.sum(mean[a - span.start : b - span.start] ** 2))
    places: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (index, tensor), radius in radii.items():
        span = part.span(index)
        a, b = max(starts[tensor], span.start), min(starts[tensor] + sizes[tensor], span.stop)
        share = np.sqrt(present[tensor] / sizes[tensor])
        factor = radius * share / max(np.sqrt(squares[tensor]), share / 64)
        piece = slice(a - span.start, b - span.start)
        places.setdefault(tensor, []).append((directions[index][piece], bounds[index][piece]))
        for array in places[tensor][-1]:
            array *= factor
    for pieces in places.values():
        # What is off in any of its values is off in the length of a direction, and that in all of them.
        length, off = (np.sqrt(sum(float(np.sum(piece[k] ** 2)) for piece in pieces)) for k in (0, 1))
        for merged, bound in pieces:
            bound += 2 * np.abs(merged) * (off / length if length else 0.0)
    return list(zip(directions, bounds, strict=True))
