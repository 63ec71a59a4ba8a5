"""Moving averages of the weights, behind one small interface: the training loop does not know which one runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from timm.utils import ModelEmaV3
from torch import nn


class NoAverage:
    """No moving average: what is evaluated are the weights themselves."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    @contextmanager
    def weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model to evaluate."""
        yield model

    def update(self, model: nn.Module, step: int) -> None:
        """After the update `step` (counted from 0)."""

    @staticmethod
    def averaged(model: nn.Module) -> list[Any]:
        """The tensors of the model that it holds an average of."""
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ModelCopy(NoAverage):
    """timm's `ModelEmaV3`: a second model, with buffers averaged too. Make it before `accelerator.prepare`.

    `prepare` ties the forward of a bf16 model to that very object: a later copy would run its weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.ema = ModelEmaV3(model, decay=decay, use_warmup=True)

    def __bool__(self) -> bool:
        return True

    @contextmanager
    def weights(self, model: nn.Module) -> Iterator[nn.Module]:
        yield self.ema.module

    def update(self, model: nn.Module, step: int) -> None:
        self.ema.update(model, step=step)

    @staticmethod
    def averaged(model: nn.Module) -> list[Any]:
        return [*model.parameters(), *model.buffers()]

    def state_dict(self) -> dict[str, Any]:
        return self.ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ema.load_state_dict(state)


class TrainedParameters(NoAverage):
    """diffusers' `EMAModel` over the parameters that are trained, which trade places with the model's for evaluation.

    Costs the memory of the trained parameters only: little for depth parameters and LoRA on a large model.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        from diffusers.training_utils import EMAModel  # slow to import, and images do without

        self.ema = EMAModel(self.averaged(model), decay=decay, foreach=True)

    def __bool__(self) -> bool:
        return True

    @staticmethod
    def averaged(model: nn.Module) -> list[Any]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    @contextmanager
    def weights(self, model: nn.Module) -> Iterator[nn.Module]:
        self.ema.store(self.averaged(model))
        self.ema.copy_to(self.averaged(model))
        try:
            yield model
        finally:
            self.ema.restore(self.averaged(model))

    def update(self, model: nn.Module, step: int) -> None:
        self.ema.step(self.averaged(model))

    def state_dict(self) -> dict[str, Any]:
        return self.ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.ema.shadow_params[0].device
        self.ema.load_state_dict(state)
        self.ema.to(device=device)
