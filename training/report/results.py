"""Complete runs, and the statistics over their seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.loop.run import read_metrics

# fields of a config that say which run it is, not what it computes
PLACE = ("output_dir", "resume", "num_processes", "seed")


@dataclasses.dataclass
class Result:
    """One complete run."""

    variant: str
    seed: int
    lr: float
    folder: Path
    result: dict[str, Any]

    def curve(self, kind: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """The loss of `kind` ("train" or "eval") against a column of the metrics; empty if they are lost or damaged."""
        try:
            records = [record for record in read_metrics(self.folder) if record["kind"] == kind]
        except (OSError, ValueError):
            records = []
        return np.array([record[x] for record in records], float), np.array([record["loss"] for record in records])


def best_rate(runs: Sequence[Result]) -> float:
    """The learning rate with the lowest final validation loss, mean over seeds. The test set has no say in it."""
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


def paired(
    runs: Sequence[Result], base: Sequence[Result], value: Callable[[dict[str, Any]], float | None]
) -> dict[str, Any] | None:
    """Differences to the baseline's run with the same seed (same data order, same initial weights), where both have it.

    Args:
        value: what is compared, from a run's result.
    """
    of_seed = {run.seed: value(run.result) for run in base}
    differences: dict[int, float] = {}
    for run in runs:
        mine, other = value(run.result), of_seed.get(run.seed)
        if mine is not None and other is not None:
            differences[run.seed] = mine - other
    seeds, values = list(differences), list(differences.values())
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


def mean_weights(of_runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The mean over the runs of what `diagnostics.depth_weights` returned for each."""
    return [
        {**rows[0], "weights": np.mean([row["weights"] for row in rows], axis=0).tolist()}
        for rows in zip(*of_runs, strict=True)
    ]


def spread_text(value: dict[str, Any] | None, digits: int | None, sign: bool = False, factor: float = 1.0) -> str:
    """Mean ± standard deviation; without the latter for a single seed, empty for None. `digits` as in `Metric`."""
    if not value:
        return ""
    style = ".4g" if digits is None else f".{digits}f"
    text = f"{factor * value['mean']:{'+' if sign else ''}{style}}"
    return text if value["sd"] is None else f"{text} ± {factor * value['sd']:{'.2g' if digits is None else style}}"


def setting_text(setting: dict[str, Any]) -> str:
    """A setting of a sweep, in words: "query_lr_scale 0.1, scale 1"."""
    return ", ".join(
        f"{name.rpartition('.')[2]} {value:g}" for name, value in setting["values"].items() if value is not None
    )
