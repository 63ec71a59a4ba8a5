"""record_depth_weights: what the readers of a model attend to."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnres_vision.attach.attach import hosts, readers
from attnres_vision.stream.reader import DepthAttention
from attnres_vision.stream.stream import DepthStream


class DepthWeights:
    """The depth weights of the forward passes that ran under `record_depth_weights`.

    Attributes:
        per_token: reader name to one tensor (n, B, T, heads) per forward pass, on the CPU; only filled on request.
        timesteps: for diffusion models the timestep of every sample of every forward pass, (samples,); else None.
    """

    def __init__(self, streams: dict[str, str]) -> None:
        self.per_token: dict[str, list[Tensor]] = {}
        self.timesteps: Tensor | None = None
        self._streams = streams  # of all readers, in depth order
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}
        self._samples: dict[str, list[Tensor]] = {}

    def mean(self, per_head: bool = False, stream: str | None = None) -> dict[str, Tensor]:
        """Per reader, in depth order, the mean weight of each source: (n,), or (n, heads) with `per_head`.

        With `stream`, of its readers alone: "image", "text" or "joint" in the models of `dit`.
        """
        recorded = [name for name in self._streams if name in self._sums]
        means = {
            name: self._sums[name] / self._counts[name]
            for name in recorded
            if stream is None or self._streams[name] == stream
        }
        return means if per_head else {name: mean.mean(-1) for name, mean in means.items()}

    def per_sample(self) -> dict[str, Tensor]:
        """Per reader, in depth order, the mean over tokens and heads for every sample of every pass: (samples, n)."""
        return {name: torch.cat(self._samples[name]) for name in self._streams if name in self._samples}

    def by_timestep(self) -> dict[str, dict[float, Tensor]]:
        """Per reader and timestep the mean weight of each source, (n,); timesteps fall, as in sampling.

        Raises:
            ValueError: the model has no timestep.
        """
        if self.timesteps is None:
            raise ValueError("by_timestep is for diffusion models, whose forward has an argument `timestep`")
        known = sorted(set(self.timesteps.tolist()), reverse=True)
        return {
            name: {step: weights[self.timesteps == step].mean(0) for step in known}
            for name, weights in self.per_sample().items()
        }

    def source_names(self) -> dict[str, list[str]]:
        """Per reader the names of its sources: "embedding", "block 1", ..., "block 3 (open)"."""
        return {name: self._names[name] for name in self._streams if name in self._names}

    def _add(self, name: str, weights: Tensor, sources: list[str], keep: bool) -> None:
        tokens = weights.flatten(1, -2)  # (n, tokens, heads)
        total = tokens.sum(1).cpu()
        if name in self._sums:
            total += self._sums[name]
        self._sums[name] = total
        self._counts[name] = self._counts.get(name, 0) + tokens.shape[1]
        self._names[name] = sources
        self._samples.setdefault(name, []).append(weights.flatten(2).mean(2).T.cpu())
        if keep:
            self.per_token.setdefault(name, []).append(weights.cpu())


@contextlib.contextmanager
def record_depth_weights(model: nn.Module, per_token: bool = False) -> Iterator[DepthWeights]:
    """Record the depth weights of every forward pass inside the `with` block.

        with record_depth_weights(model) as record:
            model(images)
        record.mean()["blocks.3.norm2"]  # (n,), sums to one

    The weights are computed once more for the record, so nothing changes for the model. Not for compiled models.
    Inside a diffusion pipeline every denoising step is a forward pass: `record.by_timestep()` tells them apart.

    Args:
        model: an attached model.
        per_token: also keep the weights of every sample and token (large: n * B * T * heads numbers per reader).

    Raises:
        ValueError: the model has no readers.
    """
    named = readers(model)
    if not named:
        raise ValueError(f"model must be attached (attnres_vision.attach), got a plain {type(model).__name__}")
    record = DepthWeights({name: reader.stream for name, reader in named.items()})
    names = {reader: name for name, reader in named.items()}

    @torch.no_grad()
    def hook(reader: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(reader, DepthAttention)
        stream = args[0].channels_last()
        if reader.query is not None:
            record._add(names[reader], reader.weights(stream), _source_names(stream, reader), per_token)

    def look_at_timestep(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(host.forward).bind_partial(*args, **kwargs).arguments
        step = torch.as_tensor(given["timestep"]).detach().float().cpu()
        batch = given["hidden_states"].shape[0]
        # One per token (image-to-video) counts as the latest: the given frames have timestep 0.
        step = step.reshape(step.shape[0] if step.ndim else 1, -1).amax(1).expand(batch)
        record.timesteps = step if record.timesteps is None else torch.cat([record.timesteps, step])

    handles = [reader.register_forward_hook(hook) for reader in named.values()]
    for _, host in hosts(model):
        if "timestep" in inspect.signature(host.forward).parameters:
            handles.append(host.register_forward_pre_hook(look_at_timestep, with_kwargs=True))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _source_names(stream: DepthStream, reader: DepthAttention) -> list[str]:
    names = ["embedding", *(f"block {index}" for index in range(1, len(stream.sources())))]
    if stream.open_block is not None and not reader.opens_block:
        names[-1] += " (open)"
    return names
