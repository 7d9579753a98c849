"""The picture: held-out loss against tokens, and against bytes sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .ledger import Evaluation


def plot_loss(curve: list[Evaluation], bars: Mapping[str, float], title: str, path: Path) -> None:
    """Write a PNG. ``bars``: n-gram tables of the same bytes and their scores, drawn as level lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    losses = [point.val_loss for point in curve]
    for ax, values, label in (
        (axes[0], [point.tokens / 1e6 for point in curve], "tokens averaged, millions"),
        (axes[1], [point.bytes / 1e6 for point in curve], "stream payload sent by all nodes, MB"),
    ):
        ax.plot(values, losses, marker="o", markersize=3, linewidth=1.6, color="#0b7a75", label="swarm", zorder=3)
        for shade, (name, value) in zip(("#b8b8b8", "#949494", "#6f6f6f", "#4a4a4a"), bars.items(), strict=False):
            ax.axhline(value, color=shade, linewidth=1.1, linestyle="--")
            ax.annotate(
                f"{name} {value:.2f}",
                xy=(1.0, value),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=shade,
            )
        ax.set_xlabel(label)
        ax.grid(alpha=0.25)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    if curve:
        last = curve[-1]
        axes[0].annotate(
            f"{last.val_loss:.3f}",
            xy=(last.tokens / 1e6, last.val_loss),
            xytext=(0, -13),
            textcoords="offset points",
            ha="right",
            color="#0b7a75",
            fontweight="bold",
        )
        # The loss of the untrained model would leave no room for what matters.
        top = min(max(losses), max(bars.values(), default=max(losses)) + 0.7)
        axes[0].set_ylim(min([*losses, *bars.values()]) - 0.2, top + 0.1)
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.suptitle(title, fontsize=11)
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
