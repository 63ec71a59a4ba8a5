"""DepthAttention, the reader of one layer: attention over the sources of the depth stream."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from attnres_vision import ops
from attnres_vision.config import AttnResConfig
from attnres_vision.stream import two_phase
from attnres_vision.stream.lazy_read import LazyRead
from attnres_vision.stream.query import DepthQuery
from attnres_vision.stream.stream import PLAIN, DepthStream


class DepthAttention(DepthQuery):
    """Attention of one layer over the sources of the depth stream: `h = n * sum_i softmax_i(q . RMSNorm(v_i)) v_i`.

    Args:
        dim: width D.
        config: the model's AttnResConfig.
        only_embedding: this reader sees only the embedding: it is the identity and has no parameters.
        unused: what this reader reads reaches no output of the model: it takes the sum and has no parameters either.
        stream: the name of the stream it reads, in models that have several.
        position: position of the stream among the arguments of the host module; `keyword` is the argument's name.
        options: the other arguments of `DepthQuery`.

    Shape: `DepthStream` of (..., D) sources to a tensor (..., D).
    """

    def __init__(
        self,
        dim: int,
        config: AttnResConfig,
        *,
        only_embedding: bool = False,
        unused: bool = False,
        stream: str = "",
        position: int = 0,
        keyword: str = "hidden_states",
        **options: Any,
    ) -> None:
        super().__init__(dim, config, has_query=not only_embedding and not unused, **options)
        self.unused, self.stream, self.position, self.keyword = unused, stream, position, keyword
        self.group: tuple[DepthAttention, ...] = ()  # two_phase.py: the readers that this one reads for, itself first

    def forward(self, stream: DepthStream) -> Tensor:
        """What this layer reads: (..., D), in the dtype of the residual stream."""
        channel_dim = stream.host_view.channel_dim
        if channel_dim == -1:
            return self._read(stream, self.group)
        # A host that moved the channels gets them where it put them; later readers read its stream, not the moved one
        return self._read(stream.channels_last(), group=()).movedim(-1, channel_dim).contiguous()

    def _read(self, stream: DepthStream, group: tuple[DepthAttention, ...]) -> Tensor:
        if self.query is None:
            if len(stream.sources()) != 1 and not self.unused:
                raise ValueError(f"reader {self.name!r} reads only the embedding, got {len(stream.sources())} sources")
            return stream.total()
        if stream.host_view == PLAIN:
            return _tensor(self.lazy(stream, group))
        out = _tensor(self.lazy(dataclasses.replace(stream, host_view=PLAIN), group)).to(stream.dtype)
        return out if stream.host_view.bounds is None else out.clamp(*stream.host_view.bounds)

    def lazy(self, stream: DepthStream, group: tuple[DepthAttention, ...] | None = None) -> LazyRead | Tensor:
        """The read of a plain stream, to be computed with the norm that takes it; what is known already is a tensor.

        Args:
            group: the readers to read for, by default those of `self.group`.
        """
        assert self.query is not None
        stream.check()
        options = self._options()
        if ops.dispatch.is_traced(self.kernel(stream)):
            return ops.depth_attention(stream.sources(), self.compute_query(stream), **options)
        group = self.group if group is None else group
        if two_phase.can_begin(group, stream):
            return two_phase.read_ahead(group, stream)
        earlier = two_phase.earlier_read(self, stream)
        if earlier is not None:
            options["earlier"] = earlier
        if self.has_factors and earlier is None:
            query, options["low_rank"] = self.query, self.factors(stream)
        else:
            query = self.compute_query(stream)
        block = stream.open_block  # whose sum the query may have asked for by now
        sources = stream.blocks if block is None else (*stream.blocks, block.total)
        sources = sources if earlier is None else sources[earlier.count :]
        return LazyRead(sources, query, open_block=block, **options)

    def weights(self, stream: DepthStream) -> Tensor:
        """The depth weights of this read: (n, ..., heads), summing to one over the n sources."""
        stream = stream.channels_last()
        sources = stream.sources()
        query = sources[0].new_zeros(self.dim) if self.query is None else self.compute_query(stream)
        return ops.depth_attention(sources, query, return_weights=True, **self._options())[1]

    def kernel(self, stream: DepthStream) -> str:
        """The implementation that reads the stream: "eager" or "triton"."""
        return ops.dispatch.choose(stream.blocks, self.config.heads)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {"eps": config.key_eps, "scale": config.scale, "form": config.form, "heads": config.heads}


def _tensor(read: LazyRead | Tensor) -> Tensor:
    return read.tensor() if isinstance(read, LazyRead) else read
