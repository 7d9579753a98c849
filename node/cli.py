"""The node's side of the command line: what trains, shows and compares, and ``manifest``.

Nothing heavy is imported here: ``atoll --help`` has to answer at once, and only the command that is called pays for
what it needs. Commands return their exit code; errors become messages in ``atoll.__main__`` and nowhere else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.protocol.errors import UsageError, why_unreadable
from atoll.protocol.shutdown import run_to_end

from .options import Encode, Finish, LogStyle, NodeOptions, ObserverOptions

AddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        envvar="ATOLL_ADDRESS",
        help="Run address as `atoll bootstrap` prints it; @FILE reads it from a file.",
        show_default=False,
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        envvar="ATOLL_STATE",
        metavar="DIR",
        help="State folder: identity, commits, event log. \\[default: one per run in ~/.local/state/atoll]",
        show_default=False,
    ),
]


def _device(name: str) -> str:
    """Refuse a name that no machine knows, before anything is started for it."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise UsageError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
    return name


DeviceOption = Annotated[
    str,
    typer.Option("--device", envvar="ATOLL_DEVICE", metavar="NAME", help="auto, cpu, cuda, cuda:1.", callback=_device),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--threads", envvar="ATOLL_THREADS", min=0, max=1024, help="CPU threads of the trainer; 0: by itself."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="ATOLL_DATA",
        metavar="PATH",
        help="Where the run's text lies here, for runs that train on a folder or file.",
        show_default=False,
    ),
]
ListenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        envvar="ATOLL_LISTEN",
        metavar="MULTIADDR",
        help="Where to accept peers, e.g. /ip4/0.0.0.0/tcp/31337; repeatable. \\[default: any free port]",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", envvar="ATOLL_SEED", min=0, help="Seed of this process's random choices.", show_default=False
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", envvar="ATOLL_TIMEOUT", min=1, help="Seconds within which the run must have answered."),
]
LogOption = Annotated[
    LogStyle,
    typer.Option(
        "--log", envvar="ATOLL_LOG", help="What to print; events.jsonl in the state folder is written anyway."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, for scripts.")]

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)


def read_address(text: str) -> str:
    """``text`` itself, or what stands in the file behind ``@``. Raises :class:`UsageError`."""
    if not text.startswith("@"):
        if "@" not in text and Path(text).is_file():
            raise UsageError(f"{text} is a file; write @{text} to read the run address from it")
        return text.strip()
    path = Path(text[1:])
    wanted = "@FILE reads the run address that `atoll bootstrap --address-file` wrote there; or give it (atoll:…)"
    if not text[1:]:
        raise UsageError(f"there is no file name after the @; {wanted}")
    try:
        content = path.read_text().split()
    except OSError as error:
        raise UsageError(f"{why_unreadable(path, error)}; {wanted}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file; {wanted}") from None
    if len(content) != 1:
        found = f"found {len(content)} words" if content else "it is empty"
        raise UsageError(f"{path} should hold one run address and nothing else; {found}; {wanted}")
    return content[0]


def node(
    ctx: typer.Context,
    address: AddressArgument,
    state: StateOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            envvar="ATOLL_NAME",
            help="Public name shown to others; '' for none. \\[default: two words made from the peer id]",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    encode: Annotated[
        Encode,
        typer.Option(
            "--encode",
            envvar="ATOLL_ENCODE",
            help="Where contributions are encoded, with the same bytes; auto: on CUDA devices there, else on the host.",
        ),
    ] = Encode.auto,
    data: DataOption = None,
    listen: ListenOption = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            "--announce",
            envvar="ATOLL_ANNOUNCE",
            metavar="MULTIADDR",
            help="Address under which others reach this machine, if it is not the one it listens on.",
            show_default=False,
        ),
    ] = None,
    client: Annotated[
        bool, typer.Option("--client", envvar="ATOLL_CLIENT", help="Accept no connections; only dial out.")
    ] = False,
    seed: SeedOption = None,
    timeout: TimeoutOption = 60.0,
    finish: Annotated[
        Finish,
        typer.Option(
            "--finish", envvar="ATOLL_FINISH", help="When the run's budget is used up: exit, or stay and serve."
        ),
    ] = Finish.exit,
    keep_every: Annotated[
        float,
        typer.Option(
            "--keep-every",
            envvar="ATOLL_KEEP_EVERY",
            metavar="SECONDS",
            min=0,
            help="Save what was trained since the last commit so often, 4 bytes a parameter; 0: never.",
        ),
    ] = 900.0,
    log: LogOption = LogStyle.auto,
) -> int:
    """Join a run and train: this is what a volunteer starts.

    The node fetches the signed manifest, downloads the run's current state, trains on its own and meets the others
    every round. While nobody answers it says what it tries, and ends after --timeout. Ctrl-C leaves cleanly; started
    again, it goes on with the same identity.

    Examples:

      atoll node atoll:4f1c...@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

      atoll node ADDRESS --device cuda --name reef --state /var/lib/atoll

      ATOLL_ADDRESS=@/run/atoll/address atoll node          (containers: every option has an ATOLL_ variable)
    """
    address = read_address(address)
    folder = run_state(address, state)
    ctx.obj["state"] = folder
    options = NodeOptions(
        address=address,
        state=folder,
        name=name,
        device=device,
        threads=threads,
        encode=encode,
        data=data,
        listen=tuple(listen or DEFAULT_LISTEN),
        announce=tuple(announce or ()),
        client_mode=client,
        seed=seed,
        timeout=timeout,
        finish=finish,
        keep_every=keep_every,
        log=log,
    )
    from .daemon import run_node

    return run_to_end(run_node(options), service=True)


def observe(
    ctx: typer.Context,
    address: AddressArgument,
    state: StateOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
    data: DataOption = None,
    listen: ListenOption = None,
    seed: SeedOption = None,
    timeout: TimeoutOption = 60.0,
    every: Annotated[
        int, typer.Option("--every", envvar="ATOLL_EVERY", min=1, help="Evaluate every so many commits.")
    ] = 1,
    log: LogOption = LogStyle.auto,
) -> int:
    """Follow a run without training: score the global parameters of its commits on the held-out text.

    Writes `evaluation` events into events.jsonl of its state folder; `atoll swarm` runs one of these.

    Example:  atoll observe ADDRESS --state ./observer --every 5
    """
    address = read_address(address)
    folder = run_state(address, state, "observer-")
    ctx.obj["state"] = folder
    options = ObserverOptions(
        address=address,
        state=folder,
        device=device,
        threads=threads,
        data=data,
        listen=tuple(listen or DEFAULT_LISTEN),
        seed=seed,
        timeout=timeout,
        every=every,
        log=log,
    )
    from .daemon import run_observer

    return run_to_end(run_observer(options), service=True)


def status(
    ctx: typer.Context,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            envvar="ATOLL_ADDRESS",
            help="Run address, or @FILE; not needed with --state.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between refreshes with --watch.")] = 5.0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the run to answer.")] = 20.0,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            envvar="ATOLL_STATE",
            metavar="DIR",
            help="Look at a node of this machine by its event log.",
            show_default=False,
        ),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age",
            min=0,
            metavar="SECONDS",
            help="Health check of --state: exit 0 only if its head is newer.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Show who takes part in a run and how far it is, or check one node's health.

    With an address: asks the DHT, as a client that stores and trains nothing. Exit code 4 when nobody answers.
    With --state and --max-age: reads that node's event log only, for container health checks; exit code 0 when it has
    seen a commit within that many seconds, else 1.

    Examples:

      atoll status ADDRESS

      atoll status ADDRESS --json | jq '.peers | length'

      atoll status --state /var/lib/atoll --max-age 300
    """
    from . import status as status_module

    if max_age is not None:
        if state is None:
            raise UsageError("--max-age needs --state DIR, the state folder of the node to check")
        return status_module.check_health(state, max_age, as_json=json)
    if address is None and state is not None:
        return status_module.show_local(state, as_json=json)
    if address is None:
        raise UsageError("give a run address, or --state DIR to look at a node of this machine")
    return run_to_end(
        status_module.show_status(read_address(address), as_json=json, watch=watch, every=every, timeout=timeout)
    )


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A .safetensors file of atoll, or a folder: its newest.", show_default=False
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.")] = "def ",
    length: Annotated[int, typer.Option("--length", "-n", min=1, max=100_000, help="Bytes to generate.")] = 400,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=10, help="0: the likeliest each time.")
    ] = 0.7,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same text.")] = 0,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> int:
    """Continue a text with a trained checkpoint.

    `atoll swarm` leaves one in its folder, and each node in its state folder under checkpoints.

    Example:  atoll generate runs/demo-20260131-120000/checkpoint --prompt 'import os' --length 200
    """
    from .generate import generate as continue_text

    text = continue_text(checkpoint, prompt, length, temperature, seed, device)
    if json:
        print_json({"checkpoint": str(checkpoint), "prompt": prompt, "text": text})
    else:
        typer.echo(text)
    return 0


def swarm(
    ctx: typer.Context,
    nodes: Annotated[
        int, typer.Option("--nodes", "-n", envvar="ATOLL_NODES", min=1, max=64, help="Node processes to start.")
    ] = 4,
    manifest: Annotated[
        Path | None,
        typer.Option(
            "--manifest",
            "-m",
            metavar="FILE",
            help="Start from this manifest (signed anew by the swarm) instead of the demonstration's.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            "-r",
            min=1,
            max=1_000_000,
            help="Rounds of the run. \\[default: as many as fit into --minutes]",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.5,
            max=100_000,
            help="How long it may take, all in all. \\[default: 4; with --manifest as long as its rounds take]",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write the JSON report here.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where everything goes. \\[default: ./runs/NAME-TIME]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the nodes' random choices.", show_default=False)
    ] = None,
    device: DeviceOption = "cpu",
    data: DataOption = None,
    json: JsonOption = False,
) -> int:
    """Run a whole swarm on this machine and show it: a bootstrap peer, N nodes and an observer, all real processes.

    They are the very processes that volunteers run, bound to 127.0.0.1. It shows the command that adds one by hand in
    another terminal. At the end: a summary, loss.png, sample.txt, the final checkpoint and
    report.json. Ctrl-C stops everything within ten seconds.

    Examples:

      atoll swarm

      atoll swarm --nodes 8 --rounds 20 --out runs/eight

      atoll swarm --json --rounds 4 > report.json
    """
    from .swarm.command import SwarmOptions, run_swarm

    options = SwarmOptions(
        nodes=nodes,
        manifest=manifest,
        rounds=rounds,
        minutes=minutes,
        report=report,
        out=out,
        seed=seed,
        device=device,
        data=data,
        as_json=json,
    )
    return run_swarm(options, lambda folder: ctx.obj.__setitem__("state", folder))


def compare(
    ctx: typer.Context,
    manifests: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MANIFEST", help="Manifests to compare; the first is the reference."),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            "--study",
            metavar="FILE",
            help="Rows as changes to one manifest, with circumstances (lost messages, speeds, deaths) and sweeps.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, max=1000, help="Seeds a row. \\[default: 3]", show_default=False)
    ] = None,
    max_seeds: Annotated[
        int | None,
        typer.Option(
            "--max-seeds",
            min=1,
            max=1000,
            help="Add seeds up to so many where the 95 % interval is wider than the margin.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help="Tokens a run. \\[default: as the manifests say]", show_default=False),
    ] = None,
    peers: Annotated[int, typer.Option("--peers", "-n", min=1, max=64, help="Peers of a run.")] = 4,
    real: Annotated[
        bool, typer.Option("--real", help="Run real nodes on this machine, over loopback, instead of simulated peers.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where runs, table and plot go; the same folder resumes.")
    ] = Path("runs/compare"),
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Add synchronous data-parallel training, its learning rate swept.")
    ] = False,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            min=0.001,
            max=1000,
            metavar="PERCENT",
            help="How much worse than the reference a row may be; asks for a verdict.",
            show_default=False,
        ),
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa/--no-aa", help="Add the reference on other text: the size of what means nothing.")
    ] = True,
    link: Annotated[
        str, typer.Option("--link", metavar="RATE,LATENCY", help="Link of each peer, for the simulated wall time.")
    ] = "20mbit,50ms",
    step_time: Annotated[
        float | None,
        typer.Option(
            "--step-time",
            min=1e-6,
            metavar="SECONDS",
            help="Of one inner step, for the simulated wall time, and for rounds by time, in rows without a "
            "scenario.step_time. \\[default: as measured here]",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            max=1024,
            show_default=False,
            help="Simulated runs at a time; one with real nodes is alone. \\[default: one a core]",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.0, help="Start no run after so many minutes.", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="REGEX", help="Only rows whose names match.", show_default=False),
    ] = None,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="Count runs that were made by other versions of the code, too.")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run what is missing, or only show what is there.")
    ] = True,
    json: JsonOption = False,
) -> int:
    """Train manifests side by side with simulated peers, and say what can be concluded.

    Each run is one process without a network, or with --real a swarm of nodes on this machine. Rows are compared seed
    by seed: mean difference, its 95 % interval, and a verdict against a margin. What has finished is kept: the same
    command goes on where it was interrupted.

    Examples:

      atoll compare int8.toml int4.toml --seeds 5 --tokens 1000000 --margin 1 --baseline

      atoll compare --study study.toml --out runs/study --minutes 60
    """
    from .compare.command import CompareOptions, run_compare
    from .compare.link import Link

    options = CompareOptions(
        manifests=tuple(manifests or ()),
        study=study,
        seeds=seeds,
        max_seeds=max_seeds,
        tokens=tokens,
        peers=peers,
        out=out,
        real=real,
        baseline=baseline,
        margin=margin,
        aa=aa,
        link=Link.parse(link),
        step_time=step_time,
        jobs=jobs,
        minutes=minutes,
        only=only,
        any_code=any_code,
        run=run,
        as_json=json,
    )
    ctx.obj["state"] = out
    return run_compare(options)


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of standard output."""
    import json as codec

    typer.echo(codec.dumps(value))


def run_state(address: str, state: Path | None, prefix: str = "") -> Path:
    """The state folder to use. Reads the address, so a malformed one is refused before anything is created."""
    from atoll.protocol.address import RunAddress
    from atoll.protocol.statefolder import default_state

    parsed = RunAddress.parse(address)
    return state if state is not None else default_state(parsed.run_id, prefix)


def register(app: typer.Typer) -> None:
    """Add the node-side commands to the application."""
    from .anchor_cli import anchor
    from .manifest_cli import manifest_app

    app.command(rich_help_panel="Take part")(node)
    app.command(rich_help_panel="Take part")(status)
    app.command(rich_help_panel="Try it")(swarm)
    app.command(rich_help_panel="Try it")(compare)
    app.command(rich_help_panel="Try it")(generate)
    app.command(rich_help_panel="Organise a run")(observe)
    app.command(rich_help_panel="Organise a run")(anchor)
    app.add_typer(manifest_app, name="manifest", rich_help_panel="Organise a run")


__all__ = ["register"]
