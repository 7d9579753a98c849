"""``lowrank``: the values of :mod:`atoll.protocol.lowrank`, factors of matrices and what is too small for them, as
``int4``; averages too. Measurements behind the choice: docs/decisions-codecs.md."""

from __future__ import annotations

from .int4 import Int4


class LowRank(Int4):
    """``int4`` of the values that travel. What becomes of a chunk before and after is no matter of the codec."""

    name = "lowrank"
