"""A sweep: every kind of model with the settings that were tried, and the best of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from training.report.plots import COLOURS, figure, log_scale, place
from training.report.render import Block
from training.report.results import setting_text, spread_text
from training.report.view import View


def panel(view: View) -> list[Block]:
    """Table and plot."""
    groups = view.summary["sweep"]
    if not groups:
        return []
    draw(view.folder / "sweep.png", groups)
    text = (
        f"Final validation loss of every setting, by which the best ones are chosen; mean and range over the seeds. "
        f"Dashed, with its band: the best of {len(groups[0]['settings'])} settings of {groups[0]['label']}. Test "
        f"losses and differences are of the chosen settings; the last column is the difference to the best of "
        f"{groups[0]['label']} with the learning rate of the kind's best setting."
    )
    shown = "Everything below and the plots above show the best setting of each kind; the first table has them all."
    return [
        Block("heading", "Sweep"),
        Block("table", rows=sweep_table(groups)),
        Block("plot", text, path=view.folder / "sweep.png"),
        Block("text", shown),
    ]


def draw(path: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    """A panel per kind of model, the first kind's best in all of them.

    The axis with most values runs to the right, the others make the curves of a panel.
    """
    rows = -(-len(groups) // 4)
    columns = -(-len(groups) // rows)
    base = groups[0]["best"]["val_loss"]["values"]
    with figure(path, (2.9 * columns + 0.4, 2.7 * rows), rows, columns, sharey=True) as (_, axes):
        for axis, group in zip(axes.flat, groups, strict=False):
            axis.axhline(np.mean(base), color="0.45", linewidth=0.8, linestyle="--", zorder=0)
            axis.axhspan(min(base), max(base), color="0.5", alpha=0.15, linewidth=0, zorder=0)
            _kind(axis, group)
            number = len(group["settings"])
            axis.set_title(f"{group['label']} ({number} setting{'s' if number != 1 else ''})")
            if place(axis).is_first_col():
                axis.set_ylabel("final validation loss")
        for axis in axes.flat[len(groups) :]:
            axis.set_visible(False)
        low, high = axes[0, 0].get_ylim()
        if high / low > 2.5:
            log_scale(axes[0, 0])


def _kind(axis: Any, group: Mapping[str, Any]) -> None:
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


def sweep_table(groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Every kind of model in a sweep with the number of its settings and the one chosen on validation."""
    compared = f"Δ test loss to best {groups[0]['label']}"
    rows = [["kind", "settings", "runs", "chosen on validation", "its val loss", "worst val loss", "its test loss"]]
    rows[0] += [compared, f"{compared} at its learning rate"]
    for group in groups:
        values = [setting["val_loss"]["mean"] for setting in group["settings"]]
        rows.append(
            [
                group["label"],
                str(len(group["settings"])),
                str(sum(len(setting["val_loss"]["values"]) for setting in group["settings"])),
                setting_text(group["best"]) or group["best"]["variant"],
                spread_text(group["best"]["val_loss"], 4),
                f"{max(values):.4f}",
                spread_text(group["test_loss"], 4),
                spread_text(group["difference"], 4, sign=True),
                spread_text(group["difference_same_lr"], 4, sign=True),
            ]
        )
    return rows
