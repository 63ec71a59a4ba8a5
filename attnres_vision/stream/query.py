"""DepthQuery: the parameters of a reader, and the query that it makes of them, in its four kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_vision.config import AttnResConfig, Query
from attnres_vision.ops.dtypes import compute_dtype
from attnres_vision.stream.stream import DepthStream

# From when on a query is known: the start of the forward pass, its block's entry, or not before it reads. Readers whose
# queries are known early share a pass over the sources (two_phase.py).
KNOWN_FROM: dict[Query, str] = {"static": "start", "condition": "start", "block": "block", "token": "read"}


class DepthQuery(nn.Module):
    """The query of one reader: `query`, plus a projection of what `config.query` names.

    Everything starts as the standard residual: the query is zero, and so is the last matrix of an input-dependent one.
    Inputs of a projection are RMS-normalised and the projection is divided by the square root of its fan-in, so that
    one optimiser step moves the scores about as far as it does with a static query.

    Args:
        dim: width D.
        config: the model's AttnResConfig.
        opens_block: its reader is the first of its block, so its reads end the block before it, or the final one.
        has_query: its reader has something to choose from; without, there are no parameters, which would never get a
            gradient.
        given: width of what an input-dependent query is computed from, by default D; 0 makes the query static.
        given_other: the last part of that is the other stream's mean.
        name: the module path of the host module, for messages and records.
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
        has_query: bool = True,
        given: int | None = None,
        given_other: bool = False,
        name: str = "",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.config, self.opens_block, self.name = dim, config, opens_block, name
        self.given, self.given_other = dim if given is None else given, given_other
        self.kind = config.query if self.given else "static"
        self.is_managed = False  # has been seen with parameters that are not plain ones: sharded, for one
        shapes: dict[str, tuple[int, ...]] = {}
        if has_query:
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

    @property
    def known_from(self) -> str:
        """ "start", "block" or "read", see KNOWN_FROM."""
        return KNOWN_FROM[self.kind]

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

    def compute_query(self, stream: DepthStream) -> Tensor:
        """The query for a read of `stream`: (D,), (B, D) or (..., D) by `config.query`."""
        assert self.query is not None
        if self.kind == "static":
            return self.query
        if self.config.rank is not None:
            left, right = self.factors(stream)
            return self.query + F.linear(left, right.to(left.dtype))  # left is fp32 even for half-precision parameters
        assert self.query_proj is not None
        given = self._given(stream).to(self.query_proj.dtype)
        given = F.rms_norm(given, (self.given,), eps=self.config.key_eps)
        return self.query + F.linear(given, self.query_proj * self.given**-0.5)

    @property
    def has_factors(self) -> bool:
        """Whether the query is one of low rank per token: backward then keeps its two factors instead of it."""
        return self.config.rank is not None and self.kind not in ("static", "condition")

    def factors(self, stream: DepthStream) -> tuple[Tensor, Tensor]:
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
        if self.config.query == "token" or self.opens_block or stream.open_block is None or stream.is_closed:
            return stream.sources()[-1]
        return stream.blocks[-1]  # the newest source when the block was entered


def normalise(vector: Tensor, eps: float) -> Tensor:
    """A conditioning vector (..., C) with a mean square of one, so that none drowns another."""
    return F.rms_norm(vector, vector.shape[-1:], eps=eps)
