"""What each training task is measured by: the one place where a report learns how image and video tables differ.

Numbers of the validation set are what is chosen by (learning rates, settings of a sweep); differences are of the test
set, which nothing is chosen by. Labels name the set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that a run ends with.

    Args:
        key: its name in `summary.json`, and in `result.json` unless `get` says how it is made.
        label: header of its column.
        digits: decimals, of the number times `factor`; None is four significant digits, for what has no usual size.
        factor: what it is shown times, 100 for percentages.
        lower_is_better: which way is better.
        delta: header of the column of differences to the baseline; "" for none.
        axis: its name in the plot of differences to the baseline; "" for none.
        get: makes it from `result.json`; None where a run does not have it.
    """

    key: str
    label: str
    digits: int | None = 4
    factor: float = 1.0
    lower_is_better: bool = True
    delta: str = ""
    axis: str = ""
    get: Callable[[Mapping[str, Any]], float | None] | None = None

    def of(self, result: Mapping[str, Any]) -> float | None:
        """Its value in a run; None if the run does not have it."""
        return result.get(self.key) if self.get is None else self.get(result)


@dataclasses.dataclass(frozen=True)
class TaskMetrics:
    """A task's metrics, in the order of the table's columns; `unit` is what a sample is called: "images", "clips"."""

    unit: str
    metrics: tuple[Metric, ...]

    @property
    def rate(self) -> str:
        """Name of the throughput in results."""
        return f"{self.unit}_per_second"


def _below_untrained(result: Mapping[str, Any]) -> float | None:
    untrained = result.get("test_loss_untrained")
    return 1 - result["test_loss"] / untrained if untrained else None


def _frechet(result: Mapping[str, Any]) -> float | None:
    return (result.get("frechet") or {}).get("value")


_TRAIN_LOSS = Metric("train_loss", "train loss", axis="Δ training loss")
IMAGE = TaskMetrics(
    "images",
    (
        _TRAIN_LOSS,
        Metric("val_loss", "val loss"),
        Metric("test_loss", "test loss", delta="Δ test loss", axis="Δ test loss"),
        Metric("test_top1", "test top-1 %", 2, 100, False, delta="Δ test top-1", axis="Δ test top-1 (points)"),
    ),
)
VIDEO = TaskMetrics(
    "clips",
    (
        _TRAIN_LOSS,
        Metric("val_loss", "val flow loss"),
        Metric("test_loss", "test flow loss", delta="Δ test flow loss", axis="Δ test flow loss"),
        Metric("test_loss_raw", "test, without EMA", axis="Δ test, without EMA"),
        Metric("below_untrained", "test, below untrained %", 1, 100, lower_is_better=False, get=_below_untrained),
        Metric("frechet", "test Fréchet distance", None, delta="Δ test Fréchet", get=_frechet),
    ),
)


TASKS = {task.unit: task for task in (IMAGE, VIDEO)}


def of_result(result: Mapping[str, Any]) -> TaskMetrics:
    """The metrics of the task that wrote a `result.json`."""
    return VIDEO if VIDEO.rate in result else IMAGE
