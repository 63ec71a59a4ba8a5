"""The test loss by noise level."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from training.report.plots import band, end_labels, figure
from training.report.render import Block
from training.report.results import spread_text
from training.report.view import View


def panel(view: View) -> list[Block]:
    """Table and plot per range of noise levels, with the differences to the baseline."""
    found = {name: view.variants[name]["buckets"] for name in view.shown if view.variants[name].get("buckets")}
    if not found:
        return []
    path, palette = view.folder / "buckets.png", view.palette
    ranges = [f"{bucket['low']:g} to {bucket['high']:g}" for bucket in next(iter(found.values()))]
    x = np.arange(len(ranges))
    losses = {name: (x, _by_seed(buckets, "loss")) for name, buckets in found.items()}
    compared = {name: buckets for name, buckets in found.items() if all(bucket["difference"] for bucket in buckets)}
    columns = 2 if compared else 1
    with figure(path, (8.4 if compared else 4.8, 2.9), columns=columns) as (_, axes):
        band(axes[0, 0], losses, palette, marker="o", markersize=3)
        axes[0, 0].set_ylabel("test loss")
        if compared:
            axis = axes[0, 1]
            axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            for index, (name, buckets) in enumerate(compared.items()):
                values, colour = _by_seed(buckets, "difference"), palette[name]
                shifted = x + 0.7 * ((index + 0.5) / len(compared) - 0.5)  # side by side within a range
                axis.vlines(shifted, values.min(0), values.max(0), color=colour, linewidth=1)
                axis.plot(shifted, values.T, "o", color=colour, markersize=2.5, alpha=0.5, mew=0)
                axis.plot(shifted, values.mean(0), "_", color=colour, markersize=7, mew=2)
            axis.set_ylabel(f"Δ to {view.baseline}")
            axis.yaxis.set_major_locator(MaxNLocator(6))
        for axis in axes.flat:
            axis.set_xticks(x, ranges)
            axis.set_xlabel(r"noise level $\sigma$ (0 is the clip, 1 is noise)")
        end_labels(axes[0, 0], losses, palette)
    text = (
        "Final test loss by noise level, on the same clips and noise for all. Line and band: mean and range over "
        "the seeds."
    )
    if compared:
        text += f" Right: difference to {view.baseline} with the same seed, a dot per seed, a bar at their mean."
    return [
        Block("heading", "Loss by noise level"),
        Block("table", rows=bucket_table(found)),
        Block("plot", text, path=path),
    ]


def bucket_table(entries: dict[str, Any]) -> list[list[str]]:
    """Final test loss per range of noise levels, and below the variants their differences to the baseline."""
    first = next(iter(entries.values()))
    rows = [["variant", *(f"sigma {bucket['low']:g} to {bucket['high']:g}" for bucket in first)]]
    for name, found in entries.items():
        rows.append([name, *(spread_text(bucket["loss"], 4) for bucket in found)])
        if any(bucket["loss_raw"] for bucket in found):
            rows.append([f"{name}, without EMA", *(spread_text(bucket["loss_raw"], 4) for bucket in found)])
    for name, found in entries.items():
        if any(bucket["difference"] for bucket in found):
            label = f"Δ {name}"
            rows.append([label, *(spread_text(bucket["difference"], 4, sign=True) for bucket in found)])
    return rows


def _by_seed(buckets: list[dict[str, Any]], what: str) -> np.ndarray:
    """(seeds, ranges)"""
    return np.array([bucket[what]["values"] for bucket in buckets]).T
