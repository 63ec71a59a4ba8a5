"""Context parallelism: diffusers' plans for blocks, carried out before the streams begin.

diffusers splits the inputs of a block in hooks around the block's `forward`, which take tensors only. The AttnRes
classes leave the other entries of a plan to diffusers and split the blocks' inputs themselves, with diffusers' own hook
object, before the embeddings become streams. A depth read is token-wise, so nothing else changes.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from attnres_vision.attach import families
from attnres_vision.stream.stream import DepthStream

ATTRIBUTES = ("depth_split_embeddings", "depth_split_inputs")


def without_blocks(host: nn.Module, plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The entries of a context-parallel plan for other modules, and those for blocks: {block's path: its inputs}."""
    blocks: dict[str, dict[str, Any]] = {}
    rest = dict(plan)
    for pattern, inputs in plan.items():
        matched = [path for path in families.blocks_of(host) if fnmatch.fnmatch(path, pattern)]
        if matched and isinstance(inputs, dict):
            del rest[pattern]
            for path in matched:
                blocks[path] = {**blocks.get(path, {}), **inputs}
    return rest, blocks


def split_blocks(host: nn.Module, blocks: dict[str, dict[str, Any]], config: Any) -> None:
    """Hook the blocks in `blocks` so that every process goes on with its own tokens."""
    from diffusers.hooks.context_parallel import ContextParallelSplitHook

    keywords = [entry.keyword for entry in families.family_of(host).streams]
    for path, inputs in blocks.items():
        block: Any = host.get_submodule(path)
        kinds = {
            "depth_split_embeddings": {name: split for name, split in inputs.items() if name in keywords},
            "depth_split_inputs": {name: split for name, split in inputs.items() if name not in keywords},
        }
        for (attribute, wanted), hook in zip(kinds.items(), (split_embeddings, split_inputs), strict=True):
            if wanted:
                splitter = ContextParallelSplitHook(wanted, config)
                splitter.initialize_hook(block)
                setattr(block, attribute, splitter)
                block.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def remove_splits(host: nn.Module) -> None:
    """Remove what `split_blocks` hooked on the blocks."""
    for block in families.blocks_of(host).values():
        for key in [key for key, hook in block._forward_pre_hooks.items() if hook in (split_embeddings, split_inputs)]:
            del block._forward_pre_hooks[key]
            block._forward_pre_hooks_with_kwargs.pop(key, None)
        for attribute in ATTRIBUTES:
            block.__dict__.pop(attribute, None)


def split_embeddings(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the first block: the embeddings, unless they were split and begun before a checkpoint."""
    if any(isinstance(value, DepthStream) for value in (*args, *kwargs.values())):
        return args, kwargs
    return block.depth_split_embeddings.pre_forward(block, *args, **kwargs)


def split_inputs(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a block: what else its plan splits, such as a mask."""
    return block.depth_split_inputs.pre_forward(block, *args, **kwargs)
