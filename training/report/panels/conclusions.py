"""What the seeds support, in words, with the differences that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from training.report import metrics
from training.report.plots import figure
from training.report.render import Block
from training.report.results import setting_text
from training.report.view import View


def panel(view: View) -> list[Block]:
    """Sentences, and a plot of the paired differences."""
    blocks = [Block("heading", "What can be concluded"), Block("list", items=conclusions(view.summary))]
    compared = {variant: view.variants[variant].get("difference") for variant in view.shown}
    others = [variant for variant, difference in compared.items() if difference and difference["test_loss"]]
    if not others:
        return blocks
    shown = [
        metric
        for metric in metrics.TASKS[view.summary["unit"]].metrics
        if metric.axis and all(compared[variant].get(metric.key) for variant in others)
    ]
    shown.sort(key=lambda metric: metric.key != "test_loss")  # what the table is about comes first
    path = view.folder / "difference.png"
    with figure(path, (7.0, 0.7 + 0.34 * len(others)), columns=len(shown), sharey=True) as (_, axes):
        for axis, metric in zip(axes[0], shown, strict=True):
            axis.axvline(0, color="0.6", linewidth=0.8, zorder=0)
            for row, name in enumerate(others):
                seeds, colour = metric.factor * np.array(compared[name][metric.key]["values"]), view.palette[name]
                axis.plot(seeds, np.full(len(seeds), row), "o", color=colour, markersize=4, alpha=0.6, mew=0)
                axis.plot([seeds.mean()] * 2, [row - 0.28, row + 0.28], color=colour, linewidth=2)
            axis.set_xlabel(metric.axis)
            axis.xaxis.set_major_locator(MaxNLocator(3))
            axis.set_yticks(range(len(others)), others)
            axis.set_ylim(len(others) - 0.5, -0.5)
            axis.tick_params(axis="y", length=0)
            axis.spines["left"].set_visible(False)
    text = f"Difference to {view.baseline} with the same seed: a dot per seed, a bar at their mean."
    return [*blocks, Block("plot", text, path=path)]


def conclusions(summary: dict[str, Any]) -> list[str]:
    """What the seeds support, in words. Nothing beyond signs, means and spreads: a few seeds carry no more."""
    sentences = []
    baseline, groups = summary["baseline"], summary.get("sweep") or []
    for name, entry in summary["variants"].items() if not groups else ():  # of a sweep: the best of each kind, below
        difference = (entry.get("difference") or {}).get("test_loss")
        if not difference:
            continue
        values, number = difference["values"], len(difference["values"])
        shown = ", ".join(f"{value:+.4f}" for value in values)
        if number == 1:
            text = f"one seed ({shown}). One pair says nothing about the spread between seeds: no conclusion."
        else:
            better = sum(value < 0 for value in values)
            chance = 2 * 0.5**number
            if difference["same_sign"]:
                where = "lower" if better else "higher"
                text = (
                    f"{where} with every one of the {number} seeds ({shown}; mean {difference['mean']:+.4f}, standard "
                    f"deviation {difference['sd']:.4f}). Were there no difference, {number} equal signs would still "
                    f"come up in {100 * chance:.2g} % of such comparisons."
                )
            else:
                text = (
                    f"lower with {better} of {number} seeds ({shown}; mean {difference['mean']:+.4f}, standard "
                    f"deviation {difference['sd']:.4f}): these seeds do not tell it from {baseline}."
                )
        sentences.append(f"{name} against {baseline}, test loss: {text}")
    controls = [
        name
        for name in summary["variants"]
        if summary["config_differences"].get("model.freeze_queries", {}).get(name) is True
    ]
    for name in controls:
        values = ((summary["variants"][name].get("difference") or {}).get("test_loss") or {}).get("values", [])
        if values:
            sentences.append(
                f"{name} computes the standard residual through the AttnRes code, so its differences (up to "
                f"{max(map(abs, values)):.4f} in test loss) are what rounding alone does to a run of this "
                "length; a difference of that size means nothing."
            )
    sentences += _sweep_sentences(groups)
    sentences += _choices(summary)
    sentences.append(
        "All of this holds for this data set, model, length of training and learning rates only. Differences are "
        "paired by seed: same initial weights of the shared parameters, same order of the data."
    )
    return sentences


def _choices(summary: dict[str, Any]) -> list[str]:
    """What was chosen on the validation set."""
    groups = summary.get("sweep") or []
    if groups:
        chosen = [f"{group['label']}: {setting_text(group['best']) or group['best']['variant']}" for group in groups]
    else:
        variants = summary["variants"].items()
        chosen = [f"{n}: lr {e['best_learning_rate']:g}" for n, e in variants if len(e.get("learning_rates", ())) > 1]
    if not chosen:
        return []
    return [f"Chosen on validation: {'; '.join(chosen)}. Reported on test, which no choice has seen."]


def _sweep_sentences(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Best against best, the only fair comparison in a sweep."""
    sentences = []
    for group in groups[1:]:
        difference = group["difference"]
        if not difference:
            continue
        values, number = difference["values"], len(difference["values"])
        shown = ", ".join(f"{value:+.4f}" for value in values)
        if number == 1:
            verdict = "one seed, so no conclusion"
        elif difference["same_sign"]:
            verdict = f"{'lower' if values[0] < 0 else 'higher'} with every one of the {number} seeds"
        else:
            verdict = f"lower with {sum(value < 0 for value in values)} of {number} seeds: not told apart"
        text = f"The {_best_of(group)} against the {_best_of(groups[0])}, test loss: {shown}; {verdict}."
        if group["difference_same_lr"] and group["best"]["lr"] != groups[0]["best"]["lr"]:
            same = ", ".join(f"{value:+.4f}" for value in group["difference_same_lr"]["values"])
            text += f" Against {groups[0]['label']} at its own learning rate, {group['best']['lr']:g}: {same}."
        sentences.append(text)
    ends = []
    for group in groups:
        at_the_end = {name: group["best"]["values"][name] for name in group["edges"]}
        ends += [f"{group['label']} ({setting_text({'values': at_the_end})})"] if at_the_end else []
    if ends:
        text = "The best lies at the edge of what was tried, so there may be better beyond"
        sentences.append(f"{text}: {'; '.join(ends)}.")
    budgets = {len(group["settings"]) for group in groups}
    if len(budgets) > 1:
        counted = "; ".join(f"{group['label']}: {len(group['settings'])}" for group in groups)
        sentences.append(
            f"The kinds were not given equal numbers of settings ({counted}): more tries find a lower minimum even "
            "where nothing is better."
        )
    return sentences


def _best_of(group: dict[str, Any]) -> str:
    number = len(group["settings"])
    setting = setting_text(group["best"]) or group["best"]["variant"]
    return f"best of {number} setting{'s' if number != 1 else ''} of {group['label']} ({setting})"
