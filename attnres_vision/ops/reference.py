"""Depth attention as the paper writes it (arXiv 2603.15031, Eq. 1 to 6): the specification of all implementations.

    k_i = RMSNorm(v_i)                      keys are normalised over the whole width, values are not
    a_i = softmax_i(scale * q . k_i)        no 1/sqrt(D); per depth head, over the n sources
    h   = n * sum_i a_i v_i                 form="sum";   form="mean" leaves the factor n out

Plain PyTorch in fp32 (fp64 where a source is fp64), differentiable by autograd. It stacks the sources, so it is slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    form: str = "sum",
    heads: int = 1,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same arguments, shapes and results as `attnres_vision.ops.depth_attention`, which documents them."""
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    values = torch.stack([source.to(dtype) for source in sources])
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    query = align_query(query, sources[0]).to(dtype)
    scores = scale * (query * keys).unflatten(-1, (heads, -1)).sum(-1)  # (n, ..., heads)
    weights = scores.softmax(0)
    mixed = (weights.unsqueeze(-1) * values.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
    out = (len(sources) * mixed if form == "sum" else mixed).to(out_dtype)
    return (out, weights) if return_weights else out


def align_query(query: Tensor, source: Tensor) -> Tensor:
    """The query with singleton dimensions so that it broadcasts over a source: (B, D) becomes (B, 1, ..., D)."""
    if query.dim() == 2 and source.dim() > 2:
        return query.view(query.shape[0], *[1] * (source.dim() - 2), query.shape[1])
    return query


def promoted_dtype(sources: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a sum of the sources, which is the dtype of a read."""
    return promoted([source.dtype for source in sources])


def promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Likewise, of dtypes."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sum: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Scores stay in fp32 under autocast too; entering a disabled autocast costs microseconds, so only if needed."""
    enabled = autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else contextlib.nullcontext()


def norm_is_fp32(name: str, device_type: str) -> bool:
    """Whether autocast makes aten's `name` compute in fp32 and return it: on GPUs it does, on a CPU it leaves norms."""
    return autocast_enabled(device_type) and _autocast_knows(name, device_type)


@torch.compiler.assume_constant_result  # dynamo cannot trace the look-up
def _autocast_knows(name: str, device_type: str) -> bool:
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; the meta device has none, and torch raises if it is asked."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
