"""What a training task is, and what all tasks do alike: `training/tasks/` has the two that there are.

A task builds a model, opens its data, computes a loss and scores a split. Here are what is kept of the data, the
profiles along the depth, what a run ends with and the step that rates the speed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from training.config.base import TrainConfig
from training.data.loaders import Splits
from training.evaluation.diagnostics import depth_profile, depth_weights
from training.loop.average import ModelCopy, NoAverage
from training.loop.measure import forward_gflops
from training.loop.optim import make_optimizer

Split = Literal["val", "test"]
Scores = dict[str, float]


class Task(ABC):
    """One object serves one run.

    Attributes:
        config: the run's config.
        unit: what a sample is called in the result, as in `images_per_second`.
        average: the kind of moving average that `ema_decay` asks for.
    """

    unit: str
    average: type[NoAverage] = ModelCopy

    def __init__(self, config: TrainConfig) -> None:
        self.config: Any = config

    ####################################################################################################################
    # What a task is
    ####################################################################################################################
    @property
    def base(self) -> str | None:
        """The folder of the stock checkpoint that frozen parameters come from; None if they come from none."""
        return None

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the current default device; on `meta` for counting memory and FLOPs before and after."""

    @abstractmethod
    def open_data(self) -> Splits:
        """The loaders, prepared for the processes of `self.accelerator`."""

    @abstractmethod
    def first_of(self, batch: Any) -> Any:
        """A few samples of a batch, for the diagnostics."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, micro_step: int) -> Tensor:
        """The loss of one micro-batch, a scalar. Global random numbers are seeded by (seed, micro-step, rank)."""

    @abstractmethod
    def score(self, model: nn.Module, split: Split) -> Scores:
        """Scores of a model on a split, `loss` among them; all processes call it and get the same."""

    @abstractmethod
    def describe(self, scores: Scores, split: Split) -> str:
        """The scores, on a line that names the split."""

    @abstractmethod
    def probe_loss(self, model: nn.Module) -> Tensor:
        """The loss on `self.probe`, for the depth weights."""

    def profile_loss(self, model: nn.Module) -> Tensor:
        """The loss on `self.probe`, for the gradients along the depth."""
        return self.probe_loss(model)

    @abstractmethod
    def forward_one(self, model: nn.Module) -> object:
        """Run a model that is on `meta` on one sample, for counting FLOPs."""

    @abstractmethod
    def save(self, model: nn.Module, run_dir: Path) -> None:
        """Save what has been trained."""

    @abstractmethod
    def final(self, start: dict[str, Any], val: Scores, test: Scores) -> dict[str, Any]:
        """The scores as fields of `result.json`, `val_loss` and `test_loss` among them.

        What depends on a split says so in its name. Reports choose by `val_*` and show `test_*`.
        """

    @abstractmethod
    def random_step(
        self, batch: int, device: torch.device
    ) -> tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor]]:
        """On `batch` random samples: the model's forward, and the loss of what it returns."""

    ####################################################################################################################
    # What all tasks do
    ####################################################################################################################
    def make_loader(self, accelerator: Accelerator) -> Any:
        """Open the data; returns the loader of training micro-batches, what is held out stays here."""
        self.accelerator = accelerator
        loaders = self.open_data()
        self.held_out = {"val": loaders.val, "test": loaders.test}
        self.probe = self.first_of(next(iter(loaders.val)))
        return loaders.train

    def start(self, model: nn.Module) -> dict[str, Any]:
        """Numbers about the untrained model, as JSON values; `result` gets them back."""
        return {"profile": self.profile(model)}

    def evaluate(self, model: nn.Module, average: NoAverage, split: Split) -> Scores:
        """Scores of the moving average, or of the model where there is none."""
        with average.weights(model) as evaluated:
            return self.score(evaluated, split)

    def profile(self, model: nn.Module) -> list[dict[str, Any]]:
        return depth_profile(model, lambda: self.profile_loss(model)) if self.config.profile else []

    def finish(self, model: nn.Module, average: NoAverage, run_dir: Path) -> dict[str, Any]:
        """What only the trained model can say; all processes call it. The main one saves the weights."""
        profile = self.profile(model)
        with average.weights(model) as evaluated:
            if self.accelerator.is_main_process:
                self.save(evaluated, run_dir)
            weights = depth_weights(evaluated, lambda: self.probe_loss(evaluated)) if self.config.profile else []
            return {"profile": profile, "depth_weights": weights, **self.look(evaluated, run_dir)}

    def look(self, model: nn.Module, run_dir: Path) -> dict[str, Any]:
        """Further fields of `result.json` that take the trained model; all processes call it."""
        return {}

    def result(self, start: dict[str, Any], val: Scores, test: Scores, ending: dict[str, Any]) -> dict[str, Any]:
        """The task's own fields of `result.json`, on the main process; the arguments are what the others returned."""
        return {
            **self.final(start, val, test),
            "gflops": forward_gflops(self.build_model, self.forward_one),
            **ending,
            "profile": {"start": start.get("profile", []), "end": ending["profile"]},
        }

    @property
    def speed_batch(self) -> int:
        """Samples that one process sees at once."""
        parts = self.config.grad_accumulation * int(os.environ.get("WORLD_SIZE", 1))
        return max(1, self.config.data.batch_size // parts)

    def speed_step(self) -> Callable[[], None]:
        """One training step (forward, backward, update) on random samples of one process's micro-batch."""
        config, device = self.config, self.config.device
        model = self.build_model().to(device).train()
        optimizer = make_optimizer(model, config.optim)
        forward, loss = self.random_step(self.speed_batch, device)
        called = torch.compile(model) if config.model.compile else model

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16"):
                output = forward(called)
            loss(output).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
