"""The plots of a report: matplotlib figures for a paper, one function each. They draw, they do not compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

# Okabe and Ito's palette: told apart with every common colour blindness; the baseline is black
_BASELINE = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_WEIGHT_RANGE = 8.0  # colours of the heat map end at this many times, and this fraction of, an equal weight
STYLE: Any = {
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


def colours(names: Sequence[str], baseline: str) -> dict[str, str]:
    others = [name for name in names if name != baseline]
    chosen = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)}
    return {**({baseline: _BASELINE} if baseline in names else {}), **chosen}


def loss_curves(
    path: Path, panels: Sequence[tuple[str, str, Mapping[str, Curve]]], palette: Mapping[str, str], columns: int
) -> None:
    """Loss against something, one panel each of (x label, y label, curves): mean over the seeds and their range."""
    rows = len(panels) // columns
    with rc_context(STYLE):
        figure = Figure(figsize=(3.1 * columns + 0.9, 2.4 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey="row")
        for axis, (x_label, y_label, curves) in zip(axes.flat, panels, strict=True):
            for name, (x, y) in curves.items():
                axis.plot(x, y.mean(0), color=palette[name])
                axis.fill_between(x, y.min(0), y.max(0), color=palette[name], alpha=0.15, linewidth=0)
            log_scale(axis)
            axis.set_xlim(left=0)
            axis.set_xlabel(x_label)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            if _place(axis).is_first_col():
                axis.set_ylabel(y_label)
            if _place(axis).is_last_col():
                end_labels(axis, curves, palette)
        figure.savefig(path)


def differences(
    path: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]], palette: Mapping[str, str]
) -> None:
    """Paired differences to the baseline, a dot per seed and a bar at their mean; one panel per metric."""
    names = list(panels[0][1])
    with rc_context(STYLE):
        figure = Figure(figsize=(7.0, 0.7 + 0.34 * len(names)), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, values) in zip(axes, panels, strict=True):
            axis.axvline(0, color="0.6", linewidth=0.8, zorder=0)
            for row, name in enumerate(names):
                seeds = np.asarray(values[name])
                axis.plot(seeds, np.full(len(seeds), row), "o", color=palette[name], markersize=4, alpha=0.6, mew=0)
                axis.plot([seeds.mean()] * 2, [row - 0.28, row + 0.28], color=palette[name], linewidth=2)
            axis.set_xlabel(title)
            axis.xaxis.set_major_locator(MaxNLocator(3))
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.tick_params(axis="y", length=0)
            axis.spines["left"].set_visible(False)
        figure.savefig(path)


def depth_profile(
    path: Path, panels: Sequence[tuple[str, str, Mapping[str, np.ndarray]]], palette: Mapping[str, str]
) -> None:
    """A number of every sublayer against depth, one panel each of (title, y label, values), at start and end."""
    rows = len(panels) // 2
    with rc_context(STYLE):
        figure = Figure(figsize=(7.4, 2.3 * rows), layout="constrained")
        axes = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey="row")
        for axis, (title, y_label, values) in zip(axes.flat, panels, strict=True):
            curves = {name: (np.arange(1, y.shape[-1] + 1), np.atleast_2d(y)) for name, y in values.items()}
            for name, (x, y) in curves.items():
                axis.plot(x, y.mean(0), color=palette[name], marker=".", markersize=3, linewidth=1.1)
            if any((y > 0).any() for _, y in curves.values()):
                log_scale(axis)
            else:  # a head that starts at zero passes no gradient on
                axis.text(0.5, 0.5, "zero: the head starts at zero", ha="center", transform=axis.transAxes, color="0.4")
            axis.set_title(title)
            axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
            if _place(axis).is_first_col():
                axis.set_ylabel(y_label)
            else:
                end_labels(axis, curves, palette)
            if _place(axis).is_last_row():
                axis.set_xlabel("sublayer (attention and MLP in turn)")
        figure.savefig(path)


def depth_weights(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Heat map of mean depth weights, relative to equal weights: see `heat_map`."""
    sources = max(len(row["sources"]) for row in rows)
    with rc_context(STYLE):
        width, height = 1.9 + 0.24 * sources, 1.25 + 0.165 * len(rows)
        figure = Figure(figsize=(max(width, 3.6), height), layout="constrained")
        axis = figure.subplots()
        picture = heat_map(axis, rows)
        axis.set_title(title)
        axis.set_xlabel("source")
        axis.set_ylabel("reader")
        heat_map_bar(figure, picture, axis)
        figure.savefig(path)


def heat_map(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Mean depth weights times the number of sources: a row per reader, a column per source.

    Equal weights are the standard residual, so white reads "as in the standard residual", red more, blue less.
    """
    sources = max((row["sources"] for row in rows), key=len)
    values = np.full((len(rows), len(sources)), np.nan)
    for index, row in enumerate(rows):
        values[index, : len(row["weights"])] = np.asarray(row["weights"]) * len(row["weights"])
    norm = LogNorm(1 / _WEIGHT_RANGE, _WEIGHT_RANGE)
    picture = axis.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    axis.set_facecolor("0.93")  # no such source
    names = [source.removesuffix(" (open)") for source in sources]  # open for some readers only
    axis.set_xticks(range(len(sources)), names, rotation=90)
    axis.set_yticks(range(len(rows)), [row["reader"] for row in rows])
    axis.tick_params(labelsize=7, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return picture


def heat_map_bar(figure: Figure, picture: Any, axes: Any) -> None:
    """The colours of `heat_map`."""
    bar: Any = figure.colorbar(picture, ax=axes, label="mean weight x number of sources", aspect=30, extend="both")
    bar.outline.set_visible(False)
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    bar.set_ticks(ticks, labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.ax.minorticks_off()


def learning_rates(
    path: Path, values: Mapping[str, Mapping[float, Sequence[float]]], palette: Mapping[str, str]
) -> None:
    """Final validation loss against the learning rate, mean over the seeds and their range."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.8), layout="constrained")
        axis = figure.subplots()
        curves = {}
        for name, by_rate in values.items():
            x = np.array(sorted(by_rate))
            low, mean, high = (np.array([how(by_rate[rate]) for rate in x]) for how in (np.min, np.mean, np.max))
            axis.plot(x, mean, color=palette[name], marker="o", markersize=3)
            axis.fill_between(x, low, high, color=palette[name], alpha=0.15, linewidth=0)
            curves[name] = (x, mean[None])
        axis.set_xscale("log")
        log_scale(axis)
        end_labels(axis, curves, palette)
        axis.set_xlabel("learning rate")
        axis.set_ylabel("final validation loss")
        figure.savefig(path)


def _place(axis: Axes) -> Any:
    return axis.get_subplotspec()


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


def end_labels(axis: Axes, curves: Mapping[str, Curve], palette: Mapping[str, str]) -> None:
    """Each curve's name at its right end, moved apart where they would overlap."""
    figure: Any = axis.figure
    figure.canvas.draw()  # positions in pixels need the final limits
    box = axis.get_window_extent()
    step = 8.5 * figure.dpi / 72 / box.height  # one line of text, as a share of the axis
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
