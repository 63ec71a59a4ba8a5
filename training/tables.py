"""The tables and sentences of a report, from its summary. Nothing is computed here, and nothing drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training import metrics


def variant_table(summary: dict[str, Any]) -> list[list[str]]:
    """The table of variants, header first."""
    cuda = any(found["device"].startswith("cuda") for found in summary["environments"])
    task, variants = task_of(summary), summary["variants"]
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
                *(shown_spread(entry.get(metric.key), metric.digits, factor=metric.factor) for metric in shown),
                *(
                    shown_spread(difference.get(metric.key), metric.digits, sign=True, factor=metric.factor)
                    for metric in compared
                ),
            ]
        )
    return rows


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
                *(shown_spread(found.get(rate), 4) for rate in rates),
                shown_spread(entry["test_loss"], 4),
            ]
        )
    return rows


def bucket_table(summary: dict[str, Any]) -> list[list[str]]:
    """Final test loss per range of noise levels, and below each variant its difference to the baseline."""
    entries = {name: entry["buckets"] for name, entry in summary["variants"].items() if entry.get("buckets")}
    first = next(iter(entries.values()))
    rows = [["variant", *(f"sigma {bucket['low']:g} to {bucket['high']:g}" for bucket in first)]]
    for name, found in entries.items():
        rows.append([name, *(shown_spread(bucket["loss"], 4) for bucket in found)])
        if any(bucket["loss_raw"] for bucket in found):
            rows.append([f"{name}, without EMA", *(shown_spread(bucket["loss_raw"], 4) for bucket in found)])
    for name, found in entries.items():
        if any(bucket["difference"] for bucket in found):
            label = f"Δ {name}"
            rows.append([label, *(shown_spread(bucket["difference"], 4, sign=True) for bucket in found)])
    return rows


def _best_of(group: dict[str, Any]) -> str:
    number = len(group["settings"])
    setting = setting_text(group["best"]) or group["best"]["variant"]
    return f"best of {number} setting{'s' if number != 1 else ''} of {group['label']} ({setting})"


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
                shown_spread(group["best"]["val_loss"], 4),
                f"{max(values):.4f}",
                shown_spread(group["test_loss"], 4),
                shown_spread(group["difference"], 4, sign=True),
                shown_spread(group["difference_same_lr"], 4, sign=True),
            ]
        )
    return rows


def setting_text(setting: dict[str, Any]) -> str:
    """A setting of a sweep, in words: "query_lr_scale 0.1, scale 1"."""
    return ", ".join(f"{short(name)} {value:g}" for name, value in setting["values"].items() if value is not None)


def short(field: str) -> str:
    return field.rpartition(".")[2]


def multiplier_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["variant", "on validation loss", "on training loss"]]
    for name, entry in summary["variants"].items():
        if entry.get("compute_multiplier"):
            found = entry["compute_multiplier"]
            text = [f"{'' if found[kind]['reached'] else '> '}{found[kind]['value']:.2f}" for kind in ("eval", "train")]
            rows.append([name, *text])
    return rows


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


def notes(summary: dict[str, Any]) -> str:
    entries, task = list(summary["variants"].values()), task_of(summary)
    seeds = sorted({len(entry["runs"]) for entry in entries})
    notes = [
        f"Mean ± standard deviation over {' to '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}, "
        f"{entries[0]['steps']} steps; Δ: paired by seed, against {summary['baseline']}.",
        "val: the validation set, by which everything is chosen; test: the test set, evaluated once after training.",
        f"GFLOPs: one forward pass of one {task.unit.removesuffix('s')}, 2 per multiply-add.",
        *_video_notes(entries),
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


def environment_text(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    threads = f", {found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    return f"{packages}; Python {found['python']}; {found['device']}{threads}; commit {found['git'] or 'unknown'}"


def task_of(summary: dict[str, Any]) -> metrics.TaskMetrics:
    return metrics.VIDEO if summary.get("unit") == metrics.VIDEO.unit else metrics.IMAGE


def shown_spread(value: dict[str, Any] | None, digits: int | None, sign: bool = False, factor: float = 1.0) -> str:
    """Mean ± standard deviation; without the latter for a single seed, empty for None. `digits` as in `Metric`."""
    if not value:
        return ""
    style = ".4g" if digits is None else f".{digits}f"
    text = f"{factor * value['mean']:{'+' if sign else ''}{style}}"
    return text if value["sd"] is None else f"{text} ± {factor * value['sd']:{'.2g' if digits is None else style}}"


def _video_notes(entries: Sequence[dict[str, Any]]) -> list[str]:
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
