"""What is lost in going over from one chain to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .commits import averaged_of
from .layout import ChunkLayout
from .messages import Commit, Head
from .transport import PeerId


class Lost(NamedTuple):
    """Commits that the new chain does not have, and the tokens of one peer's that they had averaged."""

    commits: int
    tokens: int
    more: bool
    """Whether there may be more of them: what is known does not reach down to where the chains part."""


def lost_between(
    left: Head,
    taken: Head,
    path: Sequence[Head],
    commit: Callable[[bytes], Commit | None],
    peer: PeerId,
    layout: ChunkLayout,
) -> Lost:
    """What going over from ``left`` to ``taken`` loses.

    path: what else is known of the chain of ``taken``. commit: a logged commit by its id, None when it is not kept.
    Below the older end of what is known nothing can be told apart any more, and nothing is counted.
    """
    new = {head.height: head.id for head in path}
    commit_id = taken.id
    while (known := commit(commit_id)) is not None:
        new[known.body.height] = commit_id
        commit_id = known.body.parent
    lowest = min(new, default=taken.height)
    commits = tokens = 0
    commit_id, height = left.id, left.height
    while height > 0 and new.get(height) != commit_id:
        known = commit(commit_id)
        if height < lowest or known is None:
            # Where the chains part is not known; that they do is, when anything was found to be beside the new one.
            return Lost(commits, tokens, commits > 0)
        commits += 1
        for member, count in zip(
            known.body.seal.members, averaged_of(known.body.seal, known.body.chunks, layout), strict=True
        ):
            tokens += count if member.peer == peer else 0
        commit_id, height = known.body.parent, height - 1
    return Lost(commits, tokens, False)
