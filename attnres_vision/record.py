"""record_depth_weights: what the readers of a model attend to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnres_vision.attach import readers
from attnres_vision.reader import DepthAttention
from attnres_vision.stream import DepthStream


class DepthWeights:
    """The depth weights of the forward passes that ran under `record_depth_weights`.

    Attributes:
        per_token: reader name to one tensor (n, B, T, heads) per forward pass, on the CPU; only filled on request.
    """

    def __init__(self) -> None:
        self.per_token: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}

    def mean(self, per_head: bool = False) -> dict[str, Tensor]:
        """Per reader, in depth order, the mean weight of each source: (n,), or (n, heads) with `per_head`."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        return means if per_head else {name: mean.mean(-1) for name, mean in means.items()}

    def source_names(self) -> dict[str, list[str]]:
        """Per reader the names of its sources: "embedding", "block 1", ..., "block 3 (open)"."""
        return dict(self._names)

    def _add(self, name: str, weights: Tensor, sources: list[str], keep: bool) -> None:
        tokens = weights.flatten(1, -2)  # (n, tokens, heads)
        total = tokens.sum(1).cpu()
        if name in self._sums:
            total += self._sums[name]
        self._sums[name] = total
        self._counts[name] = self._counts.get(name, 0) + tokens.shape[1]
        self._names[name] = sources
        if keep:
            self.per_token.setdefault(name, []).append(weights.cpu())


@contextlib.contextmanager
def record_depth_weights(model: nn.Module, per_token: bool = False) -> Iterator[DepthWeights]:
    """Record the depth weights of every forward pass inside the `with` block.

        with record_depth_weights(model) as record:
            model(images)
        record.mean()["blocks.3.norm2"]  # (n,), sums to one

    The weights are computed once more for the record, so nothing changes for the model. Not for compiled models.

    Args:
        model: an attached model.
        per_token: also keep the weights of every sample and token (large: n * B * T * heads numbers per reader).

    Raises:
        ValueError: the model has no readers.
    """
    named = readers(model)
    if not named:
        raise ValueError(f"model must be attached (attnres_vision.attach), got a plain {type(model).__name__}")
    record = DepthWeights()
    names = {reader: name for name, reader in named.items()}

    @torch.no_grad()
    def hook(reader: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(reader, DepthAttention)
        stream = args[0].channels_last()
        if reader.query is not None:
            record._add(names[reader], reader.weights(stream), _source_names(stream, reader), per_token)

    handles = [reader.register_forward_hook(hook) for reader in named.values()]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _source_names(stream: DepthStream, reader: DepthAttention) -> list[str]:
    names = ["embedding", *(f"block {index}" for index in range(1, len(stream.sources())))]
    if stream.partial is not None and not reader.opens_block:
        names[-1] += " (open)"
    return names
