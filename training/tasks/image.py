"""Image classification: a timm classifier with standard residuals or Attention Residuals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

import attnres_vision
from training.config.image import ImageConfig
from training.data.images import make_datasets, make_mixup
from training.data.loaders import Splits, StreamLoader, make_loaders
from training.loop import trainer
from training.loop.optim import depth_parameters
from training.loop.task import Scores, Split, Task

PROFILE_IMAGES = 64


def train(config: ImageConfig) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    return trainer.train(ImageTask(config))


class ImageTask(Task):
    """Cross entropy and top-1 accuracy of `ImageConfig.model` on `ImageConfig.data`."""

    unit = "images"
    config: ImageConfig

    def build_model(self) -> nn.Module:
        return build_model(self.config)

    def open_data(self) -> Splits:
        config = self.config
        self.mixup, self.criterion = make_mixup(config.data), make_criterion(config)
        sets = make_datasets(config.data, config.seed)
        return make_loaders(self.accelerator, sets, config.data, config.grad_accumulation)

    def first_of(self, batch: Any) -> Any:
        return tuple(part[:PROFILE_IMAGES] for part in batch)

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        with self.accelerator.autocast():
            logits = model(images)
        return logits.float()

    def loss(self, model: nn.Module, batch: Any, micro_step: int) -> Tensor:
        images, targets = batch if self.mixup is None else self.mixup(*batch)
        return self.criterion(self.logits(model, images), targets)

    def probe_loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(self.logits(model, self.probe[0]), self.probe[1])

    @torch.no_grad()
    def score(self, model: nn.Module, split: Split) -> Scores:
        """Mean cross entropy and top-1 accuracy, every image once."""
        was_training = model.training
        model.eval()
        loader = self.held_out[split]
        total = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        stream = isinstance(loader, StreamLoader)
        for images, targets in loader:
            logits = self.logits(model, images)
            losses = F.cross_entropy(logits, targets, reduction="none")
            scores = torch.stack([losses, (logits.argmax(-1) == targets).float(), torch.ones_like(losses)], dim=1)
            # drops the images that were handed out twice to fill the last batch; the shares of a stream are disjoint
            scores = scores if stream else self.accelerator.gather_for_metrics(scores)
            total += scores.double().sum(0)
        if stream:
            total = self.accelerator.reduce(total, "sum")
        model.train(was_training)
        loss, correct, count = total.tolist()
        return {"loss": loss / count, "top1": correct / count}

    def describe(self, scores: Scores, split: Split) -> str:
        return f"{split} loss {scores['loss']:.4f}, {split} top-1 {100 * scores['top1']:.2f} %"

    def forward_one(self, model: nn.Module) -> object:
        return model(torch.empty(1, *self.probe[0].shape[1:]))

    def save(self, model: nn.Module, run_dir: Path) -> None:
        safetensors.torch.save_model(model, str(run_dir / "weights.safetensors"))

    def final(self, start: dict[str, Any], val: Scores, test: Scores) -> dict[str, Any]:
        scores = (("val", val), ("test", test))
        return {f"{split}_{name}": of_split[name] for split, of_split in scores for name in ("loss", "top1")}

    def random_step(
        self, batch: int, device: torch.device
    ) -> tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor]]:
        data, channels = self.config.data, self.config.model.kwargs.get("in_chans", 3)
        images = torch.randn(batch, channels, data.input_size, data.input_size, device=device)
        targets = torch.randint(data.num_classes, (batch,), device=device)
        return lambda model: model(images), lambda logits: F.cross_entropy(logits.float(), targets)


def build_model(config: ImageConfig) -> nn.Module:
    """The timm model of the config, with Attention Residuals attached if it says so.

    AttnRes variants draw no random number before the standard model is made: all variants start from the same weights.
    """
    chosen = config.model
    model: Any = timm.create_model(chosen.name, num_classes=config.data.num_classes, **chosen.kwargs)
    if chosen.residual == "attnres":
        model = attnres_vision.attach(model, chosen.attnres)
    if chosen.freeze_queries:
        for parameter in depth_parameters(model):
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


TASK = ImageTask  # what `training.compare` trains for `task: image`
