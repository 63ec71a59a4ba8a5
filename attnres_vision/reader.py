"""DepthAttention: a reader of the depth stream, and the hooks that put it in front of a host's module.

A reader holds one layer's query and attends over the stream's sources (arXiv 2603.15031, Eq. 2 to 6). It sits as
`<module>.depth` on the module that reads the residual stream, usually a norm.

The hooks are module-level functions that look at the module they are called with: a closure could not be pickled, and a
deepcopy of it would keep pointing at the original.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_vision import ops, two_phase
from attnres_vision.config import AttnResConfig
from attnres_vision.lazy import LazyRead, may_be_lazy
from attnres_vision.ops.reference import compute_dtype
from attnres_vision.stream import DepthStream


class DepthAttention(nn.Module):
    """Attention of one layer over the sources of the depth stream: `h = n * sum_i softmax_i(q . RMSNorm(v_i)) v_i`.

    Everything starts as the standard residual: the query is zero, and so is the last matrix of an input-dependent one.
    Inputs of a projection are RMS-normalised and the projection is divided by the square root of its fan-in, so that
    one optimiser step moves the scores about as far as it does with a static query.

    Args:
        dim: width D.
        config: the model's AttnResConfig.
        opens_block: this reader is the first of its block, so its reads end the block before it, or the final one.
        only_embedding: this reader sees only the embedding: it is the identity and has no parameters.
        unused: what this reader reads reaches no output of the model: it takes the sum and has no parameters either,
            which would never get a gradient.
        name: the module path of the host module, for messages and records.
        stream: the name of the stream it reads, in models that have several.
        position: position of the stream among the arguments of the host module; `keyword` is the argument's name.
        given: width of what an input-dependent query is computed from, by default D; 0 makes the query static.
        given_other: the last part of that is the other stream's mean.

    Shape: `DepthStream` of (..., D) sources to a tensor (..., D).
    """

    query: Tensor | None
    query_proj: Tensor | None
    query_down: Tensor | None
    query_up: Tensor | None

    def __init__(
        self,
        dim: int,
        config: AttnResConfig,
        *,
        opens_block: bool,
        only_embedding: bool = False,
        unused: bool = False,
        name: str = "",
        stream: str = "",
        position: int = 0,
        keyword: str = "hidden_states",
        given: int | None = None,
        given_other: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.config, self.opens_block, self.name = dim, config, opens_block, name
        self.stream, self.position, self.keyword = stream, position, keyword
        self.given, self.given_other = dim if given is None else given, given_other
        self.kind = config.query if self.given else "static"
        self.unused = unused
        self.is_managed = False  # has been seen with parameters that are not plain ones: sharded, for one
        self.group: tuple[DepthAttention, ...] = ()  # two_phase.py: the readers that this one reads for, itself first
        shapes: dict[str, tuple[int, ...]] = {}
        if not only_embedding and not unused:
            shapes["query"] = (dim,)
            if self.kind != "static" and config.rank is None:
                shapes["query_proj"] = (dim, self.given)
            elif self.kind != "static":
                assert config.rank is not None
                shapes |= {"query_down": (config.rank, self.given), "query_up": (dim, config.rank)}
        # Plain parameters, not nn.Linear: "all-linear" LoRA, quantisers and weight re-initialisers must not touch them.
        for parameter in ("query", "query_proj", "query_down", "query_up"):
            shape = shapes.get(parameter)
            value = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(parameter, value)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, *names: str) -> None:
        """Zero, except the first matrix of a low-rank projection: with both at zero neither would get a gradient.

        Not by nn.init, whose functions do nothing while diffusers loads a checkpoint.
        """
        for name, parameter in self.named_parameters():
            if names and name not in names:
                continue
            if name == "query_down":
                parameter.normal_()
            else:
                parameter.zero_()

    def init_weights(self) -> None:
        """The name that timm's MLP-Mixer looks for when it initialises a model (the others call reset_parameters)."""
        self.reset_parameters()

    def extra_repr(self) -> str:
        kind = "no query" if self.query is None else f"query={self.kind!r}"
        return f"{self.dim}, {kind}, opens_block={self.opens_block}"

    def forward(self, stream: DepthStream) -> Tensor:
        """What this layer reads: (..., D), in the dtype of the residual stream."""
        if stream.channel_dim != -1:  # a host that moved the channels gets them where it put them
            moved = dataclasses.replace(stream.channels_last(), uncast=stream)
            return self.forward(moved).movedim(-1, stream.channel_dim).contiguous()
        if stream.bounds is not None or stream.cast is not None:
            plain = self.forward(dataclasses.replace(stream, bounds=None, cast=None, uncast=stream)).to(stream.dtype)
            return plain if stream.bounds is None else plain.clamp(*stream.bounds)
        if self.query is None:
            sources = stream.sources()
            if len(sources) != 1 and not self.unused:
                raise ValueError(f"reader {self.name!r} reads only the embedding, got {len(sources)} sources")
            return stream.total()
        if ops.decomposed.is_needed(self._kernel(stream)):
            return ops.depth_attention(stream.sources(), self.compute_query(stream), **self._options())
        read = self.lazy(stream)
        return read.tensor() if isinstance(read, LazyRead) else read

    def lazy(self, stream: DepthStream) -> LazyRead | Tensor:
        """The same read, to be computed with the norm that takes it; what is known already is a tensor."""
        assert self.query is not None
        stream.check()
        options = self._options()
        if two_phase.begins_group(self, stream):
            return two_phase.read_ahead(self, stream)
        known = 0
        if two_phase.has_read_for(self, stream):
            assert stream.ahead is not None
            options["earlier"] = stream.ahead[self]
            known = stream.ahead[self].count
        if known or self._low_rank_is_small():
            query = self.compute_query(stream)
        else:
            query, options["low_rank"] = self.query, self._factors(stream)
        if stream.pending is not None and stream.partial is not None:  # the query has not asked for the sum
            return LazyRead((*stream.blocks, stream.partial)[known:], query, stream=stream, **options)
        return LazyRead(stream.sources()[known:], query, **options)

    def weights(self, stream: DepthStream) -> Tensor:
        """The depth weights of this read: (n, ..., heads), summing to one over the n sources."""
        stream = stream.channels_last()
        sources = stream.sources()
        query = sources[0].new_zeros(self.dim) if self.query is None else self.compute_query(stream)
        return ops.depth_attention(sources, query, return_weights=True, **self._options())[1]

    def compute_query(self, stream: DepthStream) -> Tensor:
        """The query for this read: (D,), (B, D) or (..., D) by `config.query`."""
        assert self.query is not None
        if self.kind == "static":
            return self.query
        if self.config.rank is not None:
            left, right = self._factors(stream)
            return self.query + F.linear(left, right.to(left.dtype))  # left is fp32 even for half-precision parameters
        assert self.query_proj is not None
        given = self._given(stream).to(self.query_proj.dtype)
        given = F.rms_norm(given, (self.given,), eps=self.config.key_eps)
        return self.query + F.linear(given, self.query_proj * self.given**-0.5)

    def _factors(self, stream: DepthStream) -> tuple[Tensor, Tensor]:
        """left (..., r) and right (D, r) of a low-rank query: query + left @ right.T."""
        assert self.config.rank is not None and self.query_down is not None and self.query_up is not None
        given = self._given(stream).to(self.query_down.dtype)
        # The norm after the projection, on r numbers: a normalised copy of the source would be kept for backward.
        norm = torch.linalg.vector_norm(given, dim=-1, keepdim=True, dtype=compute_dtype(given.dtype))
        left = F.linear(given, self.query_down) * torch.rsqrt(norm.square() / self.given + self.config.key_eps)
        return left, self.query_up * (self.given * self.config.rank) ** -0.5  # by both fan-ins

    def _given(self, stream: DepthStream) -> Tensor:
        """What an input-dependent query is computed from: (B, C) for a condition, else a source (..., D)."""
        if self.config.query == "condition":
            parts = [stream.condition] if stream.condition is not None else []
            if self.given_other and stream.other is not None:
                parts.append(normalise(stream.other, self.config.key_eps))
            width = sum(part.shape[-1] for part in parts)
            if width != self.given:
                raise ValueError(
                    f"reader {self.name!r} has query='condition' of width {self.given}, but the stream carries "
                    f"{f'one of width {width}' if width else 'no condition'}"
                )
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.config.query == "token" or self.opens_block or stream.partial is None or stream.sealed:
            return stream.sources()[-1]
        return stream.blocks[-1]  # the newest source when the block was entered

    def _low_rank_is_small(self) -> bool:
        """Whether the query is few numbers, so that it need not be kept as two factors for backward."""
        return self.config.rank is None or self.kind in ("static", "condition")

    def _kernel(self, stream: DepthStream) -> str:
        return ops.dispatch.choose(stream.blocks, self.config.heads)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {"eps": config.key_eps, "scale": config.scale, "form": config.form, "heads": config.heads}


def normalise(vector: Tensor, eps: float) -> Tensor:
    """A conditioning vector (..., C) with a mean square of one, so that none drowns another."""
    return F.rms_norm(vector, vector.shape[-1:], eps=eps)


def read_stream(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a module inside a block: a stream argument becomes what its reader on the module reads."""
    for depth in readers_on(module):
        stream = argument(args, kwargs, depth.position, depth.keyword)
        if not isinstance(stream, DepthStream):
            got = "no argument" if stream is None else type(stream).__name__
            raise TypeError(
                f"{depth.name!r} of an AttnRes model must be given a DepthStream, got {got}: the residual stream was "
                "lost before this block. Start at the model's first block and pass on what each block returns, or "
                "detach the model (attnres_vision.detach) to run its blocks on tensors"
            )
        if depth.opens_block:
            stream.seal()
        args, kwargs = replaced(args, kwargs, depth.position, depth.keyword, _read(module, depth, stream))
    return args, kwargs


def read_final(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a module behind the blocks: like `read_stream`, but a tensor passes unchanged.

    It leaves the open block open: `forward_intermediates(norm=True)` calls the final norm between the blocks.
    """
    depth = module.depth
    assert isinstance(depth, DepthAttention)
    stream = argument(args, kwargs, depth.position, depth.keyword)
    if isinstance(stream, DepthStream):
        check_gradients(stream, depth)
        return replaced(args, kwargs, depth.position, depth.keyword, _read(module, depth, stream))
    return None


def readers_on(module: nn.Module) -> list[DepthAttention]:
    """The readers on a module: `depth`, and `depth_<stream>` for a module that reads several streams."""
    return [child for child in module._modules.values() if isinstance(child, DepthAttention)]


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, keyword: str) -> Any:
    """A module's argument, however it was given; None if it was not."""
    return args[position] if len(args) > position else kwargs.get(keyword)


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, keyword: str, value: Any) -> Any:
    """`args` and `kwargs` with another value for that argument."""
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, keyword: value}


def _read(module: nn.Module, depth: DepthAttention, stream: DepthStream) -> Tensor | LazyRead:
    plain = stream.channel_dim == -1 and stream.bounds is None and stream.cast is None
    lazy = depth.query is not None and plain and may_be_lazy(module, depth, depth._kernel(stream))
    return depth.lazy(stream) if lazy else depth(stream)


def check_gradients(stream: DepthStream, depth: DepthAttention) -> None:
    """Raise for a final read of a stream with gradients in its embedding but not in the outputs of its layers.

    Reentrant checkpointing makes one: it sees no tensor in a DepthStream, and the layers' gradients would be lost. The
    read may be in a checkpoint itself, so the gradient mode says nothing.
    """
    embedding = stream.blocks[0]
    # Not `sources()`, which would make the sum that the final read's kernel makes
    newest = [value for value in (stream.partial, stream.pending) if value is not None] or [stream.blocks[-1]]
    has_gradients = any(value.requires_grad for value in newest)
    if embedding.requires_grad and not has_gradients and embedding.grad_fn is not None:
        raise RuntimeError(
            f"{depth.name!r} of an AttnRes model reads layer outputs that were computed without gradients, although "
            "the embedding has them. Reentrant gradient checkpointing cannot carry a DepthStream: use "
            "use_reentrant=False (timm.layers.set_reentrant_ckpt(False), timm's default). To run the blocks without "
            "gradients on purpose, compute the embedding under torch.no_grad() too"
        )
