"""How tensors are handed to the kernels: as rows (samples, tokens, D) with free strides but for the last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops.arguments import Inputs
from attnres_vision.ops.triton import tiles
from attnres_vision.ops.triton.source_table import source_table


@dataclasses.dataclass
class Rows:
    """The rows of one read.

    Attributes:
        samples, tokens: how the rows are counted: tokens of all samples together where nothing tells them apart.
        width: D.
        blocks: all sources but the last, each (samples, tokens, D).
        last: the last source.
        query: viewed with the same dimensions, stride 0 where it is shared.
    """

    samples: int
    tokens: int
    width: int
    blocks: list[Tensor]
    last: Tensor
    query: Tensor

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the sources' shape as rows, copied only if its rows are not whole or its strides do not allow."""
        rows = tensor.reshape(self.samples, self.tokens, self.width)
        return rows if rows.stride(-1) == 1 or self.width == 1 else rows.contiguous()

    def view_query(self, query: Tensor) -> Tensor:
        """A query (D,), (B, D) or of a source's shape, with stride 0 for what shares it."""
        if query.dim() == 1:
            return query.contiguous().expand(self.samples, self.tokens, self.width)
        if query.numel() == self.samples * self.width and query.dim() == 2 and self.tokens != 1:
            return query.contiguous().unsqueeze(1).expand(self.samples, self.tokens, self.width)
        return self.view(query)

    def block_arguments(self, targets: Sequence[Tensor | None] | None = None) -> dict[str, Any]:
        """What kernels take for the blocks, a tuple of pointers or a table, and for their gradients, `targets`."""
        if len(self.blocks) > tiles.UNROLLED:
            return {**self.table_arguments(targets), "block_strides": ((0, 0),), "N": 0}
        blocks = self.blocks or [self.last]
        missing = tiles.bucket(len(blocks)) - len(blocks)
        blocks = [*blocks, *blocks[-1:] * missing]  # up to the bucket the last one again
        found: dict[str, Any] = {"entries": None, "bounds": (0,), "ALIGNED": False}
        found |= {"blocks": tuple(blocks), "block_strides": tuple(map(strides, blocks))}
        found |= {"MIXED": len({block.dtype for block in blocks}) > 1, "N": len(blocks) if self.blocks else 0}
        if targets is not None:
            grads = list(targets) or [None]
            found["block_grads"] = (*grads, *grads[-1:] * missing)
        return found

    def table_arguments(self, targets: Sequence[Tensor | None] | None = None) -> dict[str, Any]:
        """The same as a table, for any number of blocks but none."""
        table = source_table(self.blocks, targets or [None] * len(self.blocks))
        found = {"entries": table.entries, "bounds": table.bounds, "blocks": table.blocks, "ALIGNED": table.aligned}
        found["MIXED"] = len({block.dtype for block in table.blocks}) > 1
        return found if targets is None else {**found, "block_grads": table.targets}


def rows_of(sources: Sequence[Tensor], query: Tensor, inputs: Inputs) -> Rows:
    """The rows of a read; `query` is the one per token if there is a low-rank part."""
    first = sources[0]
    width = first.shape[-1]
    per_sample = (
        (query.dim() == 2 and first.dim() > 2) or inputs.norm_scale is not None or inputs.norm_shift is not None
    )
    tensors = [*sources, *([inputs.add] if inputs.add is not None else [])]
    samples = 1
    if first.dim() > 2 and (per_sample or not all(tensor.is_contiguous() for tensor in tensors)):
        samples = first.shape[0]
    tokens = first.numel() // (samples * width) if first.numel() else 0
    rows = Rows(samples, tokens, width, [], first, query)
    rows.query = rows.view_query(query)
    rows.blocks = [rows.view(source) for source in sources[:-1]]
    rows.last = rows.view(sources[-1])
    return rows


def strides(rows: Tensor) -> tuple[int, int]:
    return rows.stride(0), rows.stride(1)


def element_size(rows: Rows) -> int:
    """Bytes of the widest number among the sources: it decides how many columns a warp loads at once."""
    return max(block.element_size() for block in [*rows.blocks, rows.last])


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()
