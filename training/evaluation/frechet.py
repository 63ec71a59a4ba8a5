"""The Frechet distance between real and generated clips, with torchmetrics and any extractor of features.

FVD is this distance with the features of an I3D network; its weights are in no package, so an extractor is a local file
or a function of yours. Without one, a small random network stands in: it sees gross differences and is good for nothing
else, and its numbers are labelled so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.system.streams import generator_for

RANDOM = "fixed random network, not comparable with FVD"


class RandomFeatures(nn.Module):
    """Four strided 3-D convolutions with fixed random weights, for clips of any size and 1 or 3 channels.

    It is given the frames and their differences to the next frame, without which random filters hardly see motion. The
    features are the mean and the standard deviation over the clip of every channel of the last layer.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.num_features = 2 * width
        generator = generator_for("random-features")
        for index, channels in enumerate((6, width, width, width)):
            weight = torch.randn(width, channels, 3, 3, 3, generator=generator) * (2 / (27 * channels)) ** 0.5
            self.register_buffer(f"weight_{index}", weight)

    def forward(self, clips: Tensor) -> Tensor:
        """Features (B, 2 * width) of clips (B, C, F, H, W)."""
        clips = clips.expand(-1, 3, -1, -1, -1)
        hidden = torch.cat([clips, torch.diff(clips, dim=2, append=clips[:, :, -1:])], dim=1)
        for index in range(4):
            stride = (1, 1, 1) if index == 0 else (1, 2, 2)
            hidden = nn.functional.conv3d(hidden, self.get_buffer(f"weight_{index}"), stride=stride, padding=1)
            hidden = nn.functional.leaky_relu(hidden, 0.2)
        hidden = hidden.flatten(2)
        return torch.cat([hidden.mean(-1), hidden.std(-1, correction=0)], dim=1)


def load_extractor(source: str | Path | None) -> tuple[nn.Module, str]:
    """The extractor and what a report calls it.

    Args:
        source: None is the random network; a path that ends in `.pt`, `.pth`, `.jit` or `.ts` is a TorchScript file;
            `"package.module:name"` is an `nn.Module`, or a function or class that makes one when called without
            arguments. It maps clips (B, C, F, H, W) in [-1, 1] to features (B, n). If it has an attribute `input_size`,
            an integer side or (frames, height, width), clips are resized to it first.

    Raises:
        ValueError: there is no such file or module, or it is not what it should be.
    """
    if source is None:
        return RandomFeatures().eval(), RANDOM
    text = str(source)
    if text.endswith((".pt", ".pth", ".jit", ".ts")):
        if not Path(text).is_file():
            raise ValueError(f"extractor: there is no file {text}")
        try:
            return torch.jit.load(text, map_location="cpu").eval(), text
        except RuntimeError as error:
            raise ValueError(f"extractor must be a TorchScript file, {text} is none: {error}") from error
    module, colon, name = text.partition(":")
    if not colon:
        raise ValueError(f"extractor must be a TorchScript file (.pt) or 'package.module:name', got {text!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"extractor {text!r} cannot be imported: {error}") from error
    made = found if isinstance(found, nn.Module) else found()
    if not isinstance(made, nn.Module):
        raise ValueError(f"extractor {text!r} must be or make an nn.Module, got {type(made).__name__}")
    return made.eval(), text


class FrechetDistance:
    """The distance between two sets of clips, given in batches.

        distance = FrechetDistance()
        distance.update(real_clips, real=True)
        distance.update(generated_clips, real=False)
        distance.result()  # {"value": 1.23, "extractor": "...", "real": 64, "generated": 64}

    It is that of the clips given in this process: where several processes train, one gets all clips.
    It is biased upwards by few clips and more so by many features: only sets of equal sizes compare, and a covariance
    of n features needs well over n clips.

    Args:
        extractor: see `load_extractor`.
        device: where features are computed.
    """

    def __init__(self, extractor: str | Path | None = None, device: torch.device | str = "cpu") -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance  # slow to import, and only this needs it

        network, self.name = load_extractor(extractor)
        self.network = _Features(network.to(device))
        self._metric_class = FrechetInceptionDistance
        self._metric: Any = None

    @torch.no_grad()
    def update(self, clips: Tensor, real: bool) -> None:
        """Add clips (B, C, F, H, W) in [-1, 1] to the real or to the generated ones.

        Raises:
            ValueError: the clips have another shape, or values far outside of [-1, 1], or the extractor's output is
                not (B, n).
        """
        if clips.ndim != 5 or clips.shape[1] not in (1, 3):
            raise ValueError(f"clips must be (B, C, F, H, W) with 1 or 3 channels, got shape {tuple(clips.shape)}")
        if not bool(clips.abs().max() <= 1.01):  # also true for nan
            raise ValueError(f"clips must have values in [-1, 1], got up to {clips.abs().max().item():.4g}")
        if self._metric is None:
            self.network.num_features = self.network(clips[:1]).shape[1]
            self._metric = self._metric_class(feature=self.network, normalize=True, sync_on_compute=False)
            self._metric.to(clips.device)
        self._metric.update(clips, real=real)

    def result(self) -> dict[str, Any]:
        """Value, name of the extractor and numbers of clips.

        Raises:
            ValueError: fewer than two clips on either side.
        """
        counts = [int(getattr(self._metric, f"{side}_features_num_samples", 0)) for side in ("real", "fake")]
        if min(counts) < 2:
            raise ValueError(f"there must be at least 2 real and 2 generated clips, got {counts[0]} and {counts[1]}")
        value = float(self._metric.compute())
        # rounding leaves equal sets a little off zero, to either side
        return {"value": max(0.0, value), "extractor": self.name, "real": counts[0], "generated": counts[1]}


def frechet_distance(
    real: Iterable[Tensor], generated: Iterable[Tensor], extractor: str | Path | None = None
) -> dict[str, Any]:
    """`FrechetDistance` of two iterables of batches (B, C, F, H, W) in [-1, 1]."""
    distance = FrechetDistance(extractor)
    for clips in real:
        distance.update(clips, real=True)
    for clips in generated:
        distance.update(clips, real=False)
    return distance.result()


class _Features(nn.Module):
    """The extractor as torchmetrics takes one: clips in the size it asks for, (B, n) in float64 back."""

    num_features: int

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, clips: Tensor) -> Tensor:
        weight = next(self.network.parameters(), next(self.network.buffers(), clips))
        clips = clips.float().to(weight.device)
        size: Any = getattr(self.network, "input_size", None)
        if size is not None:
            size = (clips.shape[2], size, size) if isinstance(size, int) else tuple(size)
            clips = nn.functional.interpolate(clips, size=size, mode="trilinear", align_corners=False)
        features = self.network(clips)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(clips):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(f"the extractor must return features ({len(clips)}, n), got {shape}")
        return features.double()
