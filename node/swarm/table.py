"""The swarm as people see it: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.node.console import human_bytes

from .ledger import Ledger, NodeRow

STATE_STYLES = {
    "training": "green",
    "averaging": "cyan",
    "waiting": "yellow",
    "joining": "blue",
    "starting": "blue",
    "finished": "dim",
    "leaving": "dim",
    "dead": "bold red",
    "gone": "red",
}


@dataclass(frozen=True)
class Header:
    """What stands around the table."""

    title: str
    address: str
    rounds: int
    """Outer steps of the whole run."""
    started: float
    deadline: float
    """Both in seconds on the clock that :func:`render` is given ``now`` from."""
    bars: Mapping[str, float] = field(default_factory=dict)
    """Name of an n-gram table to its score, nats per token."""
    trained_since: float | None = None
    """When the first round began, for the estimate of the time left."""
    join: str = ""
    """The command that adds a node by hand; the address itself when empty. Short enough to stay on one line."""


def human_count(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.0f}{unit}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def human_time(seconds: float) -> str:
    """Minutes and seconds: 3:07, 1:02:05."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def exit_text(code: int) -> str:
    """An exit code as people say it."""
    if code >= 0:
        return f"exit {code}"
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def remaining(ledger: Ledger, header: Header, now: float) -> float | None:
    """Seconds to the last round at the pace so far; None before the second outer step."""
    done = ledger.outer_step
    if header.trained_since is None or done < 1 or header.rounds <= done:
        return 0.0 if header.rounds <= done and done else None
    return (now - header.trained_since) / done * (header.rounds - done)


def render(ledger: Ledger, header: Header, now: float) -> RenderableType:
    """The live view: title, one row a node, the swarm's loss against the bars, time, address."""
    return Group(_title(ledger, header, now), _nodes(ledger), *_loss(ledger, header), _foot(header))


def _title(ledger: Ledger, header: Header, now: float) -> Text:
    left = remaining(ledger, header, now)
    parts = [
        f"outer step {ledger.outer_step}/{header.rounds}",
        f"{human_count(ledger.tokens)} tokens",
        f"elapsed {human_time(now - header.started)}",
        f"left about {human_time(left)}" if left is not None else "left …",
    ]
    if ledger.voids:
        parts.append(f"{len(ledger.voids)} void")
    return Text.assemble((header.title, "bold"), "  ", "  ·  ".join(parts))


def _nodes(ledger: Ledger) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name, justify in (
        ("node", "left"),
        ("peer", "left"),
        ("state", "left"),
        ("outer step", "right"),
        ("steps", "right"),
        ("loss", "right"),
        ("tokens/s", "right"),
        ("out", "right"),
        ("in", "right"),
        ("digest", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in ledger.rows.values():
        if row.source.startswith("node"):
            table.add_row(*_cells(row))
    for peer, last in ledger.outside().items():
        table.add_row(
            Text("by hand"),
            short_peer(peer),
            Text("in roster", "magenta"),
            str(ledger.commits[last].outer_step),
            *[""] * 6,
        )
    return table


def _cells(row: NodeRow) -> list[RenderableType]:
    state = row.state if row.exit_code is None or row.state == "finished" else exit_text(row.exit_code)
    style = STATE_STYLES.get(row.state, "")
    return [
        row.source,
        short_peer(row.peer),
        Text(state, style),
        "" if row.outer_step is None else str(row.outer_step),
        str(row.steps),
        "" if row.loss is None else f"{row.loss:.3f}",
        "" if row.tokens_per_s is None else human_count(row.tokens_per_s),
        human_bytes(row.sent.total),
        human_bytes(row.received.total),
        row.digest[:8],
    ]


def short_peer(peer: str) -> str:
    """The end of a peer id: its beginning is the same for all."""
    return f"…{peer[-6:]}" if peer else ""


def _loss(ledger: Ledger, header: Header) -> list[RenderableType]:
    curve = ledger.curve()
    scale = max([*header.bars.values(), *(point.val_loss for point in curve[-1:]), 0.1])
    bars = Table.grid(padding=(0, 1))
    entries = [(name, value, "dim") for name, value in header.bars.items()]
    if curve:
        entries.append((f"swarm, outer step {curve[-1].outer_step}", curve[-1].val_loss, "bold green"))
    for name, value, style in entries:
        bars.add_row(
            Text(name, style), Text(f"{value:.3f}", style), Text("█" * max(1, round(value / scale * 40)), style)
        )
    if not entries:
        return []
    return [Text("\nheld-out loss, nats per byte", "dim"), bars]


def _foot(header: Header) -> Text:
    return Text.assemble(("\njoin by hand: ", "dim"), header.join or f"atoll node {header.address}", overflow="fold")


def line(ledger: Ledger, header: Header, now: float) -> str:
    """The same in one plain line, for logs."""
    curve = ledger.curve()
    alive = [r for r in ledger.rows.values() if r.source.startswith("node") and r.exit_code is None]
    losses = [row.loss for row in alive if row.loss is not None]
    speed = sum(row.tokens_per_s or 0.0 for row in alive)
    left = remaining(ledger, header, now)
    parts = [
        f"[{human_time(now - header.started)}]",
        f"outer step {ledger.outer_step}/{header.rounds}",
        f"nodes {len(alive)}" + (f"+{len(ledger.outside())}" if ledger.outside() else ""),
        f"train loss {sum(losses) / len(losses):.3f}" if losses else "train loss -",
        f"val loss {curve[-1].val_loss:.3f}" if curve else "val loss -",
        f"{human_count(speed)} tokens/s",
        f"sent {human_bytes(sum(row.sent.total for row in ledger.rows.values()))}",
    ]
    if left is not None:
        parts.append(f"left about {human_time(left)}")
    return "  ".join(parts)
