"""Heat maps of depth weights, relative to equal weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from training.report.plots import figure

_RANGE = 8.0  # colours end at this many times, and this fraction of, an equal weight
Readers = Sequence[Mapping[str, Any]]  # as `diagnostics.depth_weights` gives them


def one_map(path: Path, title: str, readers: Readers) -> None:
    """All readers in one map."""
    sources = max(len(row["sources"]) for row in readers)
    size = (max(1.9 + 0.24 * sources, 3.6), 1.25 + 0.165 * len(readers))
    with figure(path, size) as (whole, axes):
        axis = axes[0, 0]
        picture = _heat_map(axis, readers)
        axis.set_title(title)
        axis.set_xlabel("source")
        axis.set_ylabel("reader")
        _colour_bar(whole, picture, axis)


def maps_by_noise(path: Path, title: str, maps: Mapping[str, Sequence[tuple[float, Readers]]]) -> None:
    """A row per stream, a column per noise level.

    Args:
        maps: stream to (sigma, readers) pairs.
    """
    columns = len(next(iter(maps.values())))
    heights = [0.135 * len(of_stream[0][1]) for of_stream in maps.values()]
    # one axis of sources for all streams: a stream with fewer of them leaves the rest grey
    names = max((row["sources"] for of_stream in maps.values() for row in of_stream[0][1]), key=len)
    size = (2.6 + columns * max(1.0, 0.15 + 0.17 * len(names)), max(2.4, 1.3 + 0.2 * len(maps) + sum(heights)))
    with figure(path, size, len(maps), columns, gridspec_kw={"height_ratios": heights}) as (whole, axes):
        whole.suptitle(title, fontsize=10, x=0.01, ha="left")
        for row, (stream, of_stream) in enumerate(maps.items()):
            for column, (sigma, readers) in enumerate(of_stream):
                axis = axes[row, column]
                picture = _heat_map(axis, readers)
                axis.tick_params(labelsize=6)
                axis.set_xticks(range(len(names)), [name.removesuffix(" (open)") for name in names])
                axis.set_xlim(-0.5, len(names) - 0.5)
                if column:
                    axis.set_yticklabels([])
                else:
                    axis.set_yticks(range(len(readers)), [_without(stream, found["reader"]) for found in readers])
                    axis.set_ylabel(f"{stream} stream" if stream else "reader")
                if row == 0:
                    axis.set_title(rf"$\sigma$ = {sigma:.2g}")
                if row < len(maps) - 1:
                    axis.set_xticklabels([])
        _colour_bar(whole, picture, axes)


def _heat_map(axis: Axes, rows: Readers) -> Any:
    """Mean depth weights times the number of sources: a row per reader, a column per source.

    Equal weights are the standard residual, so white reads "as in the standard residual", red more, blue less.
    """
    sources = max((row["sources"] for row in rows), key=len)
    values = np.full((len(rows), len(sources)), np.nan)
    for index, row in enumerate(rows):
        values[index, : len(row["weights"])] = np.asarray(row["weights"]) * len(row["weights"])
    norm = LogNorm(1 / _RANGE, _RANGE)
    picture = axis.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    axis.set_facecolor("0.93")  # no such source
    names = [source.removesuffix(" (open)") for source in sources]  # open for some readers only
    axis.set_xticks(range(len(sources)), names, rotation=90)
    axis.set_yticks(range(len(rows)), [row["reader"] for row in rows])
    axis.tick_params(labelsize=7, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return picture


def _colour_bar(whole: Figure, picture: Any, axes: Any) -> None:
    """What the colours mean."""
    bar: Any = whole.colorbar(picture, ax=axes, label="mean weight x number of sources", aspect=30, extend="both")
    bar.outline.set_visible(False)
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    bar.set_ticks(ticks, labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.ax.minorticks_off()


def _without(stream: str, reader: str) -> str:
    """A reader's name without what the figure already says."""
    return reader.removesuffix(f" ({stream})").removeprefix("transformer_blocks.").replace("transformer_blocks.", "")
