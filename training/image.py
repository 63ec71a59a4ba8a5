"""Train a timm classifier with standard residuals or Attention Residuals.

    accelerate launch training/image.py --config configs/image/imagenet_vit_s16.yaml --variant block --data.root DIR
    python -m training.image --config FILE --optim.lr 1e-3

The loop is `training/trainer.py`; here is what it trains: data, model, loss and evaluation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    if not __package__:  # run as a file: modules are found from the repository, not from here
        sys.path[0] = str(Path(__file__).resolve().parents[1])
    from training.processes import end_with_parent

    end_with_parent()  # before the slow imports

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from timm.loss import BinaryCrossEntropy
from torch import nn

import attnres_vision
from training import data, loop, measure, processes, trainer
from training.average import ModelCopy, NoAverage
from training.config import ImageConfig
from training.config_io import load_config
from training.diagnostics import depth_profile, depth_weights

PROFILE_IMAGES = 64


def train(config: ImageConfig) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    return trainer.train(ImageTask(config))


class ImageTask:
    """Image classification, a `trainer.Task`."""

    unit = "images"
    average: type[NoAverage] = ModelCopy
    base = None  # nothing but queries is ever frozen

    def __init__(self, config: ImageConfig) -> None:
        self.config = config

    def make_loader(self, accelerator: Accelerator, parts: int) -> Any:
        self.accelerator = accelerator
        loaders = data.make_loaders(accelerator, self.config.data, self.config.seed, parts)
        self.held_out = {"val": loaders.val, "test": loaders.test}
        self.mixup, self.criterion = data.make_mixup(self.config.data), make_criterion(self.config)
        self.probe = tuple(part[:PROFILE_IMAGES] for part in next(iter(loaders.val)))
        return loaders.train

    def build_model(self) -> nn.Module:
        return build_model(self.config)

    def start(self, model: nn.Module) -> dict[str, Any]:
        return {"profile": self.profile(model)}

    def loss(self, model: nn.Module, batch: Any, micro_step: int) -> torch.Tensor:
        images, targets = batch
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
        with self.accelerator.autocast():
            logits = model(images)
        return self.criterion(logits.float(), targets)

    def evaluate(self, model: nn.Module, average: NoAverage, split: Literal["val", "test"]) -> dict[str, float]:
        with average.weights(model) as evaluated:
            return evaluate(self.accelerator, evaluated, self.held_out[split])

    def describe(self, scores: dict[str, float], split: Literal["val", "test"]) -> str:
        return f"{split} loss {scores['loss']:.4f}, {split} top-1 {100 * scores['top1']:.2f} %"

    def finish(self, model: nn.Module, average: NoAverage, run_dir: Path) -> dict[str, Any]:
        profile = self.profile(model)
        with average.weights(model) as evaluated:
            weights = depth_weights(evaluated, lambda: self.probe_loss(evaluated)) if self.config.profile else []
            if self.accelerator.is_main_process:
                safetensors.torch.save_model(evaluated, str(run_dir / "weights.safetensors"))
        return {"profile": profile, "depth_weights": weights}

    def result(
        self, start: dict[str, Any], val: dict[str, Any], test: dict[str, Any], ending: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "val_loss": val["loss"],
            "val_top1": val["top1"],
            "test_loss": test["loss"],
            "test_top1": test["top1"],
            "gflops": measure.forward_gflops(self.build_model, lambda m: m(torch.empty(1, *self.probe[0].shape[1:]))),
            "profile": {"start": start.get("profile", []), "end": ending["profile"]},
            "depth_weights": ending["depth_weights"],
        }

    def profile(self, model: nn.Module) -> list[dict[str, Any]]:
        return depth_profile(model, lambda: self.probe_loss(model)) if self.config.profile else []

    def probe_loss(self, model: nn.Module) -> torch.Tensor:
        """The loss on a fixed batch, for the profiles."""
        with self.accelerator.autocast():
            logits = model(self.probe[0])
        return F.cross_entropy(logits.float(), self.probe[1])


def build_model(config: ImageConfig) -> nn.Module:
    """The timm model of the config, with Attention Residuals attached if it says so.

    AttnRes variants draw no random number before the standard model is made: all variants start from the same weights.
    """
    chosen = config.model
    model: Any = timm.create_model(chosen.name, num_classes=config.data.num_classes, **chosen.kwargs)
    if chosen.residual == "attnres":
        model = attnres_vision.attach(model, chosen.attnres)
    if chosen.freeze_queries:
        for name, parameter in model.named_parameters():
            if ".depth." in name:
                parameter.requires_grad_(False)
    if chosen.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def make_criterion(config: ImageConfig) -> nn.Module:
    """Loss of the training step. With mixup the targets are already soft, and smoothed."""
    smoothing = 0.0 if config.data.mixes else config.data.label_smoothing
    if config.loss == "bce":
        return BinaryCrossEntropy(smoothing=smoothing)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Mean cross entropy and top-1 accuracy over a whole split, every image once."""
    was_training = model.training
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    stream = isinstance(loader, data.StreamLoader)
    for images, targets in loader:
        with accelerator.autocast():
            logits = model(images)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        scores = torch.stack([losses, (logits.argmax(-1) == targets).float(), torch.ones_like(losses)], dim=1)
        # drops the images that were handed out twice to fill the last batch; the shares of a stream are disjoint
        scores = scores if stream else accelerator.gather_for_metrics(scores)
        total += scores.double().sum(0)
    if stream:
        total = accelerator.reduce(total, "sum")
    model.train(was_training)
    loss, correct, count = total.tolist()
    return {"loss": loss / count, "top1": correct / count}


def speed_step(config: ImageConfig) -> Callable[[], object]:
    """One training step (forward, backward, update) on random images of one process's micro-batch, for rating speed."""
    device = torch.device("cuda" if torch.cuda.is_available() and not config.cpu else "cpu")
    model: Any = build_model(config).to(device).train()
    optimizer = trainer.make_optimizer(model, config.optim)
    channels = config.model.kwargs.get("in_chans", 3)
    batch = speed_batch(config)
    images = torch.randn(batch, channels, config.data.input_size, config.data.input_size, device=device)
    targets = torch.randint(config.data.num_classes, (batch,), device=device)
    model = torch.compile(model) if config.model.compile else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16"):
            logits = model(images)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed_batch(config: ImageConfig) -> int:
    """Images that one process sees at once."""
    return max(1, config.data.batch_size // (config.grad_accumulation * int(os.environ.get("WORLD_SIZE", 1))))


def main(argv: list[str] | None = None) -> None:
    config = load_config(ImageConfig, argv)
    with processes.stoppable(lambda: loop.how_to_go_on(config)):
        train(config)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
