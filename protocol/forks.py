"""What is lost in going over from one chain to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    taken: Iterable[Head],
    commit: Callable[[bytes], Commit | None],
    peer: PeerId,
    layout: ChunkLayout,
) -> Lost:
    """What going over from ``left`` to another chain loses.

    taken: what is known of that chain, its head too. commit: a logged commit of the one that is left by its id, None
    when it is not kept. Below the older end of what is known nothing can be told apart any more, and nothing counts.
    """
    new = {head.height: head.id for head in taken}
    lowest = min(new, default=left.height + 1)
    commits = tokens = 0
    commit_id, height = left.id, left.height
    while height > 0 and new.get(height) != commit_id:
        known = commit(commit_id) if height >= lowest else None
        if known is None:
            # Where the chains part is not known; that they do is, when anything was found to be beside the new one.
            return Lost(commits, tokens, commits > 0)
        commits += 1
        seal = known.body.seal
        for member, count in zip(seal.members, averaged_of(seal, known.body.chunks, layout), strict=True):
            tokens += count if member.peer == peer else 0
        commit_id, height = known.body.parent, height - 1
    return Lost(commits, tokens, False)
