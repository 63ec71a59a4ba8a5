"""Depth attention as the paper writes it (arXiv 2603.15031, Eq. 1 to 6): the specification of all implementations.

    k_i = RMSNorm(v_i)                      keys are normalised over the whole width, values are not
    a_i = softmax_i(scale * q . k_i)        no 1/sqrt(D); per depth head, over the n sources
    h   = n * sum_i a_i v_i                 form="sum";   form="mean" leaves the factor n out

Plain PyTorch in fp32 (fp64 where a source is fp64), differentiable by autograd. It stacks the sources, so it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops.dtypes import compute_dtype, promoted_dtype
from attnres_vision.ops.read import Read


def depth_attention(sources: Sequence[Tensor], query: Tensor, **options: Any) -> Any:
    """Same results as `attnres_vision.ops.depth_attention`, which documents the arguments."""
    return attend(Read(sources, query, **options))


def attend(read: Read) -> Any:
    """The read, with what stands before and behind it."""
    sources = read.summed_sources()
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    values = torch.stack([source.to(dtype) for source in sources])
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + read.eps)
    query = align_query(read.query, sources[0]).to(dtype)
    scores = read.scale * (query * keys).unflatten(-1, (read.heads, -1)).sum(-1)  # (n, ..., heads)
    weights = scores.softmax(0)
    mixed = (weights.unsqueeze(-1) * values.unflatten(-1, (read.heads, -1))).sum(0).flatten(-2)
    out = (len(sources) * mixed if read.form == "sum" else mixed).to(out_dtype)
    return read.results(out, sources[-1], weights)


def align_query(query: Tensor, source: Tensor) -> Tensor:
    """The query with singleton dimensions so that it broadcasts over a source: (B, D) becomes (B, 1, ..., D)."""
    if query.dim() == 2 and source.dim() > 2:
        return query.view(query.shape[0], *[1] * (source.dim() - 2), query.shape[1])
    return query
