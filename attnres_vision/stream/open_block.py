"""OpenBlock: the block that layers are adding to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops.two_phase import Earlier
from attnres_vision.stream import in_place


class Boundary:
    """Whether a reader has opened the next block: one for all streams that are the same one for the host."""

    def __init__(self, closed: bool = False) -> None:
        self.closed = closed


@dataclasses.dataclass(eq=False)
class OpenBlock:
    """The running sum of the open block, and what its readers leave for the next write.

    A stream shares it with its casts: what a reader of one leaves is there for all of them.

    Attributes:
        total: the sum of the block's outputs, without `pending`.
        pending: an output still to be added, which the next reader's kernel does on its way.
        dtype: what the sum with `pending` is made in.
        boundary: closed once a reader has opened the next block: the next output starts a new sum. The sources are the
            same before and after, so a reader may close a block any number of times (recomputation does).
        found: what a reader of the closed block has read for readers to come (two_phase.py), until the next write takes
            it: if it stayed, the arguments of a checkpoint would be in a cycle with the graph, and the recomputation
            would find it.
    """

    total: Tensor
    pending: Tensor | None = None
    dtype: torch.dtype | None = None
    boundary: Boundary | None = None
    found: Mapping[object, Earlier] | None = None

    def __post_init__(self) -> None:
        if self.boundary is None:  # dynamo traces no default_factory
            self.boundary = Boundary()
        # No field: what rebuilds a dataclass from its fields (FSDP2's casts) has put other tensors into them
        self._versions = tuple(map(in_place.version, self._held()))

    @property
    def closed(self) -> bool:
        return self.boundary is not None and self.boundary.closed

    def close(self) -> None:
        """End the block, for all streams that share its boundary."""
        assert self.boundary is not None
        self.boundary.closed = True

    def __reduce__(self) -> Any:
        # What was found is for the readers of this block's own model, and a copy's tensors count their changes anew
        return OpenBlock, (self.settle(), None, None, Boundary(self.closed))

    def _held(self) -> tuple[Tensor, ...]:
        return (self.total,) if self.pending is None else (self.total, self.pending)

    @property
    def is_changed(self) -> bool:
        """Whether the host has changed in place what is held here."""
        return any(map(in_place.is_changed, self._held(), self._versions))

    def settle(self, total: Tensor | None = None) -> Tensor:
        """The sum with what was pending; `total` is that where a kernel has made it."""
        if self.pending is not None:
            self.total, self.pending = self._sum(self.pending) if total is None else total, None
            self._versions = (in_place.version(self.total),)
        return self.total

    def _sum(self, pending: Tensor) -> Tensor:
        if self.hides_gradient(pending):
            with torch.inference_mode(False), torch.enable_grad():
                return self.total.to(self.dtype) + pending
        return self.total.to(self.dtype) + pending

    def hides_gradient(self, delta: Tensor) -> bool:
        """Whether the sum with `delta` has a gradient that what runs now does not see: a hook, under no_grad."""
        return not torch.is_grad_enabled() and (self.total.requires_grad or delta.requires_grad)
