"""The numbers of a report, from the runs' results and metrics. No drawing, no text: `summary.json` is made here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from training.config.io import flatten
from training.report import metrics
from training.report.results import PLACE, Result, at_rate, best_rate, paired, smooth, spread


def summarise(
    results: Sequence[Result], baseline: str, failures: dict[str, str], speed: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Everything that the report says in numbers."""
    variants = list(dict.fromkeys(result.variant for result in results))
    best = {name: best_rate([result for result in results if result.variant == name]) for name in variants}
    chosen = {name: at_rate(results, name, best[name]) for name in variants}
    base = chosen.get(baseline, [])
    task = metrics.of_result(results[0].result)
    final = [metric for metric in task.metrics if any(metric.of(run.result) is not None for run in results)]
    summary: dict[str, Any] = {"baseline": baseline, "unit": task.unit, "variants": {}, "failures": failures}
    for name in variants:
        runs = chosen[name]
        first = runs[0].result
        entry: dict[str, Any] = {
            "parameters": first["parameters"],
            "gflops": first.get("gflops"),
            task.rate: _mean_of(runs, task.rate),
            "side_by_side": speed.get(name),
            "peak_memory": _mean_of(runs, "peak_memory"),
            "peak_memory_before": _mean_of(runs, "peak_memory_before"),
            "steps": first["steps"],
            "best_learning_rate": best[name],
            "learning_rates": {
                str(rate): spread([run.result["val_loss"] for run in at_rate(results, name, rate)])
                for rate in sorted({result.lr for result in results if result.variant == name})
            },
            **{metric.key: _spread_of(runs, metric) for metric in final},
            "runs": [
                {"seed": run.seed, "folder": str(run.folder), **{m.key: m.of(run.result) for m in final}}
                for run in runs
            ],
            "without_curves": [str(run.folder) for run in runs if not len(run.curve("eval")[0])],
        }
        if first.get("test_loss_untrained") is not None:
            entry["test_loss_untrained"] = _mean_of(runs, "test_loss_untrained")
        if first.get("frechet"):
            found = first["frechet"]
            counted = f"{found['real']} real and {found['generated']} generated clips"
            entry["frechet_extractor"] = f"features of {found['extractor']}, {counted}"
        if first.get("test_buckets"):
            entry["buckets"] = buckets(runs, base if name != baseline else [])
        if name != baseline and base:
            entry["difference"] = {metric.key: paired(runs, base, metric.of) for metric in final}
            multiplier = compute_multiplier(runs, base)
            entry.update({"compute_multiplier": multiplier} if multiplier else {})
        summary["variants"][name] = entry
    summary["config_differences"] = config_differences({name: chosen[name][0].result["config"] for name in variants})
    summary["environments"] = environments(results)
    return summary


def buckets(runs: Sequence[Result], base: Sequence[Result]) -> list[dict[str, Any]]:
    """The test loss per range of noise levels: spread over the seeds, and differences to the baseline."""
    found = []
    for index, bucket in enumerate(runs[0].result["test_buckets"]):

        def loss(result: dict[str, Any], key: str = "loss", index: int = index) -> float | None:
            of_run = result.get("test_buckets") or []
            return of_run[index].get(key) if index < len(of_run) else None

        raw = [loss(run.result, "loss_raw") for run in runs]
        found.append(
            {
                "low": bucket["low"],
                "high": bucket["high"],
                "loss": spread([run.result["test_buckets"][index]["loss"] for run in runs]),
                "loss_raw": spread(known) if len(known := [value for value in raw if value is not None]) else None,
                "difference": paired(runs, base, loss),
            }
        )
    return found


def mean_curve(runs: Sequence[Result], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Loss against steps, mean over the seeds; training loss smoothed over 5 % of the steps, as `train_loss` is."""
    curves = [curve for run in runs if len((curve := run.curve(kind))[0])]
    if not curves:
        return np.array([]), np.array([])
    steps = curves[0][0]
    loss = np.mean([values for _, values in curves], axis=0)
    return steps, smooth(loss, max(1, len(loss) // 20)) if kind == "train" else loss


def compute_multiplier(runs: Sequence[Result], base: Sequence[Result]) -> dict[str, Any] | None:
    """The baseline's steps to the variant's final loss, divided by the variant's steps.

    On the training and on the validation loss. `reached` is false if the baseline never got there; `value` is then its
    whole run, a lower bound: a loss curve is never extrapolated. Between two evaluations the crossing is interpolated.
    None without the curves of either.
    """
    multiplier = {}
    for kind in ("train", "eval"):
        steps, loss = mean_curve(base, kind)
        variant_steps, variant_loss = mean_curve(runs, kind)
        if not len(steps) or not len(variant_steps):
            return None
        crossing = first_crossing(steps, loss, variant_loss[-1])
        multiplier[kind] = {
            "reached": crossing is not None,
            "value": (steps[-1] if crossing is None else crossing) / variant_steps[-1],
        }
    return multiplier


def first_crossing(steps: np.ndarray, loss: np.ndarray, target: float) -> float | None:
    """The first step at which the loss is at most `target`; None if it never is."""
    below = np.flatnonzero(loss <= target)
    if len(below) == 0:
        return None
    after = below[0]
    if after == 0:
        return float(steps[0])
    share = (loss[after - 1] - target) / (loss[after - 1] - loss[after])
    return float(steps[after - 1] + share * (steps[after] - steps[after - 1]))


def config_differences(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields in which the variants differ: field -> variant -> value (None where a variant has no such field)."""
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = list(dict.fromkeys(key for fields in flat.values() for key in fields if key not in PLACE))
    table = {key: {name: fields.get(key) for name, fields in flat.items()} for key in keys}
    return {
        key: values
        for key, values in table.items()
        if len({repr(value) for value in values.values()}) > 1 and set(map(repr, values.values())) != {"None", "{}"}
    }


def environments(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The different environments that the runs ran in, usually one."""
    different: list[dict[str, Any]] = []
    for result in results:
        if result.result["environment"] not in different:
            different.append(result.result["environment"])
    return different


def _mean_of(runs: Sequence[Result], name: str) -> float | None:
    values = [run.result[name] for run in runs if run.result.get(name) is not None]
    return statistics.fmean(values) if values else None


def _spread_of(runs: Sequence[Result], metric: metrics.Metric) -> dict[str, Any] | None:
    values = [value for run in runs if (value := metric.of(run.result)) is not None]
    return spread(values) if values else None
