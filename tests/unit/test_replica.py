"""How a commit changes the global state at a peer."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.protocol.averaged import unpack
from atoll.protocol.commits import START
from atoll.protocol.outer import outer_step

from .runchain import Run, theta0


@pytest.mark.parametrize(
    ("outer", "phases"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, [0, 0, 0, 0]),
        ({"optimizer": "delayed-nesterov", "period": 3}, [0, 1, 2, 0]),
    ],
)
def test_the_outer_step_is_the_manifest_s_and_its_phase_the_commit_s(
    outer: dict[str, object], phases: list[int]
) -> None:
    run = Run()
    run.manifest = run.manifest.replace(outer=outer)
    expected = theta0(run.layout)
    # a commit of leases alone is no outer step, so it does not move the phase
    _, _, position = run.commit(START, weight=0)
    for phase in phases:
        _, chunks, position = run.commit(position)
        for index, chunk in enumerate(chunks):
            span = run.layout.span(index)
            mean = np.empty(run.layout.size(index), np.float32)
            run.codec.decode(unpack(chunk).payload, len(mean), mean)
            settings = run.manifest.outer
            outer_step(
                expected.params[span], expected.momentum[span], mean, settings.lr, settings.momentum,
                settings.optimizer, phase=phase, period=settings.period,
            )  # fmt: skip
        state = run.states[position.head.id]
        assert state.params.tobytes() == expected.params.tobytes()
        assert state.momentum.tobytes() == expected.momentum.tobytes()
