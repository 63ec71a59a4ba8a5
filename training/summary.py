"""The numbers of a report, from the runs' results and metrics. No drawing, no text: `summary.json` is made here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.config_io import flatten
from training.loop import read_metrics

# what a run ends with; lower is better for all but top1
FINAL = ("train_loss", "val_loss", "top1")
_PLACE = ("output_dir", "resume", "num_processes", "seed")


@dataclasses.dataclass
class Result:
    """One complete run."""

    variant: str
    seed: int
    lr: float
    folder: Path
    result: dict[str, Any]

    def curve(self, kind: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """The loss of `kind` ("train" or "eval") against a column of the metrics."""
        records = [record for record in read_metrics(self.folder) if record["kind"] == kind]
        return np.array([record[x] for record in records], float), np.array([record["loss"] for record in records])


def summarise(
    results: Sequence[Result], baseline: str, failures: dict[str, str], speed: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Everything that the report says in numbers."""
    variants = list(dict.fromkeys(result.variant for result in results))
    best = {name: best_rate([result for result in results if result.variant == name]) for name in variants}
    chosen = {name: at_rate(results, name, best[name]) for name in variants}
    base = chosen.get(baseline, [])
    summary: dict[str, Any] = {"baseline": baseline, "variants": {}, "failures": failures}
    for name in variants:
        runs = chosen[name]
        first = runs[0].result
        entry: dict[str, Any] = {
            "parameters": first["parameters"],
            "gflops": first["gflops"],
            "images_per_second": _mean_of(runs, "images_per_second"),
            "side_by_side": speed.get(name),
            "peak_memory": _mean_of(runs, "peak_memory"),
            "peak_memory_before": _mean_of(runs, "peak_memory_before"),
            "steps": first["steps"],
            "best_learning_rate": best[name],
            "learning_rates": {
                str(rate): spread([run.result["val_loss"] for run in at_rate(results, name, rate)])
                for rate in sorted({result.lr for result in results if result.variant == name})
            },
            **{metric: spread([run.result[metric] for run in runs]) for metric in FINAL},
            "runs": [
                {"seed": run.seed, "folder": str(run.folder), **{metric: run.result[metric] for metric in FINAL}}
                for run in runs
            ],
        }
        if name != baseline and base:
            entry["difference"] = {metric: paired(runs, base, metric) for metric in FINAL}
            entry["compute_multiplier"] = compute_multiplier(runs, base)
        summary["variants"][name] = entry
    summary["config_differences"] = config_differences({name: chosen[name][0].result["config"] for name in variants})
    summary["environments"] = environments(results)
    return summary


def best_rate(runs: Sequence[Result]) -> float:
    """The learning rate with the lowest final validation loss, mean over seeds."""
    rates = sorted({run.lr for run in runs})
    return min(rates, key=lambda rate: statistics.fmean(run.result["val_loss"] for run in runs if run.lr == rate))


def at_rate(results: Sequence[Result], variant: str, rate: float) -> list[Result]:
    return sorted((run for run in results if (run.variant, run.lr) == (variant, rate)), key=lambda run: run.seed)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1; None for a single value)."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def paired(runs: Sequence[Result], base: Sequence[Result], metric: str) -> dict[str, Any] | None:
    """Differences to the baseline's run with the same seed (same data order, same initial weights)."""
    of_seed = {run.seed: run.result[metric] for run in base}
    seeds = [run.seed for run in runs if run.seed in of_seed]
    values = [run.result[metric] - of_seed[run.seed] for run in runs if run.seed in of_seed]
    if not values:
        return None
    same_sign = all(value > 0 for value in values) or all(value < 0 for value in values)
    return {**spread(values), "seeds": seeds, "same_sign": same_sign}


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over the last `width` values (fewer at the beginning)."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def mean_curve(runs: Sequence[Result], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Loss against steps, mean over the seeds; training loss smoothed over 5 % of the steps, as `train_loss` is."""
    curves = [run.curve(kind) for run in runs]
    steps = curves[0][0]
    loss = np.mean([values for _, values in curves], axis=0)
    return steps, smooth(loss, max(1, len(loss) // 20)) if kind == "train" else loss


def compute_multiplier(runs: Sequence[Result], base: Sequence[Result]) -> dict[str, Any]:
    """The baseline's steps to the variant's final loss, divided by the variant's steps.

    On the training and on the validation loss. `reached` is false if the baseline never got there; `value` is then its
    whole run, a lower bound: a loss curve is never extrapolated. Between two evaluations the crossing is interpolated.
    """
    multiplier = {}
    for kind in ("train", "eval"):
        steps, loss = mean_curve(base, kind)
        variant_steps, variant_loss = mean_curve(runs, kind)
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
    keys = list(dict.fromkeys(key for fields in flat.values() for key in fields if key not in _PLACE))
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
    values = [run.result[name] for run in runs if run.result[name] is not None]
    return statistics.fmean(values) if values else None
