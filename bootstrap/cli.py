"""The bootstrap's side of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.protocol.shutdown import run_to_end


def bootstrap(
    ctx: typer.Context,
    manifest: Annotated[
        Path,
        typer.Option(
            "--manifest",
            "-m",
            envvar="ATOLL_MANIFEST",
            metavar="FILE",
            help="The run's signed manifest.",
            show_default=False,
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            envvar="ATOLL_STATE",
            metavar="DIR",
            help="State folder: identity and event log. \\[default: one per run in ~/.local/state/atoll]",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen",
            envvar="ATOLL_LISTEN",
            metavar="MULTIADDR",
            help="Where to accept peers, e.g. /ip4/0.0.0.0/tcp/31337; repeatable. \\[default: /ip4/0.0.0.0/tcp/0]",
            show_default=False,
        ),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            "--announce",
            envvar="ATOLL_ANNOUNCE",
            metavar="MULTIADDR",
            help="Address under which others reach this machine, e.g. /dns4/run.example.org/tcp/31337.",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            envvar="ATOLL_PEERS",
            metavar="MULTIADDR",
            help="Another bootstrap peer of the run (…/p2p/ID), so that both serve one DHT; repeatable.",
            show_default=False,
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(
            "--address-file",
            envvar="ATOLL_ADDRESS_FILE",
            metavar="FILE",
            help="Also write the run address to this file (nodes take it as @FILE).",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the bare address.")] = False,
) -> int:
    """Start a well-known peer of a run: it serves the signed manifest and the DHT, and prints the run's address.

    Publish that address: it is all that a volunteer needs. It stands alone on standard output; which run it is of, and
    the command that joins it, on standard error. The peer's identity is kept in the state folder, so after a
    restart on the same port the address is the same. The run goes on while it is away.

    Examples:

      atoll bootstrap --manifest run.toml --listen /ip4/0.0.0.0/tcp/31337

      atoll bootstrap -m run.toml --announce /dns4/run.example.org/tcp/31337 --address-file address
    """
    from .entry import BootstrapOptions, load_run, run_bootstrap

    run = load_run(manifest, state)
    ctx.obj["state"] = run.folder
    options = BootstrapOptions(
        run=run,
        listen=tuple(listen or ("/ip4/0.0.0.0/tcp/0",)),
        announce=tuple(announce or ()),
        peers=tuple(peer or ()),
        address_file=address_file,
        as_json=json,
    )
    return run_to_end(run_bootstrap(options), service=True)


def register(app: typer.Typer) -> None:
    """Add the bootstrap's command to the application."""
    app.command(rich_help_panel="Organise a run")(bootstrap)


__all__ = ["register"]
