"""Loss against steps, samples and time, how far ahead a variant is, and the learning rates that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from training.report.plots import Curve, band, end_labels, figure, log_scale, place
from training.report.render import Block
from training.report.results import Result, smooth, spread_text
from training.report.view import View


def curves(view: View) -> list[Block]:
    """Training and validation loss, a row each."""
    blocks = [Block("heading", "Loss")]
    panels = []
    for kind, label in (("train", "training loss"), ("eval", "validation loss")):
        for x, x_label in (("step", "steps"), ("samples", "samples"), ("seconds", "training time (s)")):
            found = {variant: curve for variant, runs in view.shown.items() if (curve := _curve(runs, kind, x))}
            panels.append((x_label, label, found))
    if all(found for _, _, found in panels):
        path = view.folder / "loss.png"
        with figure(path, (10.2, 4.8), rows=2, columns=3, sharey="row") as (_, axes):
            for axis, (x_label, y_label, found) in zip(axes.flat, panels, strict=True):
                band(axis, found, view.palette)
                log_scale(axis)
                axis.set_xlim(left=0)
                axis.set_xlabel(x_label)
                axis.xaxis.set_major_locator(MaxNLocator(4))
                if place(axis).is_first_col():
                    axis.set_ylabel(y_label)
                if place(axis).is_last_col():
                    end_labels(axis, found, view.palette)
        text = (
            "Loss against steps, samples and time (without evaluation). Line: mean over the seeds, band: their range. "
            "The training loss is the mean of the last 5 % of the steps."
        )
        blocks.append(Block("plot", text, path=path))
    lost = [folder for entry in view.variants.values() for folder in entry["without_curves"]]
    if lost:
        text = "These runs are complete, but their metrics.jsonl is lost or damaged, so they are in no curve:"
        blocks += [Block("text", text), Block("list", items=lost)]
    return blocks


def multiplier(view: View) -> list[Block]:
    """Steps of the baseline to the final loss of each variant."""
    rows = [["variant", "on validation loss", "on training loss"]]
    for name, entry in view.variants.items():
        if found := entry.get("compute_multiplier"):
            cells = [
                f"{'' if found[kind]['reached'] else '> '}{found[kind]['value']:.2f}" for kind in ("eval", "train")
            ]
            rows.append([name, *cells])
    if len(rows) == 1:
        return []
    text = (
        f"Steps of {view.baseline} to the variant's final loss, divided by the variant's steps (curves averaged "
        "over the seeds). '>' means that it never reached that loss within its run; nothing is extrapolated. "
        "In the middle of a decaying schedule a loss is higher than at the end of a shorter schedule, so the "
        "number says how far ahead a variant is of this run, not of a run planned shorter or longer."
    )
    return [Block("heading", "Compute multiplier"), Block("table", rows=rows), Block("text", text)]


def learning_rates(view: View) -> list[Block]:
    """Final validation loss of every learning rate of every variant, and the test loss with the chosen one."""
    tried = {
        v: {float(r): found["values"] for r, found in view.variants[v]["learning_rates"].items()} for v in view.shown
    }
    if all(len(rates) < 2 for rates in tried.values()):
        return []
    path = view.folder / "learning_rates.png"
    with figure(path, (4.4, 2.8)) as (_, axes):
        axis, ends = axes[0, 0], {}
        for name, of_rate in tried.items():
            x, colour = np.array(sorted(of_rate)), view.palette[name]
            low, mean, high = (np.array([how(of_rate[rate]) for rate in x]) for how in (np.min, np.mean, np.max))
            axis.plot(x, mean, color=colour, marker="o", markersize=3)
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            ends[name] = (x, mean[None])
        axis.set_xscale("log")
        log_scale(axis)
        end_labels(axis, ends, view.palette)
        axis.set_xlabel("learning rate")
        axis.set_ylabel("final validation loss")
    text = "Final validation loss, by which a learning rate is chosen, against it; band: range over the seeds."
    return [
        Block("heading", "Learning rates (chosen on validation, reported on test)"),
        Block("table", rows=rate_table(view.summary)),
        Block("plot", text, path=path),
    ]


def rate_table(summary: dict[str, Any]) -> list[list[str]]:
    """Final validation loss of every learning rate of every variant, and the test loss with the chosen one."""
    variants = summary["variants"]
    rates = sorted({rate for entry in variants.values() for rate in entry["learning_rates"]}, key=float)
    rows = [["variant", "chosen on validation", *(f"val loss at {rate}" for rate in rates), "test loss of the chosen"]]
    for variant, entry in variants.items():
        found = entry["learning_rates"]
        rows.append(
            [
                variant,
                f"{entry['best_learning_rate']:g}",
                *(spread_text(found.get(rate), 4) for rate in rates),
                spread_text(entry["test_loss"], 4),
            ]
        )
    return rows


def _curve(runs: Sequence[Result], kind: str, x: str) -> Curve | None:
    """x and the loss of every seed with metrics; a measured x (time) differs between seeds and is averaged."""
    curves = [curve for run in runs if len((curve := run.curve(kind, x))[0])]
    if not curves:
        return None
    width = max(1, len(curves[0][1]) // 20)
    losses = np.array([smooth(loss, width) if kind == "train" else loss for _, loss in curves])
    return np.mean([values for values, _ in curves], axis=0), losses
