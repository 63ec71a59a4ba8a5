"""Two-phase reads of the depth stream: the first reader of a group reads the sources there are for all its readers.

Readers that follow each other differ only in the sources that are added between them (arXiv 2603.15031, sec. 4, where a
group is a block). Possible where the queries are known when the group begins: `query` "static" and "condition", and
"block" for the readers of one block. The stream carries what was read (`DepthStream.ahead`); an operation that changes
its sources drops it, and readers then read all sources themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnres_vision.ops import dispatch
from attnres_vision.ops.two_phase import Earlier, attend_blocks
from attnres_vision.stream.query import DepthQuery
from attnres_vision.stream.stream import DepthStream


def can_begin(group: Sequence[DepthQuery], stream: DepthStream) -> bool:
    """Whether the first reader of a group can read for all of them."""
    if len(group) < 2 or dispatch.is_traced() or not stream.is_closed:  # called out of turn: the sum is not final
        return False
    config = group[0].config
    kernel = dispatch.choose(stream.blocks, config.heads)
    wanted = kernel == "triton" if config.two_phase is None else config.two_phase
    return wanted and all(_is_at_hand(reader, stream.device) for reader in group)


def read_ahead(group: Sequence[DepthQuery], stream: DepthStream) -> Tensor:
    """What the first reader of a group reads; the next write to the stream hands on what the others need."""
    sources, config = stream.sources(), group[0].config
    queries = [reader.compute_query(stream) for reader in group]
    kernel = dispatch.choose(sources, config.heads)
    first, later = attend_blocks(
        sources, queries, eps=config.key_eps, scale=config.scale, form=config.form, kernel=kernel
    )
    assert stream.open_block is not None
    stream.open_block.found = dict(zip(group[1:], later, strict=True))
    return first


def earlier_read(reader: DepthQuery, stream: DepthStream) -> Earlier | None:
    """What was read ahead for this reader, if it can be used: of sources that are here, known to autograd if need be.

    It may not: a host leaves layers out, a layer is replaced by another, the layers before run without gradients.
    """
    earlier = None if stream.ahead is None or dispatch.is_traced() else stream.ahead.get(reader)
    if earlier is None:
        return None
    newer = len(stream.blocks) + (stream.open_block is not None) - earlier.count
    if newer < 1 or earlier.lse.device != stream.device:
        return None
    if reader.known_from == "block" and (newer > 1 or stream.is_closed):  # its query was that of another block
        return None
    if not torch.is_grad_enabled() or earlier.lse.requires_grad:
        return earlier
    origins = (*reader.parameters(), *stream.blocks, stream.condition)
    return None if any(origin is not None and origin.requires_grad for origin in origins) else earlier


def _is_at_hand(reader: DepthQuery, device: torch.device) -> bool:
    """Whether a reader's parameters are here and whole, now and in backward: offloaded or sharded ones are not.

    What FSDP manages may be whole at the moment, but its gradients are reduced once its own layer's backward is done.
    """
    parameters = list(reader.parameters())
    if not all(type(parameter) is nn.Parameter for parameter in parameters):
        reader.is_managed = True
    if reader.is_managed or getattr(reader, "_is_fsdp_managed_module", False) or reader.query is None:
        return False
    here = all(parameter.device == device for parameter in parameters)
    return here and reader.query.shape == (reader.dim,) and not reader.given_other
