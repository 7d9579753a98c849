"""The command ``atoll``: assembles the parts, and is the one place where errors become messages and exit codes.

Exit codes: 0 done, 1 defect, 2 usage, 3 manifest or config, 4 address or network, 5 data, 6 checkpoint or state
folder, 7 resources (port, disk, device), 8 version, 130 Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .bootstrap import cli as bootstrap_cli
from .node import cli as node_cli
from .protocol.errors import AtollError
from .protocol.statefolder import state_home

# typer carries its own click, older versions used the one installed; both are found through the class they share.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="atoll",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 defect, 2 usage, 3 manifest or config, 4 address or network, 5 data, "
    "6 checkpoint or state folder, 7 resources, 8 version, 130 Ctrl-C.",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"atoll {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train one neural network together on machines that owe each other nothing.

    New here? `atoll swarm` runs a whole swarm on this machine. To join a run: `atoll node ADDRESS`. To start one:
    `atoll manifest new`, `atoll manifest sign`, `atoll bootstrap`.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


node_cli.register(app)
bootstrap_cli.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script. Ends the process with the documented exit code."""
    code = run(arguments)
    # All is said and done: one more Ctrl-C, while Python takes itself apart, must not change how this ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A thread that is left is in the middle of something long (compiling, scoring) that nobody needs any more. And with
    # torch, hivemind and numba loaded, taking Python apart costs one to two seconds of a core: ten on a busy machine.
    threads = threading.active_count() > 1
    if threads or "torch" in sys.modules:
        if not threads:
            atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error has become one line on standard error."""
    known: dict[str, Any] = {"state": None}
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="atoll", standalone_mode=False, obj=known)
        sys.stdout.flush()
        return result if isinstance(result, int) and not isinstance(result, bool) else 0
    except AtollError as error:
        return _fail(str(error), error.exit_code)
    except _ClickException as error:
        if not error.format_message().strip():  # `atoll manifest` alone: its help has been shown instead
            return int(error.exit_code)
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        return _fail(error.format_message() + hint, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`atoll status | head`), which typer turns into an exit; no command raises
        # SystemExit itself. Nothing more can be said there.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            what = "the disk is full" if error.errno != errno.EROFS else "the file system is read-only"
            return _fail(f"{what}: {error.filename or 'a file'} could not be written", 7)
        return _defect(error, known["state"])
    except Exception as error:
        return _defect(error, known["state"])


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    with contextlib.suppress(OSError):
        print(f"atoll: error: {line}", file=sys.stderr, flush=True)
    return code


def _defect(error: BaseException, state: Path | None) -> int:
    """A bug: keep the traceback in a file for the report, and say where it is."""
    text = (
        f"atoll {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"command: {' '.join(sys.argv[1:])}\n\n" + "".join(traceback.format_exception(error))
    )
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for folder in (state, state_home(), Path(tempfile.gettempdir())):
        if folder is None:
            continue
        path = folder / f"crash-{stamp}-{os.getpid()}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError:
            continue
        return _fail(
            f"a defect in atoll ({type(error).__name__}: {error}); please report it with the details in {path}", 1
        )
    print(text, file=sys.stderr)
    return _fail(f"a defect in atoll ({type(error).__name__}: {error}); the details stand above", 1)


if __name__ == "__main__":
    main()
