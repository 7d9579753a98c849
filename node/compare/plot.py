"""Loss against tokens, bytes and simulated wall time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

AXES = (("tokens", 1e6, "tokens, millions"), ("bytes", 1e6, "sent by all peers, MB"), ("seconds", 1.0, "seconds"))


def plot(report: Mapping[str, Any], path: Path) -> bool:
    """Write a PNG; False when there is nothing to plot."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = [entry for entry in report["rows"] if entry.get("curve", {}).get("loss")]
    if not entries:
        return False
    figure = Figure(figsize=(16, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True)
    colours = colormaps["tab20"]
    for number, entry in enumerate(entries):
        curve = entry["curve"]
        style = "--" if entry["scenario"]["method"] == "data-parallel" else ("-", ":", "-.")[number // 20 % 3]
        for axis, (key, unit, _) in zip(axes, AXES, strict=True):
            if curve[key]:
                values = [value / unit for value in curve[key]]
                axis.plot(values, curve["loss"], style, color=colours(number % 20), lw=1.4, label=entry["name"])
    for axis, (key, _, label) in zip(axes, AXES, strict=True):
        axis.set_xlabel(f"simulated seconds on {report['link']}" if key == "seconds" else label)
        axis.grid(alpha=0.25)
        if key == "bytes":
            axis.set_xscale("symlog", linthresh=0.1)
    # The untrained model's loss would leave no room for what matters.
    ends = [entry["curve"]["loss"][-1] for entry in entries]
    axes[0].set_ylim(min(ends) - 0.05, max(ends) + 1.0)
    axes[0].set_ylabel("held-out loss (an eighth of the text), nats per byte")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return True
