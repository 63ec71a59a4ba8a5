"""Depth attention as a loop over the sources, for compilers and torch.func (arXiv 2603.15031, Eq. 1 to 6).

The same equations as `reference`, without its stack: inductor fuses the loop into a few kernels that read every source
once or twice, and `torch.export` sees only ordinary operators, which every transform of torch.func knows, and forward-
mode AD. Differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops.dtypes import compute_dtype, promoted_dtype
from attnres_vision.ops.read import Read
from attnres_vision.ops.reference import align_query


def depth_attention(sources: Sequence[Tensor], query: Tensor, **options: Any) -> Any:
    """Same results as `attnres_vision.ops.depth_attention`, which documents the arguments."""
    return attend(Read(sources, query, **options))


def attend(read: Read) -> Any:
    """The read, with what stands before and behind it."""
    sources = read.summed_sources()
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    query = align_query(read.query, sources[0]).to(dtype)
    scores = []
    for source in sources:
        value = source.to(dtype)
        inv_rms = torch.rsqrt(value.square().mean(-1, keepdim=True) + read.eps)
        scores.append((query * value).unflatten(-1, (read.heads, -1)).sum(-1) * inv_rms * read.scale)
    weights = torch.stack(scores).softmax(0)  # (n, ..., heads): stacks n numbers per token and head, never the sources
    mixed = torch.zeros((), dtype=dtype, device=query.device)
    for weight, source in zip(weights.unbind(0), sources, strict=True):
        mixed = mixed + weight.unsqueeze(-1) * source.to(dtype).unflatten(-1, (read.heads, -1))
    out = mixed.flatten(-2)
    out = (len(sources) * out if read.form == "sum" else out).to(out_dtype)
    return read.results(out, sources[-1], weights)
