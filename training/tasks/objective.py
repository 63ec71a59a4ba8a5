"""Diffusion objectives: noise, targets and the sampling loop, over diffusers' own schedulers.

A noise level is an index into the scheduler's training schedule of 1000 levels, 0 the noisiest for rectified flow. The
shift of the levels is one number, `ObjectiveConfig.shift`, that training and sampling get from here. Clips are
(B, C, F, H, W), levels and timesteps (B,).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor

from training.config.video import ObjectiveConfig

LEVELS = 1000
Predict = Callable[[Tensor, Tensor], Tensor]


class Objective(ABC):
    """Noise and targets at the levels of a scheduler, and sampling with it.

    Args:
        scheduler: of diffusers, with `LEVELS` levels.
        sigmas: the share of noise at each level, in 0..1.
    """

    def __init__(self, scheduler: Any, sigmas: Tensor) -> None:
        self.scheduler, self.sigmas = scheduler, sigmas

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Tensor:
        """A level to train at, (1,) int64, on the generator's device."""

    @abstractmethod
    def timestep(self, level: Tensor) -> Tensor:
        """What the model is told, (B,) in 0..1000."""

    @abstractmethod
    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """The clip at a level of noise."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """What the model should predict."""

    @abstractmethod
    def weight(self, level: Tensor) -> Tensor:
        """Factor on the squared error in training, (B,)."""

    @abstractmethod
    def set_timesteps(self, steps: int, device: torch.device) -> None:
        """Tell the scheduler how many steps sampling takes."""

    def levels(self, sigmas: Tensor) -> Tensor:
        """The levels nearest to noise levels (B,) in 0..1."""
        return (self.sigmas.to(sigmas.device)[:, None] - sigmas).abs().argmin(0)

    def sigma(self, level: Tensor) -> Tensor:
        """The share of noise at levels (B,), in 0..1."""
        return self.sigmas.to(level.device)[level]

    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """Clips from noise, with the stock scheduler.

        Args:
            predict: the model's prediction from (noisy clips, timestep (B,)), with guidance, if any, already in it.
            noise: where it starts.
            steps: of the scheduler.
        """
        self.set_timesteps(steps, noise.device)
        sample = noise.float()
        for timestep in self.scheduler.timesteps:
            prediction = predict(sample.to(noise.dtype), timestep.expand(len(noise)))
            sample = self.scheduler.step(prediction.float(), timestep, sample, return_dict=False)[0].float()
        return sample.to(noise.dtype)


def make_objective(config: ObjectiveConfig) -> Objective:
    return Flow(config) if config.kind == "flow" else Velocity(config)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of every clip, (B,), in fp32."""
    return (prediction.float() - target.float()).square().flatten(1).mean(1)


class Flow(Objective):
    """Rectified flow: on the straight line from the clip to noise, the model predicts `noise - clean`."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        scheduler: Any = FlowMatchEulerDiscreteScheduler(num_train_timesteps=LEVELS, shift=config.shift)
        super().__init__(scheduler, scheduler.sigmas.clone())

    def draw(self, generator: torch.Generator) -> Tensor:
        config = self.config
        u = compute_density_for_timestep_sampling(
            "none" if config.timesteps == "uniform" else config.timesteps,
            1,
            config.logit_mean,
            config.logit_std,
            config.mode_scale,
            generator.device,
            generator,
        )
        return (u * LEVELS).long().clamp(0, LEVELS - 1)

    def timestep(self, level: Tensor) -> Tensor:
        return self.sigma(level) * LEVELS

    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        sigma = self.sigma(level).to(clean.dtype).view(-1, *[1] * (clean.ndim - 1))
        return (1 - sigma) * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return noise - clean

    def weight(self, level: Tensor) -> Tensor:
        return compute_loss_weighting_for_sd3(self.config.weighting, self.sigma(level))

    def set_timesteps(self, steps: int, device: torch.device) -> None:
        # Sigmas are given, as HunyuanVideo's pipeline does: those that the scheduler would choose are shifted twice.
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1].tolist(), device=device)


class Velocity(Objective):
    """v-prediction with CogVideoX's schedule.

    CogVideoX's training weighs the squared error of the clip by 1 / (1 - alphas_cumprod); that is the plain squared
    error of the velocity, for the clip is `sqrt(a) noisy - sqrt(1 - a) velocity`.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        scheduler: Any = CogVideoXDDIMScheduler(
            num_train_timesteps=LEVELS,
            beta_start=0.00085,
            beta_end=0.0120,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=True,
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            rescale_betas_zero_snr=True,
            snr_shift_scale=config.shift,
        )
        super().__init__(scheduler, (1 - scheduler.alphas_cumprod).sqrt().float())

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, LEVELS, (1,), generator=generator, device=generator.device)

    def timestep(self, level: Tensor) -> Tensor:
        return level

    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return self.scheduler.add_noise(clean, noise, level).to(clean.dtype)

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return self.scheduler.get_velocity(clean, noise, level)

    def weight(self, level: Tensor) -> Tensor:
        return torch.ones_like(self.sigma(level))

    def set_timesteps(self, steps: int, device: torch.device) -> None:
        self.scheduler.set_timesteps(steps, device=device)
