"""The plots of a video report: what depends on the noise level sigma, and sweeps. As in `plots.py`, they only draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from training.plots import COLOURS, STYLE, Curve, end_labels, heat_map, heat_map_bar, log_scale


def buckets(
    path: Path,
    names: Sequence[str],
    losses: Mapping[str, np.ndarray],
    differences: Mapping[str, np.ndarray],
    baseline: str,
    palette: Mapping[str, str],
) -> None:
    """Validation loss per range of noise levels, and the differences to the baseline, by seed.

    Args:
        names: of the ranges.
        losses: variant to (seeds, ranges).
        differences: the same for the paired differences; empty without a baseline.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4 if differences else 4.8, 2.9), layout="constrained")
        axes = figure.subplots(1, 2 if differences else 1, squeeze=False)[0]
        x = np.arange(len(names))
        for name, loss in losses.items():
            axes[0].plot(x, loss.mean(0), color=palette[name], marker="o", markersize=3)
            axes[0].fill_between(x, loss.min(0), loss.max(0), color=palette[name], alpha=0.15, linewidth=0)
        axes[0].set_ylabel("test loss")
        if differences:
            axes[1].axhline(0, color="0.6", linewidth=0.8, zorder=0)
            for index, (name, values) in enumerate(differences.items()):
                shifted = x + 0.7 * ((index + 0.5) / len(differences) - 0.5)  # side by side within a range
                axes[1].vlines(shifted, values.min(0), values.max(0), color=palette[name], linewidth=1)
                axes[1].plot(shifted, values.T, "o", color=palette[name], markersize=2.5, alpha=0.5, mew=0)
                axes[1].plot(shifted, values.mean(0), "_", color=palette[name], markersize=7, mew=2)
            axes[1].set_ylabel(f"Δ to {baseline}")
            axes[1].yaxis.set_major_locator(MaxNLocator(6))
        for axis in axes:
            axis.set_xticks(x, names)
            axis.set_xlabel(r"noise level $\sigma$ (0 is the clip, 1 is noise)")
        end_labels(axes[0], {name: (x, loss) for name, loss in losses.items()}, palette)
        figure.savefig(path)


def weights_by_noise(
    path: Path, panels: Sequence[Sequence[tuple[str, Mapping[str, Curve]]]], palette: Mapping[str, str]
) -> None:
    """Mean relative depth weights against sigma: a row per stream, a column per kind of source, a curve per variant."""
    with rc_context(STYLE):
        rows, columns = len(panels), len(panels[0])
        figure = Figure(figsize=(2.5 * columns + 1.2, 2.1 * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for row, of_stream in enumerate(panels):
            for column, (title, curves) in enumerate(of_stream):
                axis = axes[row, column]
                axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
                for name, (x, y) in curves.items():
                    axis.plot(x, y.mean(0), color=palette[name], marker="o", markersize=2.5)
                    axis.fill_between(x, y.min(0), y.max(0), color=palette[name], alpha=0.15, linewidth=0)
                axis.set_title(title)
                axis.set_xlim(0, 1)
                axis.xaxis.set_major_locator(MaxNLocator(4))
                if row == rows - 1:
                    axis.set_xlabel(r"noise level $\sigma$")
                if column == 0:
                    axis.set_ylabel("weight x sources")
        low, high = axes[0, 0].get_ylim()
        if high / max(low, 1e-6) > 4:  # shared by all panels
            log_scale(axes[0, 0])
        for row, of_stream in enumerate(panels):
            end_labels(axes[row, -1], of_stream[-1][1], palette)
        figure.savefig(path)


def weight_maps(
    path: Path, title: str, maps: Mapping[str, Sequence[tuple[float, Sequence[Mapping[str, Any]]]]]
) -> None:
    """Heat maps of mean depth weights, relative to equal weights: a row per stream, a column per noise level.

    Args:
        maps: stream to (sigma, readers) pairs, readers as `diagnostics.depth_weights` gives them.
    """
    columns = len(next(iter(maps.values())))
    heights = [0.135 * len(of_stream[0][1]) for of_stream in maps.values()]
    # one axis of sources for all streams: a stream with fewer of them leaves the rest grey
    names = max((row["sources"] for of_stream in maps.values() for row in of_stream[0][1]), key=len)
    sources = len(names)
    with rc_context(STYLE):
        width = 2.6 + columns * max(1.0, 0.15 + 0.17 * sources)
        figure = Figure(figsize=(width, max(2.4, 1.3 + 0.2 * len(maps) + sum(heights))), layout="constrained")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        axes = figure.subplots(len(maps), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
        for row, (stream, of_stream) in enumerate(maps.items()):
            for column, (sigma, readers) in enumerate(of_stream):
                axis = axes[row, column]
                picture = heat_map(axis, readers)
                axis.tick_params(labelsize=6)
                axis.set_xticks(range(sources), [name.removesuffix(" (open)") for name in names])
                axis.set_xlim(-0.5, sources - 0.5)
                if column:
                    axis.set_yticklabels([])
                else:
                    axis.set_yticks(range(len(readers)), [_without(stream, found["reader"]) for found in readers])
                    axis.set_ylabel(f"{stream} stream" if stream else "reader")
                if row == 0:
                    axis.set_title(rf"$\sigma$ = {sigma:.2g}")
                if row < len(maps) - 1:
                    axis.set_xticklabels([])
        heat_map_bar(figure, picture, axes)
        figure.savefig(path)


def _without(stream: str, reader: str) -> str:
    """A reader's name without what the figure already says."""
    return reader.removesuffix(f" ({stream})").removeprefix("transformer_blocks.").replace("transformer_blocks.", "")


def sweep(path: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    """Final validation loss of every setting: a panel per kind of model, the first kind's best in all of them.

    The axis with most values runs to the right, the others make the curves of a panel.
    """
    rows = -(-len(groups) // 4)
    columns = -(-len(groups) // rows)
    base = groups[0]["best"]["val_loss"]["values"]
    with rc_context(STYLE):
        figure = Figure(figsize=(2.9 * columns + 0.4, 2.7 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis, group in zip(axes.flat, groups, strict=False):
            axis.axhline(np.mean(base), color="0.45", linewidth=0.8, linestyle="--", zorder=0)
            axis.axhspan(min(base), max(base), color="0.5", alpha=0.15, linewidth=0, zorder=0)
            _panel(axis, group)
            number = len(group["settings"])
            axis.set_title(f"{group['label']} ({number} setting{'s' if number != 1 else ''})")
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel("final validation loss")
        for axis in axes.flat[len(groups) :]:
            axis.set_visible(False)
        low, high = axes[0, 0].get_ylim()
        if high / low > 2.5:
            log_scale(axes[0, 0])
        figure.savefig(path)


def _panel(axis: Any, group: Mapping[str, Any]) -> None:
    """One kind of model: its settings along the axis with most values."""
    settings = group["settings"]
    ranked = sorted(group["axes"], key=lambda name: -len({setting["values"][name] for setting in settings}))
    along, rest = (ranked[0], ranked[1:]) if ranked else (None, [])
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for setting in settings:
        lines.setdefault(tuple(setting["values"][name] for name in rest), []).append(setting)
    for index, (key, members) in enumerate(sorted(lines.items())):
        members = sorted(members, key=lambda setting: setting["values"][along] if along else 0)
        x = [setting["values"][along] if along else 0 for setting in members]
        values = [setting["val_loss"]["values"] for setting in members]
        label = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in zip(rest, key, strict=True))
        colour = COLOURS[index % len(COLOURS)] if rest else "black"
        axis.plot(x, [np.mean(v) for v in values], color=colour, marker="o", markersize=3, label=label or None)
        axis.vlines(x, [min(v) for v in values], [max(v) for v in values], color=colour, linewidth=1)
    if rest:
        axis.legend(fontsize=7, frameon=False)
    if along is None:
        axis.set_xticks([])
        return
    ticks = sorted({setting["values"][along] for setting in settings})
    if ticks[0] > 0 and ticks[-1] / ticks[0] > 3:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel(along.rpartition(".")[2])
