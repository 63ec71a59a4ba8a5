"""What the plots of a report share: style, colours, curves with a band, scales and labels. Panels draw with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe and Ito's palette: told apart with every common colour blindness; the baseline is black
_BASELINE = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 200,
    "savefig.dpi": 200,
}

Curve = tuple[np.ndarray, np.ndarray]  # x (points,), y (seeds, points)
Curves = Mapping[str, Curve]  # by variant
Palette = Mapping[str, str]


def colours(names: Sequence[str], baseline: str) -> dict[str, str]:
    others = [name for name in names if name != baseline]
    chosen = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)}
    return {**({baseline: _BASELINE} if baseline in names else {}), **chosen}


@contextmanager
def figure(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """A figure of `size` inches with an array (rows, columns) of axes, written to `path` at the end.

    Args:
        options: of matplotlib's `subplots`.
    """
    with rc_context(_STYLE):
        made = Figure(figsize=size, layout="constrained")
        yield made, made.subplots(rows, columns, squeeze=False, **options)
        made.savefig(path)


def band(axis: Axes, curves: Curves, palette: Palette, **style: Any) -> None:
    """Every curve's mean over the seeds, and their range."""
    for name, (x, y) in curves.items():
        axis.plot(x, y.mean(0), color=palette[name], **style)
        axis.fill_between(x, y.min(0), y.max(0), color=palette[name], alpha=0.15, linewidth=0)


def log_scale(axis: Axes) -> None:
    """A logarithmic y axis with plain numbers; on less than a decade and a half also at 2 and 5, on a third at all."""
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(plain)
    low, high = axis.get_ylim()
    between = plain if high / low < 3 else FuncFormatter(_two_and_five) if high / low < 30 else NullFormatter()
    axis.yaxis.set_minor_formatter(between)
    axis.tick_params(axis="y", which="minor", labelsize=7)


def _two_and_five(value: float, _: int | None = None) -> str:
    return f"{value:g}" if round(value / 10 ** np.floor(np.log10(value) + 1e-9)) in (2, 5) else ""


def end_labels(axis: Axes, curves: Curves, palette: Palette) -> None:
    """Each curve's name at its right end, moved apart where they would overlap."""
    whole: Any = axis.figure
    whole.canvas.draw()  # positions in pixels need the final limits
    box = axis.get_window_extent()
    step = 8.5 * whole.dpi / 72 / box.height  # one line of text, as a share of the axis
    ends = sorted(
        (float((axis.transData.transform((x[-1], y.mean(0)[-1]))[1] - box.y0) / box.height), name)
        for name, (x, y) in curves.items()
    )
    places = [end for end, _ in ends]
    for _ in range(200):
        moved = False
        for index in range(1, len(places)):
            gap = places[index] - places[index - 1]
            if gap < step - 1e-6:
                places[index] += (step - gap) / 2
                places[index - 1] -= (step - gap) / 2
                moved = True
        if not moved:
            break
    shift = max(0.0, -places[0]) + min(0.0, 1 - places[-1])
    for (_, name), place in zip(ends, places, strict=True):
        axis.annotate(
            name,
            (1.02, place + shift),
            xycoords="axes fraction",
            color=palette[name],
            fontsize=8,
            va="center",
            annotation_clip=False,
        )


def place(axis: Axes) -> Any:
    """Where in the figure: `is_first_col()` and the like."""
    return axis.get_subplotspec()
