"""The report of a comparison: `summary.json`, `report.md` with `plots/`, and one self-contained `report.html`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import plots, tables
from training import report_diffusion as diffusion
from training.loop import write_json
from training.render import Block, text_table, to_html, to_markdown
from training.summary import Result, at_rate, mean_weights, smooth, summarise
from training.sweep import sweep
from training.tables import conclusions

_WEIGHTS = (
    "mean weight of every source (over a fixed validation batch and the seeds), times the reader's number of sources: "
    "1 (white) is the standard residual."
)


def write(
    output_dir: Path,
    name: str,
    baseline: str,
    results: Sequence[Result],
    failures: dict[str, str],
    speed: dict[str, dict[str, float]],
) -> str:
    """Write all three files; returns the table of variants as text."""
    groups = sweep(results, baseline)
    # where the baseline has been swept, too, its best setting is what all others are compared with
    reference = groups[0]["best"]["variant"] if groups else baseline
    summary = {"name": name, **summarise(results, reference, failures, speed), "sweep": groups}
    write_json(output_dir / "summary.json", summary)
    # a sweep has too many variants for plots of all: the best of each kind
    shown = [group["best"]["variant"] for group in groups] or list(summary["variants"])
    chosen = {name: at_rate(results, name, summary["variants"][name]["best_learning_rate"]) for name in shown}
    folder = output_dir / "plots"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks = compose(summary, draw(folder, summary, chosen))
    (output_dir / "report.md").write_text(to_markdown(blocks, output_dir))
    (output_dir / "report.html").write_text(to_html(name, blocks))
    return text_table(tables.variant_table(summary))


def draw(folder: Path, summary: dict[str, Any], chosen: dict[str, list[Result]]) -> dict[str, list[Block]]:
    """All plots, by the section they belong to."""
    baseline, names = summary["baseline"], list(chosen)
    palette = plots.colours(names, baseline)
    drawn: dict[str, list[Block]] = {section: [] for section in ("loss", "difference", "weights", "depth", "rates")}
    drawn["samples"] = diffusion.sample_blocks(folder, chosen)
    drawn["buckets"] = diffusion.bucket_blocks(folder, summary, chosen, palette)
    drawn["noise"] = diffusion.weight_blocks(folder, chosen, palette)
    drawn["sweep"] = diffusion.sweep_blocks(folder, summary["sweep"])

    def add(section: str, name: str, caption: str) -> Path:
        drawn[section].append(Block("plot", caption, path=folder / f"{name}.png"))
        return folder / f"{name}.png"

    panels = []
    for kind, label in (("train", "training loss"), ("eval", "validation loss")):
        for x, x_label in (("step", "steps"), ("samples", "samples"), ("seconds", "training time (s)")):
            curves = {variant: curve for variant, runs in chosen.items() if (curve := _curve(runs, kind, x))}
            panels.append((x_label, label, curves))
    if all(curves for _, _, curves in panels):
        path = add(
            "loss",
            "loss",
            "Loss against steps, samples and time (without evaluation). Line: mean over the seeds, band: their range. "
            "The training loss is the mean of the last 5 % of the steps.",
        )
        plots.loss_curves(path, panels, palette, columns=3)

    compared = {variant: summary["variants"][variant].get("difference") for variant in names}
    others = [variant for variant in names if compared[variant] and compared[variant]["test_loss"]]
    if others:
        path = add(
            "difference",
            "difference",
            f"Difference to {baseline} with the same seed: a dot per seed, a bar at their mean.",
        )
        metrics = [
            metric
            for metric in tables.task_of(summary).metrics
            if metric.axis and all(compared[variant].get(metric.key) for variant in others)
        ]
        metrics.sort(key=lambda metric: metric.key != "test_loss")  # what the table is about comes first
        plots.differences(
            path,
            [(m.axis, {v: [s * m.factor for s in compared[v][m.key]["values"]] for v in others}) for m in metrics],
            palette,
        )
    profiles = {variant: [run.result.get("profile") or {} for run in runs] for variant, runs in chosen.items()}
    if all(profile.get("start") and profile.get("end") for of_runs in profiles.values() for profile in of_runs):
        panels_of_depth = [
            (title, label, {v: _profile(of_runs, when, key) for v, of_runs in profiles.items()})
            for key, label in (("hidden_rms", "RMS of what is read"), ("gradient_norm", "gradient norm at the output"))
            for when, title in (("start", "before training"), ("end", "after training"))
        ]
        path = add(
            "depth",
            "depth",
            "What each sublayer reads (RMS over a fixed validation batch) and the gradient of the loss with respect to "
            "its output, against depth. Mean over the seeds. With queries at zero all variants are one function before "
            "training.",
        )
        plots.depth_profile(path, panels_of_depth, palette)
    for variant, runs in chosen.items():
        if drawn["noise"] or diffusion.frozen(runs[0]):
            continue  # heat maps per noise level are there already, or all weights are equal
        rows = mean_weights([run.result.get("depth_weights") or [] for run in runs])
        if rows:
            path = add("weights", f"weights_{variant}", f"{variant}: {_WEIGHTS}")
            plots.depth_weights(path, variant, rows)
    sweeps = {variant: summary["variants"][variant]["learning_rates"] for variant in names}
    if any(len(rates) > 1 for rates in sweeps.values()):
        path = add(
            *("rates", "learning_rates"),
            "Final validation loss, by which a learning rate is chosen, against it; band: range over the seeds.",
        )
        values = {v: {float(r): found["values"] for r, found in rates.items()} for v, rates in sweeps.items()}
        plots.learning_rates(path, values, palette)
    return drawn


def compose(summary: dict[str, Any], drawn: dict[str, list[Block]]) -> list[Block]:
    """The report, top to bottom."""
    variants, baseline = summary["variants"], summary["baseline"]
    blocks = [
        Block("title", summary["name"]),
        Block("table", rows=tables.variant_table(summary)),
        Block("text", tables.notes(summary)),
    ]
    if summary["failures"]:
        failed = [f"{label}: {error}" for label, error in summary["failures"].items()]
        blocks += [Block("heading", "Failed runs"), Block("list", items=failed)]
    blocks += [
        Block("heading", "What can be concluded"),
        Block("list", items=conclusions(summary)),
        *drawn["difference"],
    ]
    if drawn["samples"]:
        blocks += [Block("heading", "Samples"), *drawn["samples"]]
    blocks += [Block("heading", "Loss"), *drawn["loss"]]
    lost = [folder for entry in variants.values() for folder in entry["without_curves"]]
    if lost:
        text = "These runs are complete, but their metrics.jsonl is lost or damaged, so they are in no curve:"
        blocks += [Block("text", text), Block("list", items=lost)]
    if drawn["buckets"]:
        blocks += [Block("heading", "Loss by noise level"), *drawn["buckets"]]
    if any(entry.get("compute_multiplier") for entry in variants.values()):
        blocks += [Block("heading", "Compute multiplier"), Block("table", rows=tables.multiplier_table(summary))]
        blocks += [
            Block(
                "text",
                f"Steps of {baseline} to the variant's final loss, divided by the variant's steps (curves averaged "
                "over the seeds). '>' means that it never reached that loss within its run; nothing is extrapolated. "
                "In the middle of a decaying schedule a loss is higher than at the end of a shorter schedule, so the "
                "number says how far ahead a variant is of this run, not of a run planned shorter or longer.",
            )
        ]
    if drawn["rates"]:
        blocks += [
            Block("heading", "Learning rates (chosen on validation, reported on test)"),
            Block("table", rows=tables.rate_table(summary)),
            *drawn["rates"],
        ]
    if drawn["sweep"]:
        blocks += [Block("heading", "Sweep"), *drawn["sweep"]]
    if drawn["weights"]:
        blocks += [Block("heading", "Depth weights"), *drawn["weights"]]
    if drawn["noise"]:
        blocks += [Block("heading", "Depth weights against the noise level"), *drawn["noise"]]
    if drawn["depth"]:
        blocks += [Block("heading", "Along the depth"), *drawn["depth"]]
    blocks += [Block("heading", "What differs between the configs")]
    rows = [["field", *variants]]
    for key, values in summary["config_differences"].items():
        rows.append([key, *("" if values[name] is None else str(values[name]) for name in variants)])
    blocks += [Block("table", rows=rows), Block("heading", "Made with")]
    return [*blocks, Block("list", items=[tables.environment_text(found) for found in summary["environments"]])]


def _curve(runs: Sequence[Result], kind: str, x: str) -> plots.Curve | None:
    """x and the loss of every seed with metrics; a measured x (time) differs between seeds and is averaged."""
    curves = [curve for run in runs if len((curve := run.curve(kind, x))[0])]
    if not curves:
        return None
    width = max(1, len(curves[0][1]) // 20)
    losses = np.array([smooth(loss, width) if kind == "train" else loss for _, loss in curves])
    return np.mean([values for values, _ in curves], axis=0), losses


def _profile(of_runs: Sequence[dict[str, Any]], when: str, key: str) -> np.ndarray:
    return np.array([[layer[key] for layer in profile[when]] for profile in of_runs])
