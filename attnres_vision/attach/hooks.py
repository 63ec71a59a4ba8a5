"""Hooks by which the modules of a host model read the depth stream.

They are module-level functions that look at the module they are called with: a closure could not be pickled, and a
deepcopy of it would keep pointing at the original.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnres_vision.attach import begin, families
from attnres_vision.attach.arguments import argument, replaced
from attnres_vision.stream.lazy_read import LazyRead, may_be_lazy
from attnres_vision.stream.reader import DepthAttention
from attnres_vision.stream.stream import PLAIN, DepthStream


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
            stream.close_block()
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


def _read(module: nn.Module, depth: DepthAttention, stream: DepthStream) -> Tensor | LazyRead:
    plain = depth.query is not None and stream.host_view == PLAIN
    return depth.lazy(stream) if plain and may_be_lazy(module, depth, depth.kernel(stream)) else depth(stream)


def check_gradients(stream: DepthStream, depth: DepthAttention) -> None:
    """Raise for a final read of a stream with gradients in its embedding but not in the outputs of its layers.

    Reentrant checkpointing makes one: it sees no tensor in a DepthStream, and the layers' gradients would be lost. The
    read may be in a checkpoint itself, so the gradient mode says nothing.
    """
    embedding, block = stream.blocks[0], stream.open_block
    # Not `sources()`, which would make the sum that the final read's kernel makes
    newest = [stream.blocks[-1]] if block is None else [block.total, block.pending]
    has_gradients = any(value is not None and value.requires_grad for value in newest)
    if embedding.requires_grad and not has_gradients and embedding.grad_fn is not None:
        raise RuntimeError(
            f"{depth.name!r} of an AttnRes model reads layer outputs that were computed without gradients, although "
            "the embedding has them. Reentrant gradient checkpointing cannot carry a DepthStream: use "
            "use_reentrant=False (timm.layers.set_reentrant_ckpt(False), timm's default). To run the blocks without "
            "gradients on purpose, compute the embedding under torch.no_grad() too"
        )


def read_output(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the last block, where no module behind the blocks can read: the final read is its output."""
    if not isinstance(output, DepthStream):
        return output
    depth = depth_of(block)
    check_gradients(output, depth)
    return depth(output)


# Putting hooks on modules ---------------------------------------------------------------------------------------------


def add_reader(module: nn.Module, reader: DepthAttention, attribute: str = "depth") -> None:
    """Put a reader in front of a module inside a block."""
    module.add_module(attribute, reader)
    if attribute == "depth":  # the hook serves all readers on the module
        module.register_forward_pre_hook(read_stream, with_kwargs=True)


def add_final_reader(model: nn.Module, path: str, reader: DepthAttention) -> None:
    """Put a reader in front of a module behind the blocks, or behind the last block."""
    module = model.get_submodule(path)
    module.__dict__.pop("depth", None)  # a shared one
    module.add_module("depth", reader)
    if path in families.blocks_of(model):
        module.register_forward_hook(read_output)
    else:
        module.register_forward_pre_hook(read_final, with_kwargs=True)


def share_final_reader(model: nn.Module, path: str, owner: str) -> None:
    """Let a module read the finished stream with the reader of `owner`, whose parameters keep their one name."""
    module = model.get_submodule(path)
    module.__dict__["depth"] = depth_of(model.get_submodule(owner))  # past nn.Module, which would register it
    module.register_forward_pre_hook(read_final, with_kwargs=True)


def remove_hooks(module: nn.Module) -> None:
    """Remove what this library hooked on a module. By function, since the handles cannot be kept (nor pickled)."""
    ours = (*begin.HOOKS, read_stream, read_final, read_output)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for attribute in begin.ATTRIBUTES:
        module.__dict__.pop(attribute, None)


def depth_of(module: nn.Module) -> DepthAttention:
    """The reader on a module."""
    depth = module.depth
    assert isinstance(depth, DepthAttention)
    return depth
