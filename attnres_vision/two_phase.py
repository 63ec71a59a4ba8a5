"""Two-phase reads of the depth stream: the reader that opens a block reads the finished blocks for all its readers.

Their sources differ only in the block's partial sum (arXiv 2603.15031, sec. 4). Possible where the queries of all
readers are known when the block is entered: `query` "static", "condition" and "block". The stream carries what was read
(`DepthStream.ahead`); an operation that changes its sources drops it, and readers then read all sources themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnres_vision.ops import decomposed, dispatch
from attnres_vision.ops.two_phase import attend_blocks

if TYPE_CHECKING:
    from attnres_vision.reader import DepthAttention
    from attnres_vision.stream import DepthStream


def is_shared(reader: DepthAttention, stream: DepthStream) -> bool:
    """Whether this read is the first or a later one of a two-phase block."""
    if not reader.opens_block:
        return _has_read_for(reader, stream)
    config = reader.config
    if len(reader.block_readers) < 2 or config.two_phase is False or decomposed.is_needed():
        return False
    if stream.uncast is not None:  # the host goes on with that one, which would not know
        return False
    if config.two_phase is None and torch.is_grad_enabled():  # it would keep one more tensor per reader
        return False
    if config.two_phase is None and dispatch.choose(stream.blocks, config.heads) != "triton":
        return False
    device = stream.device
    return all(_is_at_hand(other, device) for other in reader.block_readers)


def _has_read_for(reader: DepthAttention, stream: DepthStream) -> bool:
    """Whether the stream has a read for this reader, and one that autograd knows of if it has to.

    It may not: a host leaves layers out, a layer is replaced by another, the layers before run without gradients.
    """
    if stream.ahead is None or reader not in stream.ahead or decomposed.is_needed():
        return False
    if not torch.is_grad_enabled() or stream.ahead[reader][1].requires_grad:
        return True
    origins = (*reader.parameters(), *stream.blocks, stream.condition)
    return not any(origin is not None and origin.requires_grad for origin in origins)


def _is_at_hand(reader: DepthAttention, device: torch.device) -> bool:
    """Whether a reader's parameters are here and whole: sharded or offloaded ones are not, out of turn."""
    parameters = list(reader.parameters())
    plain = all(type(parameter) is nn.Parameter and parameter.device == device for parameter in parameters)
    return plain and reader.query is not None and reader.query.shape == (reader.dim,) and not reader.given_other


def read_ahead(reader: DepthAttention, stream: DepthStream) -> Tensor:
    """What the opening reader reads; the stream then has what the other readers of the block need."""
    sources, config = stream.sources(), reader.config
    queries = [other.compute_query(stream) for other in reader.block_readers]
    kernel = dispatch.choose(sources, config.heads)
    ahead = attend_blocks(sources, queries, eps=config.key_eps, scale=config.scale, kernel=kernel)
    stream.ahead = dict(zip(reader.block_readers, ahead, strict=True))
    mean = ahead[0][0]
    return mean * len(sources) if config.form == "sum" else mean
