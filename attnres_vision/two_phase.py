"""Two-phase reads of the depth stream: the first reader of a group reads the sources there are for all its readers.

Readers that follow each other differ only in the sources that are added between them (arXiv 2603.15031, sec. 4, where a
group is a block). Possible where the queries are known when the group begins: `query` "static" and "condition", and
"block" for the readers of one block. The stream carries what was read (`DepthStream.ahead`); an operation that changes
its sources drops it, and readers then read all sources themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnres_vision.ops import decomposed, dispatch
from attnres_vision.ops.two_phase import attend_blocks

if TYPE_CHECKING:
    from attnres_vision.reader import DepthAttention
    from attnres_vision.stream import DepthStream

# A group shares one pass over the blocks before it, and its readers read what it adds itself, each time anew.
MAX_READERS = 8


def form_groups(blocks: Iterable[Sequence[DepthAttention]]) -> None:
    """Tell the readers of one stream, block by block, of each other.

    A group begins with a reader that opens a block, and takes in whole blocks.
    """
    group: list[DepthAttention] = []
    for block in blocks:
        if not _can_share(block):
            group = []
        elif group and len(group) + len(block) <= MAX_READERS and block[0].config.query != "block":
            group += block
        else:  # parallel branches open a block together, and the first one's read is of no use to the others
            group = [reader for reader in block if reader is block[0] or not reader.opens_block]
        if group:
            group[0].group = tuple(group)


def leave_groups(readers: Collection[DepthAttention], left: Collection[DepthAttention]) -> None:
    """Take the readers out of their groups that are not among `left`."""
    for reader in readers:
        reader.group = tuple(other for other in reader.group if other in left)


def _can_share(block: Sequence[DepthAttention]) -> bool:
    config = block[0].config
    known = config.query != "token" and config.heads == 1 and all(reader.query is not None for reader in block)
    return known and block[0].opens_block


def begins_group(reader: DepthAttention, stream: DepthStream) -> bool:
    """Whether this read is one for a whole group."""
    config = reader.config
    if len(reader.group) < 2 or config.two_phase is False or decomposed.is_needed():
        return False
    if stream.partial is not None and not stream.sealed:
        return False  # called out of turn: the sum is not final
    if stream.uncast is not None and stream.uncast.blocks[0] is not stream.blocks[0]:
        return False  # the host goes on with other sources, and so would the later readers
    if config.two_phase is None and dispatch.choose(stream.blocks, config.heads) != "triton":
        return False
    device = stream.device
    return all(_is_at_hand(other, device) for other in reader.group)


def has_read_for(reader: DepthAttention, stream: DepthStream) -> bool:
    """Whether the stream has a read for this reader, and one that autograd knows of if it has to.

    It may not: a host leaves layers out, a layer is replaced by another, the layers before run without gradients.
    """
    if stream.ahead is None or reader not in stream.ahead or decomposed.is_needed():
        return False
    earlier = stream.ahead[reader]
    newer = len(stream.blocks) + (stream.partial is not None) - earlier.count
    if newer < 1 or earlier.lse.device != stream.device:
        return False
    if reader.kind == "block" and (newer > 1 or stream.sealed):  # its query was that of another block
        return False
    if not torch.is_grad_enabled() or earlier.lse.requires_grad:
        return True
    origins = (*reader.parameters(), *stream.blocks, stream.condition)
    return not any(origin is not None and origin.requires_grad for origin in origins)


def _is_at_hand(reader: DepthAttention, device: torch.device) -> bool:
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


def read_ahead(reader: DepthAttention, stream: DepthStream) -> Tensor:
    """What the first reader of a group reads; the stream then has what the others need."""
    sources, config = stream.sources(), reader.config
    queries = [other.compute_query(stream) for other in reader.group]
    kernel = dispatch.choose(sources, config.heads)
    first, later = attend_blocks(
        sources, queries, eps=config.key_eps, scale=config.scale, form=config.form, kernel=kernel
    )
    holder: DepthStream | None = stream
    while holder is not None:  # the host reads a cast of its stream, and goes on with the stream
        holder.found = dict(zip(reader.group[1:], later, strict=True))
        holder = holder.uncast
    return first
