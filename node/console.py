"""What a node prints while it runs: its events in words, and on a terminal one line that is kept current."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from .looking import in_words
from .options import LogStyle

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PROGRESS_EVERY = 10.0
"""Seconds between two progress lines where the line cannot be kept current."""


def short(id: Any) -> str:
    """The end of a peer id, the beginning of anything else."""
    text = str(id or "?")
    return f"…{text[-6:]}" if text.startswith("12D3KooW") else text[:10]


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit: 532 B, 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _number(event: dict[str, Any], key: str, form: str, missing: str = "-") -> str:
    value = event.get(key)
    return format(value, form) if isinstance(value, int | float) and not isinstance(value, bool) else missing


def outer_step(event: dict[str, Any], of: Any = None) -> str:
    """How far the run is, the same everywhere: outer steps taken, of those that it has, if that is known."""
    total = f"/{of}" if isinstance(of, int) and not isinstance(of, bool) and of > 0 else ""
    return f"outer step {event.get('outer_step', '?')}{total}"


def describe(event: dict[str, Any], of: Any = None) -> str | None:
    """An event in words; None for those that are not worth a line (progress has :func:`describe_progress`).

    of: outer steps of the whole run, from the node's ``start`` event. Progress is told in outer steps; a round's number
    names an attempt, and stands where that attempt is spoken of.
    """
    kind = event["event"]
    if kind == "looking":
        at = event.get("at") or []
        return f"looking for run {short(event.get('run'))} at {', '.join(map(str, at)) or '?'}"
    if kind == "unreached":
        return in_words(event.get("reasons") or {})
    if kind == "start":
        return (
            f"{event.get('name') or 'node'} starts: peer {event.get('peer')}, run {short(event.get('run'))}, "
            f"device {event.get('device', '?')}"
        )
    if kind == "state":
        reason = event.get("reason")
        return f"now {event.get('state')}" + (f": {reason}" if reason else "")
    if kind == "resumed":
        return f"the state folder has {outer_step(event, of)} of the run; going on from there"
    if kind == "ended":
        return (
            f"the trainer {'hung' if event.get('hung') else 'ended'}, another is started; lost: "
            f"{event.get('lost_steps', '?')} inner steps ({event.get('lost_tokens', '?')} tokens), "
            f"{event.get('lost_units', '?')} samples"
        )
    if kind == "seal":
        members = event.get("members") or []
        return (
            f"round {event.get('round')}: in a group of {len(members)}, led by {short(event.get('coordinator'))}, "
            f"at most {_number(event, 'deadline', '.0f')} s"
        )
    if kind == "void":
        return f"round {event.get('round')}: void ({event.get('reason')}); everybody keeps what was not averaged"
    if kind == "commit":
        return _describe_commit(event, of)
    if kind == "resync":
        return describe_resync(event, of)
    if kind == "evaluation":
        return f"{outer_step(event, of)}: held-out loss {_number(event, 'val_loss', '.4f')}"
    if kind == "refused":
        return f"refused {short(event.get('from'))} ({event.get('fault', 'hostile')}): {event.get('reason')}"
    if kind == "anchor":
        held = event.get("held")
        where = (
            "" if held is None else f", which is {'' if held else 'not '}in this peer's chain{'' if held else ' (yet)'}"
        )
        return f"the organiser anchors commit {short(event.get('commit'))}, {outer_step(event, of)}{where}"
    if kind == "warning":
        return f"warning: {event.get('message')}"
    if kind == "exit":
        return f"ends: {event.get('reason') or 'done'}"
    return None


def describe_resync(event: dict[str, Any], of: Any = None) -> str:
    """Going over to another head, and what that cost."""
    commits, averaged, dropped = (int(event.get(f"lost_{what}") or 0) for what in ("commits", "averaged", "tokens"))
    lost = []
    if commits:
        more = " or more" if event.get("lost_more") else ""
        lost.append(f"{commits}{more} commits that the others do not have, with {averaged:,} tokens of this node's")
    if dropped:
        lost.append(f"{dropped:,} tokens that this node had not brought yet")
    if event.get("left_round") == 0:
        did = "fetched the state of the others"
    else:
        did = f"went over to the others' {'chain' if commits else 'head'}"
    return f"{outer_step(event, of)}: {did}" + (f"; lost: {' and '.join(lost)}" if lost else "")


def _describe_commit(event: dict[str, Any], of: Any) -> str:
    members = event.get("members") or []
    who = f"{len(members)} member{'' if len(members) == 1 else 's'}"
    took_part = event.get("took_part", True)
    if not event.get("averaged", event.get("outer_step") != 0):
        # Of leases alone: a run, or a joiner, begins so.
        later = "" if took_part else " (caught up)"
        return f"round {event.get('round')}: hands out samples to {who}, no outer step{later}"
    if not took_part:
        return (
            f"round {event.get('round')}: caught up with {outer_step(event, of)}, averaged by {who} without this node"
        )
    alone = "; alone: nobody else took part, so this does not count as progress of the swarm"
    return (
        f"round {event.get('round')}: committed {outer_step(event, of)} with {who} "
        f"in {_number(event, 'seconds', '.1f')} s{alone if event.get('lone') else ''}"
    )


def describe_progress(event: dict[str, Any], of: Any = None) -> str:
    """A progress event in one short line."""
    return (
        f"{event.get('state', '?')}: {outer_step(event, of)}, step {event.get('steps', 0)}, "
        f"loss {_number(event, 'loss', '.3f')}, {_number(event, 'tokens_per_s', ',.0f')} tokens/s, "
        f"out {human_bytes(event.get('bytes_sent') or 0)}, in {human_bytes(event.get('bytes_received') or 0)}, "
        f"{event.get('peers', '?')} peers"
    )


def describe_use(event: dict[str, Any]) -> str:
    """What a trainer has spent its time on, by a progress event; empty where that does not tell."""
    try:
        seconds = [float(event[name]) for name in ("trained", "held", "waited")]
    except (KeyError, TypeError, ValueError):
        return ""
    if (total := sum(seconds)) <= 0:
        return ""
    trained, held, waited = (f"{100 * part / total:.0f} %" for part in seconds)
    return f"of {total:.0f} s {trained} inner steps, {held} kept by rounds, {waited} without samples"


class ConsoleEcho:
    """Prints events; give it to an :class:`~atoll.protocol.eventlog.EventLog` as ``echo``, and close it at the end."""

    def __init__(
        self,
        style: LogStyle,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._json = style is LogStyle.json
        self._quiet = style is LogStyle.quiet
        self._next_progress = 0.0
        self._of: Any = None
        """Outer steps of the run, once its ``start`` has told them."""
        self._live: Live | None = None
        self._console = console
        if not self._json and not self._quiet and console is None:
            from rich.console import Console as RichConsole

            self._console = RichConsole(stderr=False, highlight=False)
        if self._console is not None and style in (LogStyle.auto, LogStyle.console) and self._console.is_terminal:
            from rich.live import Live as RichLive

            self._live = RichLive("", console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def __call__(self, event: dict[str, Any]) -> None:
        if self._quiet:
            return
        if self._json:
            sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
            sys.stdout.flush()
            return
        self._of = event.get("rounds") if event["event"] == "start" else self._of
        if event["event"] == "progress":
            self._progress(describe_progress(event, self._of))
        elif (text := describe(event, self._of)) is not None:
            self._print(text, self._style(event))

    def _progress(self, text: str) -> None:
        if self._live is not None:
            self._live.update(text, refresh=True)
        elif self._clock() >= self._next_progress:
            self._next_progress = self._clock() + PROGRESS_EVERY
            self._print(text)

    def _print(self, text: str, style: str | None = None) -> None:
        if self._console is not None:
            stamp = time.strftime("%H:%M:%S")
            self._console.print(f"{stamp} {text}", style=style, markup=False, soft_wrap=True)

    @staticmethod
    def _style(event: dict[str, Any]) -> str | None:
        kind = event["event"]
        if kind in ("warning", "refused", "void", "ended") or event.get("lone") or event.get("held") is False:
            return "yellow"
        if kind == "unreached" and event.get("reasons"):
            return "yellow"
        return "green" if kind == "commit" and event.get("took_part", True) else None

    def close(self) -> None:
        """Take the current line away. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None
