"""Other packages' depth attention behind one interface, for benchmarks/gpu.py.

`PEERS[name](sources, query)` gives a function that computes the weighted mean of a list of sources (..., D), as a user
with such a list would call the package: where it wants one stacked tensor, stacking is part of the call. Whatever a
package raises, it raises: the caller reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS = 1e-6
Call = Callable[[], Tensor]


def fla(sources: Sequence[Tensor], query: Tensor) -> Call:
    from fla.ops.attnres import fused_attnres

    weight = torch.ones_like(query)
    return lambda: fused_attnres(query, list(sources), weight, rms_eps=EPS, scale=1.0)


def fast_attnres(sources: Sequence[Tensor], query: Tensor) -> Call:
    from attnres import attnres

    return lambda: attnres(list(sources), query, eps=EPS, scale=1.0)


def flash_attn_res(sources: Sequence[Tensor], query: Tensor) -> Call:
    from flash_attn_res import phase_1_batched_attention_triton_op

    return lambda: phase_1_batched_attention_triton_op(torch.stack(list(sources)), query.unsqueeze(0), EPS)[0][0]


def liger(sources: Sequence[Tensor], query: Tensor) -> Call:
    from liger_kernel.transformers.functional import liger_attn_res

    weight = torch.ones_like(query)
    return lambda: liger_attn_res(torch.stack(list(sources)), query, weight, EPS)


PEERS: dict[str, Callable[[Sequence[Tensor], Tensor], Call]] = {
    "fla-core": fla,
    "fast-attnres": fast_attnres,
    "flash-attn-res": flash_attn_res,
    "liger-kernel": liger,
}


def flash_attn_res_group(
    blocks: Sequence[Tensor], partials: Sequence[Tensor], queries: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Two phases: the finished blocks once for all queries, then a merge with each reader's partial sum."""
    from flash_attn_res import phase_1_batched_attention_triton_op, phase_2_online_softmax_merge_triton_op

    def run() -> list[Tensor]:
        means, lse = phase_1_batched_attention_triton_op(torch.stack(list(blocks)), torch.stack(list(queries)), EPS)
        return [
            phase_2_online_softmax_merge_triton_op(partial, query, means[m], lse[m], EPS)
            for m, (partial, query) in enumerate(zip(partials, queries, strict=True))
        ]

    return run
