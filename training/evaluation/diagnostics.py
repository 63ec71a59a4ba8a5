"""What happens along the depth of a model: the size of what each sublayer reads, and the gradient at its output.

Works on stock and AttnRes models alike: both read the residual stream through the same norms. In an AttnRes model the
norm's reader has already turned the stream into a tensor when the hooks here see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import attnres_vision

# (what reads the stream, what writes to it) within a block of timm's isotropic models
_SUBLAYERS = (("norm1", "attn"), ("norm2", "mlp"))


def sublayers(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Name, reading norm and writing module of every sublayer of `model.blocks`, in depth order."""
    found = []
    for name, block in model.named_modules():
        if re.fullmatch(r"blocks\.\d+", name):
            for norm, writer in _SUBLAYERS:
                if isinstance(getattr(block, norm, None), nn.Module) and isinstance(
                    getattr(block, writer, None), nn.Module
                ):
                    found.append((f"{name}.{writer}", getattr(block, norm), getattr(block, writer)))
    return found


def depth_profile(model: nn.Module, forward: Callable[[], torch.Tensor]) -> list[dict[str, Any]]:
    """Hidden-state RMS and gradient norm of every sublayer, in depth order.

    Args:
        model: the model, with `blocks` of timm's names; a model without them has an empty profile.
        forward: runs the model on a fixed batch and returns the loss.

    Returns:
        One `{"sublayer", "hidden_rms", "output_rms", "gradient_norm"}` each: the RMS of the tensor that the sublayer's
        norm reads, the RMS of the sublayer's output, and the 2-norm of the loss's gradient with respect to that output.
    """
    layers = sublayers(model)
    if not layers:  # and no forward pass, whose graph may take more memory than a training step
        return []
    read: dict[int, float] = {}
    written: dict[int, torch.Tensor] = {}
    handles = []
    for index, (_, norm, writer) in enumerate(layers):

        def see(module: nn.Module, args: tuple[Any, ...], index: int = index) -> None:
            read[index] = _rms(args[0])

        def keep(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor, index: int = index) -> None:
            written[index] = output

        handles += [norm.register_forward_pre_hook(see), writer.register_forward_hook(keep)]
    was_training = model.training
    model.eval()
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    # autograd.grad and not backward: the parameters' gradients, and DDP's hooks on them, stay untouched
    seen = sorted(index for index in written if written[index].requires_grad)
    gradients = torch.autograd.grad(loss, [written[index] for index in seen]) if seen else ()
    return [
        {
            "sublayer": layers[index][0],
            "hidden_rms": read[index],
            "output_rms": _rms(written[index]),
            "gradient_norm": float(gradient.detach().double().norm()),
        }
        for index, gradient in zip(seen, gradients, strict=True)
    ]


def depth_weights(model: nn.Module, forward: Callable[[], Any]) -> list[dict[str, Any]]:
    """Mean weight of every source of every reader over a batch; empty for a model without depth attention.

    Returns:
        One `{"reader", "stream", "sources", "weights"}` per reader, in depth order; the streams of a diffusion model
        ("image", "text", "joint") have readers of their own.
    """
    named = attnres_vision.readers(model)
    if not named:
        return []
    was_training = model.training
    model.eval()
    with torch.no_grad(), attnres_vision.record_depth_weights(model) as record:
        forward()
    model.train(was_training)
    names = record.source_names()
    return [
        {
            "reader": reader,
            "stream": named[reader].stream,
            "sources": list(names[reader]),
            "weights": weights.float().cpu().tolist(),
        }
        for reader, weights in record.mean().items()
    ]


def depth_weights_by_timestep(
    model: nn.Module, forward: Callable[[float], Any], sigmas: Sequence[float]
) -> list[dict[str, Any]]:
    """`depth_weights` of a diffusion model at several noise levels: do readers choose otherwise in noise?

    Args:
        model: the model.
        forward: runs the model on the same fixed clips and noise at the noise level sigma, 0 (the clip) to 1 (noise).
        sigmas: the noise levels.

    Returns:
        `{"sigma", "readers"}` for each, readers as `depth_weights` returns them; empty without depth attention.
    """
    if not attnres_vision.readers(model):
        return []
    return [{"sigma": sigma, "readers": depth_weights(model, partial(forward, sigma))} for sigma in sigmas]


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().pow(2).mean().sqrt())
