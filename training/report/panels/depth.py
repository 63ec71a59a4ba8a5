"""What happens along the depth: the weights of the sources, the size of what is read, and the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from training.report.panels.heat_maps import maps_by_noise, one_map
from training.report.plots import Curves, band, end_labels, figure, log_scale, place
from training.report.render import Block
from training.report.results import Result, mean_weights
from training.report.view import View

_MAPS = 3  # noise levels with a heat map
# of a reader's weights, embedding first: which are looked at together against the noise level
_KINDS: dict[str, slice] = {"embedding": slice(0, 1), "blocks between": slice(1, -1), "newest source": slice(-1, None)}

Levels = list[tuple[float, list[list[dict[str, Any]]]]]  # (sigma, per seed the readers)


def weights(view: View) -> list[Block]:
    """Mean depth weights: against the noise level where that was recorded, else a heat map per variant.

    Of runs that kept their queries at zero the weights are equal, everywhere and for ever: they are left out.
    """
    moved = {
        variant: runs
        for variant, runs in view.shown.items()
        if not runs[0].result["config"]["model"].get("freeze_queries")
    }
    by_noise = {variant: levels for variant, runs in moved.items() if (levels := _levels(runs)) is not None}
    if by_noise:
        return [Block("heading", "Depth weights against the noise level"), *_against_noise(view, by_noise)]
    blocks = []
    for variant, runs in moved.items():
        if readers := mean_weights([run.result.get("depth_weights") or [] for run in runs]):
            path = view.folder / f"weights_{variant}.png"
            one_map(path, variant, readers)
            text = (
                f"{variant}: mean weight of every source (over a fixed validation batch and the seeds), times the "
                "reader's number of sources: 1 (white) is the standard residual."
            )
            blocks.append(Block("plot", text, path=path))
    return [Block("heading", "Depth weights"), *blocks] if blocks else []


def profile(view: View) -> list[Block]:
    """RMS and gradient of every sublayer before and after training."""
    found = {variant: [run.result.get("profile") or {} for run in runs] for variant, runs in view.shown.items()}
    if not all(of_run.get("start") and of_run.get("end") for runs in found.values() for of_run in runs):
        return []
    path = view.folder / "depth.png"
    with figure(path, (7.4, 4.6), rows=2, columns=2, sharex=True, sharey="row") as (_, axes):
        for row, (key, label) in enumerate(
            (("hidden_rms", "RMS of what is read"), ("gradient_norm", "gradient norm at the output"))
        ):
            for column, (when, title) in enumerate((("start", "before training"), ("end", "after training"))):
                axis, curves = axes[row, column], {}
                for variant, runs in found.items():
                    y = np.array([[layer[key] for layer in of_run[when]] for of_run in runs])
                    x = np.arange(1, y.shape[-1] + 1)
                    axis.plot(x, y.mean(0), color=view.palette[variant], marker=".", markersize=3, linewidth=1.1)
                    curves[variant] = (x, y)
                if any((y > 0).any() for _, y in curves.values()):
                    log_scale(axis)
                else:  # a head that starts at zero passes no gradient on
                    text = "zero: the head starts at zero"
                    axis.text(0.5, 0.5, text, ha="center", transform=axis.transAxes, color="0.4")
                axis.set_title(title)
                axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
                if column == 0:
                    axis.set_ylabel(label)
                else:
                    end_labels(axis, curves, view.palette)
                if row == 1:
                    axis.set_xlabel("sublayer (attention and MLP in turn)")
    text = (
        "What each sublayer reads (RMS over a fixed validation batch) and the gradient of the loss with respect to "
        "its output, against depth. Mean over the seeds. With queries at zero all variants are one function before "
        "training."
    )
    return [Block("heading", "Along the depth"), Block("plot", text, path=path)]


def _against_noise(view: View, found: Mapping[str, Levels]) -> list[Block]:
    """Curves of all variants per stream, and heat maps at a few noise levels."""
    streams = list(dict.fromkeys(row.get("stream", "") for levels in found.values() for row in levels[0][1][0]))
    path = view.folder / "weights_by_noise.png"
    size = (2.5 * len(_KINDS) + 1.2, 2.1 * len(streams) + 0.3)
    with figure(path, size, len(streams), len(_KINDS), sharex=True, sharey=True) as (_, axes):
        drawn: dict[Any, Curves] = {}
        for row, stream in enumerate(streams):
            for axis, (kind, part) in zip(axes[row], _KINDS.items(), strict=True):
                drawn[axis] = {
                    variant: (np.array([sigma for sigma, _ in levels]), _relative(levels, stream, part))
                    for variant, levels in found.items()
                }
                axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
                band(axis, drawn[axis], view.palette, marker="o", markersize=2.5)
                axis.set_title(f"{stream} stream: {kind}" if stream else kind)
                axis.set_xlim(0, 1)
                axis.xaxis.set_major_locator(MaxNLocator(4))
                if place(axis).is_last_row():
                    axis.set_xlabel(r"noise level $\sigma$")
                if place(axis).is_first_col():
                    axis.set_ylabel("weight x sources")
        low, high = axes[0, 0].get_ylim()
        if high / max(low, 1e-6) > 4:  # shared by all panels
            log_scale(axes[0, 0])
        for axis in axes[:, -1]:
            end_labels(axis, drawn[axis], view.palette)
    text = (
        "Depth weights against the noise level, on the same clips and noise: weight times the reader's number of "
        "sources, so that 1 is the standard residual; mean over the readers of a stream. The newest source is what "
        "the sublayers just before the reader wrote. Line and band: mean and range over the seeds."
    )
    blocks = [Block("plot", text, path=path)]
    for variant, levels in found.items():
        picked = sorted({0, len(levels) // 2, len(levels) - 1})[:_MAPS]
        maps = {
            stream: [(levels[index][0], _of_stream(mean_weights(levels[index][1]), stream)) for index in picked]
            for stream in streams
            if _of_stream(levels[0][1][0], stream)
        }
        path = view.folder / f"weights_{variant}.png"
        maps_by_noise(path, variant, maps)
        text = (
            f"{variant}: mean weight of every source of every reader at some noise levels, times the reader's number "
            "of sources: 1 (white) is the standard residual."
        )
        blocks.append(Block("plot", text, path=path))
    return blocks


def _levels(runs: Sequence[Result]) -> Levels | None:
    """Readers of all runs at every noise level; None where no run has them."""
    known = [levels for run in runs if (levels := run.result.get("depth_weights_by_timestep"))]
    if not known:
        return None
    ordered = [sorted(levels, key=lambda level: level["sigma"]) for levels in known]
    return [(levels[0]["sigma"], [level["readers"] for level in levels]) for levels in zip(*ordered, strict=True)]


def _relative(levels: Levels, stream: str, part: slice) -> np.ndarray:
    """Mean over the readers of a stream of a part of their weights, (seeds, levels); nan where there are none."""
    values = []
    for _, of_seeds in levels:
        of_level = []
        for readers in of_seeds:
            relative = [np.array(row["weights"]) * len(row["weights"]) for row in _of_stream(readers, stream)]
            means = [found[part].mean() for found in relative if len(found[part])]
            of_level.append(np.mean(means) if means else np.nan)
        values.append(of_level)
    return np.array(values).T


def _of_stream(readers: Sequence[dict[str, Any]], stream: str) -> list[dict[str, Any]]:
    return [row for row in readers if row.get("stream", "") == stream]
