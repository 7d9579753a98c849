"""How many rounds fit into the time there is: plain arithmetic over what a few seconds of measuring told.

The manifest fixes the number of rounds at the start (learning-rate schedules follow it), so the estimate has to err
on the short side: a run that ends early has a complete schedule, one that is cut off has not.
"""

from __future__ import annotations

from dataclasses import dataclass

SAFETY = 0.84
"""Share of the estimated time that is planned with; the rest absorbs noise of the machine."""


@dataclass(frozen=True)
class Costs:
    """What was measured, or is known, about this machine. Seconds of one core unless noted."""

    step: float
    """One inner step of one node, with the machine as busy as in the run (measured in as many processes as cores)."""
    evaluation: float
    """Scoring the held-out text once."""
    node_start: float = 6.0
    """Starting one node up to its first step: imports, compiled kernels, joining."""
    round_cpu: float = 0.12
    """One node's share of a round: encoding, reducing, the outer step, hashing, signing."""
    round_wait: float = 0.35
    """Wall seconds of a round that no core works in: reports, the call, the slowest member's last step."""
    finish: float = 12.0
    """Wall seconds at the end: the last evaluation, leaving, report, plot, sample."""


@dataclass(frozen=True)
class Plan:
    """The estimate in seconds of wall time."""

    rounds: int
    start: float
    per_round: float
    finish: float

    @property
    def total(self) -> float:
        return self.start + self.rounds * self.per_round + self.finish


def plan_rounds(
    costs: Costs, *, nodes: int, cores: int, inner_steps: int, seconds: float, spent: float = 0.0, fragments: int = 1
) -> Plan:
    """The largest number of rounds (at least 1) that ends within ``seconds``, of which ``spent`` have gone already.

    nodes: node processes; one observer runs beside them. cores: that they share. inner_steps, fragments: H and P
    of the manifest; a round of all fragments has P of the calls, and of the waits, that one of a whole model has.
    A round takes as long as its slowest chain (H steps one after another) or, with more nodes than cores, as all of
    its work divided by the cores.
    """
    if min(nodes, cores, inner_steps) < 1:
        raise ValueError("nodes, cores and inner_steps are at least 1")
    start = max(costs.node_start, costs.node_start * (nodes + 2) / cores)
    chain = inner_steps * costs.step + costs.round_cpu * fragments
    work = nodes * chain + costs.evaluation
    per_round = max(chain, work / cores) + costs.round_wait * fragments
    # When all steps are done, all fragments but one have a round more.
    finish = costs.finish + (fragments - 1) * (max(costs.round_cpu, nodes * costs.round_cpu / cores) + costs.round_wait)
    left = (seconds - spent - start - finish) * SAFETY
    return Plan(max(1, int(left / per_round)), start, per_round, finish)
