"""Which readers share a two-phase read: groups of readers that follow each other (stream/two_phase.py reads them)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attnres_vision.stream.reader import DepthAttention

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
        elif group and len(group) + len(block) <= MAX_READERS and block[0].known_from == "start":
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
    known = all(reader.known_from != "read" and reader.query is not None for reader in block)
    return known and block[0].config.heads == 1 and block[0].opens_block
