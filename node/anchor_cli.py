"""``atoll anchor``: the owner of a run vouches for one of its commits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from atoll.protocol.errors import UsageError
from atoll.protocol.shutdown import run_to_end

from .cli import AddressArgument, JsonOption, read_address


def _commit(text: str | None) -> str | None:
    """Refuse what is no commit id before anybody is asked for it."""
    if text is not None and re.fullmatch(r"[0-9a-fA-F]{32,64}", text) is None:
        raise UsageError(
            f"{text!r} is no commit id; give its 64 hex digits, or 32 of them at least: shorter ones others could make"
        )
    return text.lower() if text is not None else None


def anchor(
    address: AddressArgument,
    key: Annotated[
        Path,
        typer.Option(
            "--key", "-k", metavar="KEYFILE", help="The owner's key, with which the manifest was signed.",
            show_default=False,
        ),
    ],
    commit: Annotated[
        str | None,
        typer.Option(
            "--commit", "-c", metavar="ID", callback=_commit, show_default=False,
            help="The commit's id, 32 digits of it at least. \\[default: the head that most peers have]",
        ),
    ] = None,
    json: JsonOption = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the run to answer.")] = 20.0,
) -> int:  # fmt: skip
    """Anchor a commit: from then on every peer prefers chains that hold it, whatever another one weighs.

    That protects a run that admits anybody from a heavier chain made of invented work. A later anchor replaces all
    before it. Peers keep it and pass it on, so this is called once, and again now and then. Before it signs, the
    commit is fetched from peers and its signatures are checked; that it is the right one only you can know. Exit code 2
    when no peer has it, or KEYFILE is not the owner's; 4 when nobody answers.

    Examples:

      atoll anchor @address --key owner.key

      atoll anchor @address --key owner.key --commit 3f9ac2d81b5e77a04d1c9e5b2a6f8013
    """  # fmt: skip
    from .anchor import anchor_run

    return run_to_end(anchor_run(read_address(address), key, commit, as_json=json, timeout=timeout))


__all__ = ["anchor"]
