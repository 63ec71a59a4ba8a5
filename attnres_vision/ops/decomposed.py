"""Depth attention as a loop over the sources, for compilers and torch.func (arXiv 2603.15031, Eq. 1 to 6).

The same equations as `reference`, without its stack: inductor fuses the loop into a few kernels that read every source
once or twice, and `torch.export` sees only ordinary operators, which every transform of torch.func knows, and forward-
mode AD. Differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnres_vision.ops.reference import align_query, compute_dtype, promoted_dtype

__all__ = ["depth_attention", "is_needed"]


def is_needed(kernel: str = "eager") -> bool:
    """Whether PyTorch traces or transforms what runs now: compile, export, torch.func, forward-mode AD.

    A custom operator has no rules for the last two, and forward-mode AD would lose its tangents without a word. A
    compiler takes it as it is, which is right for the Triton kernels; on a CPU inductor makes more of the loop.
    """
    compiling = torch.compiler.is_compiling() and (kernel == "eager" or torch.compiler.is_exporting())
    # Not `is not None`: dynamo takes the None for an object
    transforming = isinstance(torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter)
    return compiling or transforming or forward_ad._current_level >= 0


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
    query = align_query(query, sources[0]).to(dtype)
    scores = []
    for source in sources:
        value = source.to(dtype)
        inv_rms = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        scores.append((query * value).unflatten(-1, (heads, -1)).sum(-1) * inv_rms * scale)
    weights = torch.stack(scores).softmax(0)  # (n, ..., heads): stacks n numbers per token and head, never the sources
    mixed = torch.zeros((), dtype=dtype, device=query.device)
    for weight, source in zip(weights.unbind(0), sources, strict=True):
        mixed = mixed + weight.unsqueeze(-1) * source.to(dtype).unflatten(-1, (heads, -1))
    out = mixed.flatten(-2)
    out = (len(sources) * out if form == "sum" else out).to(out_dtype)
    return (out, weights) if return_weights else out
