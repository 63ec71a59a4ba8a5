"""The report of a comparison: `summary.json`, `report.md` with `plots/`, and one self-contained `report.html`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import plots
from training.loop import write_json
from training.render import Block, text_table, to_html, to_markdown
from training.summary import Result, at_rate, smooth, summarise

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
    summary = {"name": name, **summarise(results, baseline, failures, speed)}
    write_json(output_dir / "summary.json", summary)
    chosen = {
        variant: at_rate(results, variant, entry["best_learning_rate"])
        for variant, entry in summary["variants"].items()
    }
    folder = output_dir / "plots"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks = compose(summary, draw(folder, summary, chosen))
    (output_dir / "report.md").write_text(to_markdown(blocks, output_dir))
    (output_dir / "report.html").write_text(to_html(name, blocks))
    return text_table(variant_table(summary))


def draw(folder: Path, summary: dict[str, Any], chosen: dict[str, list[Result]]) -> dict[str, list[Block]]:
    """All plots, by the section they belong to."""
    baseline, names = summary["baseline"], list(chosen)
    palette = plots.colours(names, baseline)
    drawn: dict[str, list[Block]] = {"loss": [], "difference": [], "weights": [], "depth": [], "rates": []}

    def add(section: str, name: str, caption: str) -> Path:
        drawn[section].append(Block("plot", caption, path=folder / f"{name}.png"))
        return folder / f"{name}.png"

    panels = []
    for kind, label in (("train", "training loss"), ("eval", "validation loss")):
        for x, x_label in (("step", "steps"), ("samples", "samples"), ("seconds", "training time (s)")):
            curves = {variant: _curve(runs, kind, x) for variant, runs in chosen.items()}
            panels.append((x_label, label, curves))
    path = add(
        "loss",
        "loss",
        "Loss against steps, samples and time (without evaluation). Line: mean over the seeds, band: their range. "
        "The training loss is the mean of the last 5 % of the steps.",
    )
    plots.loss_curves(path, panels, palette, columns=3)

    compared = {variant: summary["variants"][variant].get("difference") for variant in names}
    others = [variant for variant in names if compared[variant] and compared[variant]["val_loss"]]
    if others:
        path = add(
            "difference",
            "difference",
            f"Difference to {baseline} with the same seed: a dot per seed, a bar at their mean.",
        )
        titles = (
            ("val_loss", "Δ validation loss", 1),
            ("train_loss", "Δ training loss", 1),
            ("top1", "Δ top-1 (points)", 100),
        )
        plots.differences(
            path,
            [(t, {v: [s * x for x in compared[v][metric]["values"]] for v in others}) for metric, t, s in titles],
            palette,
        )
    profiles = {variant: [run.result["profile"] for run in runs] for variant, runs in chosen.items()}
    if all(profile["start"] and profile["end"] for of_runs in profiles.values() for profile in of_runs):
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
        if runs[0].result["config"]["model"]["freeze_queries"]:
            continue  # equal weights, everywhere
        rows = _mean_weights([run.result["depth_weights"] for run in runs])
        if rows:
            path = add("weights", f"weights_{variant}", f"{variant}: {_WEIGHTS}")
            plots.depth_weights(path, variant, rows)
    sweeps = {variant: summary["variants"][variant]["learning_rates"] for variant in names}
    if any(len(rates) > 1 for rates in sweeps.values()):
        path = add(
            "rates", "learning_rates", "Final validation loss against the learning rate; band: range over the seeds."
        )
        values = {v: {float(r): found["values"] for r, found in rates.items()} for v, rates in sweeps.items()}
        plots.learning_rates(path, values, palette)
    return drawn


def compose(summary: dict[str, Any], drawn: dict[str, list[Block]]) -> list[Block]:
    """The report, top to bottom."""
    variants, baseline = summary["variants"], summary["baseline"]
    blocks = [
        Block("title", summary["name"]),
        Block("table", rows=variant_table(summary)),
        Block("text", _notes(summary)),
    ]
    if summary["failures"]:
        failed = [f"{label}: {error}" for label, error in summary["failures"].items()]
        blocks += [Block("heading", "Failed runs"), Block("list", items=failed)]
    blocks += [
        Block("heading", "What can be concluded"),
        Block("list", items=conclusions(summary)),
        *drawn["difference"],
    ]
    blocks += [Block("heading", "Loss"), *drawn["loss"]]
    if any("compute_multiplier" in entry for entry in variants.values()):
        blocks += [Block("heading", "Compute multiplier"), Block("table", rows=multiplier_table(summary))]
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
        rows = [
            [
                "variant",
                "best learning rate",
                *sorted({r for e in variants.values() for r in e["learning_rates"]}, key=float),
            ]
        ]
        for variant, entry in variants.items():
            found = entry["learning_rates"]
            rows.append(
                [variant, f"{entry['best_learning_rate']:g}", *(_spread(found.get(rate), 4) for rate in rows[0][2:])]
            )
        blocks += [
            Block("heading", "Learning rates (final validation loss)"),
            Block("table", rows=rows),
            *drawn["rates"],
        ]
    if drawn["weights"]:
        blocks += [Block("heading", "Depth weights"), *drawn["weights"]]
    if drawn["depth"]:
        blocks += [Block("heading", "Along the depth"), *drawn["depth"]]
    blocks += [Block("heading", "What differs between the configs")]
    rows = [["field", *variants]]
    for key, values in summary["config_differences"].items():
        rows.append([key, *("" if values[name] is None else str(values[name]) for name in variants)])
    blocks += [Block("table", rows=rows), Block("heading", "Made with")]
    return [*blocks, Block("list", items=[_environment(found) for found in summary["environments"]])]


def variant_table(summary: dict[str, Any]) -> list[list[str]]:
    """The table of variants, header first."""
    cuda = any(found["device"].startswith("cuda") for found in summary["environments"])
    header = ["variant", "params (M)", "GFLOPs", "images/s", "peak MB", "train loss", "val loss", "top-1 %"]
    rows = [[*header, "Δ val loss", "Δ top-1"]]
    for name, entry in summary["variants"].items():
        difference = entry.get("difference") or {}
        top1 = {key: _scaled(entry["top1"][key], 100) for key in ("mean", "sd")}
        delta = difference.get("top1")
        rows.append(
            [
                name,
                f"{entry['parameters'] / 1e6:.3f}",
                f"{entry['gflops']:.4g}",
                f"{_rate(entry):.0f}" if _rate(entry) else "",
                f"{(entry['peak_memory'] - (0 if cuda else entry['peak_memory_before'])) / 2**20:.0f}",
                _spread(entry["train_loss"], 4),
                _spread(entry["val_loss"], 4),
                _spread(top1, 2),
                _spread(difference.get("val_loss"), 4, sign=True),
                _spread({key: _scaled(delta[key], 100) for key in ("mean", "sd")} if delta else None, 2, sign=True),
            ]
        )
    return rows


def multiplier_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["variant", "on validation loss", "on training loss"]]
    for name, entry in summary["variants"].items():
        if "compute_multiplier" in entry:
            found = entry["compute_multiplier"]
            text = [f"{'' if found[kind]['reached'] else '> '}{found[kind]['value']:.2f}" for kind in ("eval", "train")]
            rows.append([name, *text])
    return rows


def conclusions(summary: dict[str, Any]) -> list[str]:
    """What the seeds support, in words. Nothing beyond signs, means and spreads: a few seeds carry no more."""
    sentences = []
    baseline = summary["baseline"]
    for name, entry in summary["variants"].items():
        difference = (entry.get("difference") or {}).get("val_loss")
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
        sentences.append(f"{name} against {baseline}, validation loss: {text}")
    controls = [
        name
        for name in summary["variants"]
        if summary["config_differences"].get("model.freeze_queries", {}).get(name) is True
    ]
    for name in controls:
        values = ((summary["variants"][name].get("difference") or {}).get("val_loss") or {}).get("values", [])
        if values:
            sentences.append(
                f"{name} computes the standard residual through the AttnRes code, so its differences (up to "
                f"{max(map(abs, values)):.4f} in validation loss) are what rounding alone does to a run of this "
                "length; a difference of that size means nothing."
            )
    if any(len(entry.get("learning_rates", ())) > 1 for entry in summary["variants"].values()):
        sentences.append(
            "Each variant stands with its best learning rate, picked by the same validation losses that are compared "
            "here, so all of them look a little better than on new data."
        )
    sentences.append(
        "All of this holds for this data set, model, length of training and learning rates only. Differences are "
        "paired by seed: same initial weights of the shared parameters, same order of the data."
    )
    return sentences


def _notes(summary: dict[str, Any]) -> str:
    entries = list(summary["variants"].values())
    seeds = sorted({len(entry["runs"]) for entry in entries})
    notes = [
        f"Mean ± standard deviation over {' to '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}, "
        f"{entries[0]['steps']} steps; Δ: paired by seed, against {summary['baseline']}.",
        "GFLOPs: one forward pass of one image, 2 per multiply-add.",
    ]
    if entries[0]["side_by_side"]:
        notes.append(
            "images/s: median training step (forward, backward, update) of all variants taken in turns in one process, "
            "after the training; compare these with each other, not with another machine's. Times in the loss plots "
            "are those of runs that shared the machine with each other."
        )
    else:
        notes.append("images/s: of the runs themselves, which may have shared the machine: no basis for a comparison.")
    if any(found["device"].startswith("cuda") for found in summary["environments"]):
        notes.append("Peak memory: allocated on the device.")
    else:
        notes.append("Peak memory: what the process grew by from before the model was made.")
    return " ".join(notes)


def _environment(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    threads = f", {found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    return f"{packages}; Python {found['python']}; {found['device']}{threads}; commit {found['git'] or 'unknown'}"


def _curve(runs: Sequence[Result], kind: str, x: str) -> plots.Curve:
    """x and the loss of every seed; a measured x (time) differs between seeds and is averaged."""
    curves = [run.curve(kind, x) for run in runs]
    width = max(1, len(curves[0][1]) // 20)
    losses = np.array([smooth(loss, width) if kind == "train" else loss for _, loss in curves])
    return np.mean([values for values, _ in curves], axis=0), losses


def _profile(of_runs: Sequence[dict[str, Any]], when: str, key: str) -> np.ndarray:
    return np.array([[layer[key] for layer in profile[when]] for profile in of_runs])


def _mean_weights(of_runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {**rows[0], "weights": np.mean([row["weights"] for row in rows], axis=0).tolist()}
        for rows in zip(*of_runs, strict=True)
    ]


def _rate(entry: dict[str, Any]) -> float | None:
    return entry["side_by_side"]["images_per_second"] if entry["side_by_side"] else entry["images_per_second"]


def _spread(value: dict[str, Any] | None, digits: int, sign: bool = False) -> str:
    if not value:
        return ""
    text = f"{value['mean']:{'+' if sign else ''}.{digits}f}"
    return text if value["sd"] is None else f"{text} ± {value['sd']:.{digits}f}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
