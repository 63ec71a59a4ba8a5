"""Table of variants, what its columns mean, and the runs that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.report import metrics
from training.report.render import Block
from training.report.results import spread_text
from training.report.view import View


def table(view: View) -> list[Block]:
    """The title, all variants, and how to read the columns."""
    return [
        Block("title", view.summary["name"]),
        Block("table", rows=variant_table(view.summary)),
        Block("text", notes(view.summary)),
    ]


def failures(view: View) -> list[Block]:
    failed = [f"{label}: {error}" for label, error in view.summary["failures"].items()]
    return [Block("heading", "Failed runs"), Block("list", items=failed)] if failed else []


def variant_table(summary: dict[str, Any]) -> list[list[str]]:
    """The table of variants, header first."""
    cuda = any(found["device"].startswith("cuda") for found in summary["environments"])
    task, variants = metrics.TASKS[summary["unit"]], summary["variants"]
    shown = [metric for metric in task.metrics if any(entry.get(metric.key) for entry in variants.values())]
    compared = [metric for metric in shown if metric.delta]
    header = ["variant", "params (M)", "GFLOPs", f"{task.unit}/s", "peak MB"]
    rows = [[*header, *(metric.label for metric in shown), *(metric.delta for metric in compared)]]
    for name, entry in variants.items():
        difference = entry.get("difference") or {}
        rate = _rate(entry, task.rate)
        rows.append(
            [
                name,
                f"{entry['parameters'] / 1e6:.3f}",
                f"{entry['gflops']:.4g}" if entry["gflops"] is not None else "",
                (f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}") if rate else "",
                f"{(entry['peak_memory'] - (0 if cuda else entry['peak_memory_before'])) / 2**20:.0f}",
                *(spread_text(entry.get(metric.key), metric.digits, factor=metric.factor) for metric in shown),
                *(
                    spread_text(difference.get(metric.key), metric.digits, sign=True, factor=metric.factor)
                    for metric in compared
                ),
            ]
        )
    return rows


def notes(summary: dict[str, Any]) -> str:
    entries, task = list(summary["variants"].values()), metrics.TASKS[summary["unit"]]
    seeds = sorted({len(entry["runs"]) for entry in entries})
    notes = [
        f"Mean ± standard deviation over {' to '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}, "
        f"{entries[0]['steps']} steps; Δ: paired by seed, against {summary['baseline']}.",
        "val: the validation set, by which everything is chosen; test: the test set, evaluated once after training.",
        f"GFLOPs: one forward pass of one {task.unit.removesuffix('s')}, 2 per multiply-add.",
        *_generation_notes(entries),
    ]
    if entries[0]["side_by_side"]:
        notes.append(
            f"{task.unit}/s: median training step (forward, backward, update) of all variants taken in turns in one "
            "process, after the training; compare these with each other, not with another machine's. Times in the loss "
            "plots are those of runs that shared the machine with each other."
        )
    else:
        notes.append(
            f"{task.unit}/s: of the runs themselves, which may have shared the machine: no basis for a comparison."
        )
    if any(found["device"].startswith("cuda") for found in summary["environments"]):
        notes.append("Peak memory: allocated on the device.")
    else:
        notes.append("Peak memory: what the process grew by from before the model was made.")
    return " ".join(notes)


def _generation_notes(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What the columns of generation mean, as far as there are any."""
    found = []
    if any(entry.get("test_loss_raw") for entry in entries):
        found.append(
            "val and test flow loss: of the moving average of the weights (EMA), on a fixed grid of clips, noise levels"
        )
        found[-1] += " and noise; without EMA: of the weights themselves."
    untrained = [entry["test_loss_untrained"] for entry in entries if entry.get("test_loss_untrained") is not None]
    if untrained:
        found.append(f"Test loss before training: {min(untrained):.4f}" + _to(untrained) + ".")
    extractors = {entry["frechet_extractor"] for entry in entries if entry.get("frechet_extractor")}
    if extractors:
        text = "to test clips; it is larger for fewer clips, so read it between the variants of this table only"
        found.append(f"Fréchet distance: {'; '.join(sorted(extractors))}; {text}.")
    return found


def _to(values: Sequence[float]) -> str:
    return f" to {max(values):.4f}" if max(values) - min(values) > 5e-5 else ""


def _rate(entry: dict[str, Any], rate: str) -> float | None:
    measured: float | None = entry["side_by_side"][rate] if entry["side_by_side"] else entry[rate]
    return measured
