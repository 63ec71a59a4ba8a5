"""The config of `training.compare`: a table of variants x learning rates x seeds, for either task."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

from training.config.base import TrainConfig, at_least, check
from training.config.image import ImageConfig
from training.config.video import VideoConfig


@dataclasses.dataclass(kw_only=True)
class CompareConfig:
    """A comparison: `python -m training.compare`.

    Args:
        name: title of the report.
        task: what is trained, `"image"` or `"video"`.
        base: config of every run.
        variants: name of each variant and what it changes in `base`, as nested fields.
        baseline: the variant that the others are compared with.
        seeds: every variant runs once with each.
        learning_rates: every variant runs with each; null keeps `base.optim.lr` and what variants say.
        jobs: runs side by side on a CPU.
        speed_rounds: training steps per variant, taken in turns in one process, that rate the speed; 0 is off.
        smoke: what `--smoke` changes in this table, as nested fields, for a quick look whether everything works.
        output_dir: where everything goes; null is `runs/<name of the YAML>`.
    """

    name: str = "comparison"
    task: str = ""
    base: TrainConfig = field(default_factory=TrainConfig)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    baseline: str = "standard"
    seeds: list[int] = field(default_factory=lambda: [0])
    learning_rates: list[float] | None = None
    jobs: int = 1
    speed_rounds: int = 8
    smoke: dict[str, Any] = field(default_factory=dict)
    output_dir: str | None = None

    def __post_init__(self) -> None:
        known = ", ".join(self.variants)
        check("baseline", self.baseline, self.baseline in self.variants, f"one of the variants ({known})")
        for name, values in (("seeds", self.seeds), ("learning_rates", self.learning_rates)):
            different = values is None or (bool(values) and len(set(values)) == len(values))
            check(name, values, different, "different numbers, at least one")
        for name in self.variants:
            letters = name.replace("-", "").replace("_", "").isalnum()
            check("variants", name, letters, "named by letters, digits, - and _")
        for name in ("jobs", "speed_rounds"):
            at_least(name, getattr(self, name), int(name == "jobs"))


@dataclasses.dataclass(kw_only=True)
class ImageCompareConfig(CompareConfig):
    __doc__ = CompareConfig.__doc__
    task: Literal["image"] = "image"
    base: ImageConfig = field(default_factory=ImageConfig)


@dataclasses.dataclass(kw_only=True)
class VideoCompareConfig(CompareConfig):
    __doc__ = CompareConfig.__doc__
    task: Literal["video"] = "video"
    base: VideoConfig = field(default_factory=VideoConfig)


TASKS: dict[str, type[CompareConfig]] = {"image": ImageCompareConfig, "video": VideoCompareConfig}


def config_class(task: Any) -> type[CompareConfig]:
    """The class of a table's config.

    Raises:
        ValueError: there is no such task.
    """
    if task not in TASKS:
        raise ValueError(f"task must be {' or '.join(map(repr, TASKS))}, got {task!r}")
    return TASKS[task]
