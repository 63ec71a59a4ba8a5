"""diffusers' caches on a model whose residual stream is a depth stream: which are refused, and what skips blocks.

A cache of attention outputs never sees the stream. One of blocks does, and what it then does with a residual tensor,
differences and extrapolations, has no meaning for a list of sources that later norms attend over.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import nn

from attnres_vision.attach import families
from attnres_vision.stream import DepthStream

# These subtract the residual streams before and behind blocks; the others keep outputs of attention modules.
RESIDUAL_CACHES = ("FirstBlockCacheConfig", "MagCacheConfig", "SeaCacheConfig")
ATTENTION_CACHES = "PyramidAttentionBroadcastConfig, FasterCacheConfig or TaylorSeerCacheConfig"


def check_cache(model: nn.Module, config: Any) -> None:
    """Raise for a cache that does arithmetic on the residual streams.

    Raises:
        ValueError: a residual cache, or a TaylorSeerCacheConfig that extrapolates transformer blocks or skips some.
    """
    if any(cls.__name__ in RESIDUAL_CACHES for cls in type(config).__mro__):
        raise ValueError(
            f"{type(config).__name__} cannot be used with {type(model).__name__}: a residual cache reuses the "
            "difference of the residual streams before and behind the blocks, and in an AttnRes model the stream "
            "is a list of sources that the last norm attends over. Use a cache of attention outputs: "
            f"{ATTENTION_CACHES}"
        )
    if getattr(config, "use_lite_mode", False):  # skips all blocks, whatever the identifiers are
        return
    extrapolated, skipped = (
        _matches(model, getattr(config, name, None) or ()) for name in ("cache_identifiers", "skip_predict_identifiers")
    )
    if extrapolated:
        raise ValueError(
            f"cache_identifiers={config.cache_identifiers!r} of {type(config).__name__} match the transformer block "
            f"{extrapolated[0]!r} of {type(model).__name__}, whose output is a list of sources that later norms attend "
            "over and cannot be extrapolated: name modules inside of the blocks, such as '.*attn', or leave it out"
        )
    if skipped != list(families.blocks_of(model))[len(families.blocks_of(model)) - len(skipped) :]:
        raise ValueError(
            f"skip_predict_identifiers={config.skip_predict_identifiers!r} of {type(config).__name__} match the "
            f"transformer block {skipped[0]!r} of {type(model).__name__} but not all blocks behind it: a skipped block "
            "gives zeros, and a block behind it needs the list of sources. Match all blocks (use_lite_mode=True does) "
            "or modules inside of the blocks"
        )


def _matches(model: nn.Module, patterns: Any) -> list[str]:
    """The blocks of a model that a cache's patterns match, in depth order."""
    return [path for path in families.blocks_of(model) if any(re.fullmatch(pattern, path) for pattern in patterns)]


def let_blocks_be_skipped(model: nn.Module) -> None:
    """Let TaylorSeer skip blocks (its lite mode): one stream is one output, and not a sequence of outputs."""
    from diffusers.hooks.taylorseer_cache import _TAYLORSEER_CACHE_HOOK

    for block in families.blocks_of(model).values():
        registry: Any = getattr(block, "_diffusers_hook", None)
        hook = None if registry is None else registry.get_hook(_TAYLORSEER_CACHE_HOOK)
        if hook is not None:
            hook.state_manager._state_cls = _stream_state()


@functools.cache
def _stream_state() -> type:
    from diffusers.hooks.taylorseer_cache import TaylorSeerState

    class StreamState(TaylorSeerState):
        """What TaylorSeer knows of a block that it skips: shape, dtype and device of its outputs."""

        def update(self, outputs: Any) -> None:
            wrapped: Any = (outputs,) if isinstance(outputs, DepthStream) else outputs
            super().update(wrapped)

    return StreamState
