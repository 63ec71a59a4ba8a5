"""The norm that takes a read: LayerNorm or RMSNorm, with affine parameters, with adaLN's scale and shift, or bare."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("layer", "rms")


@dataclasses.dataclass(frozen=True)
class Norm:
    """`y = (normalise(h) * weight + bias) * (1 + scale) + shift` over the last dimension.

    Args:
        kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        eps: epsilon of the norm.
        weight, bias: (D,) or None. For "layer" both of the dtype of h, or both fp32 where h is fp16 or bf16, as
            F.layer_norm wants it; for "rms" of any floating dtype, as F.rms_norm takes it.
        scale, shift: (B, D) or None, one modulation per sample, as in adaLN (arXiv 2212.09748). Any floating dtype.

    Raises:
        ValueError: an unknown kind, a negative eps, or a bias on an RMSNorm.
    """

    kind: str = "layer"
    eps: float = 1e-6
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"norm.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.eps >= 0:
            raise ValueError(f"norm.eps must be zero or positive, got {self.eps}")
        if self.kind == "rms" and self.bias is not None:
            raise ValueError("norm.bias must be None for norm.kind 'rms', got a tensor")

    @staticmethod
    def of(module: nn.LayerNorm | nn.RMSNorm, scale: Tensor | None = None, shift: Tensor | None = None) -> Norm:
        """The norm that a module computes (eps None of an nn.RMSNorm is that of fp32), with a modulation behind it."""
        if isinstance(module, nn.LayerNorm):
            return Norm("layer", module.eps, module.weight, module.bias, scale, shift)
        if isinstance(module, nn.RMSNorm):
            return Norm("rms", 1.1920929e-07 if module.eps is None else module.eps, module.weight, None, scale, shift)
        raise TypeError(f"norm must be a Norm, nn.LayerNorm or nn.RMSNorm, got {type(module).__name__}")

    @property
    def is_modulated(self) -> bool:
        return self.scale is not None or self.shift is not None

    def check(self, source: Tensor, dtype: torch.dtype) -> None:
        """Raise for parameters that do not fit a source (B, ..., D), or a read of this dtype."""
        width = source.shape[-1]
        allowed = {"weight": (width,), "bias": (width,), "scale": (source.shape[0], width)}
        allowed["shift"] = allowed["scale"]
        for name, shape in allowed.items():
            value = getattr(self, name)
            if value is not None and (tuple(value.shape) != shape or value.device != source.device):
                raise ValueError(
                    f"norm.{name} must have shape {shape} on {source.device}, got {tuple(value.shape)} on "
                    f"{value.device}"
                )
        if self.is_modulated and source.dim() < 3:
            raise ValueError(f"norm.scale and norm.shift need sources (B, ..., D), got {tuple(source.shape)}")

        self.check_dtypes(dtype)

    def check_dtypes(self, dtype: torch.dtype) -> None:
        """Raise a TypeError for parameters that this norm of a read of this dtype cannot take."""
        given = {name: getattr(self, name) for name in ("weight", "bias", "scale", "shift")}
        given = {name: value.dtype for name, value in given.items() if value is not None}
        for name, found in given.items():
            if not found.is_floating_point:
                raise TypeError(f"norm.{name} must be a floating-point tensor, got a tensor of {found}")
        affine = {name: given[name] for name in ("weight", "bias") if name in given}
        allowed = (dtype, torch.float32) if dtype in (torch.float16, torch.bfloat16) else (dtype,)
        if self.kind == "layer" and affine and (len(set(affine.values())) > 1 or not {*affine.values()} <= {*allowed}):
            listed = " and ".join(f"norm.{name} of {found}" for name, found in affine.items())
            raise TypeError(
                f"the parameters of a LayerNorm must have the dtype of what it reads, "
                f"{' or '.join(map(str, allowed))}, got {listed}: cast them, or the sources"
            )

    def apply(self, hidden: Tensor) -> Tensor:
        """The norm of (B, ..., D) by PyTorch's own functions, in the dtype of `hidden` whatever the parameters'."""
        return self.modulate(self.normalise(hidden)).to(hidden.dtype)

    def normalise(self, hidden: Tensor) -> Tensor:
        """In the widest dtype of what takes part: PyTorch's norms want one (its LayerNorm on a GPU even for fp32)."""
        shape, weight, bias = hidden.shape[-1:], self.weight, self.bias
        if weight is not None and weight.dtype != hidden.dtype:
            wide = torch.promote_types(hidden.dtype, weight.dtype)
            hidden, weight = hidden.to(wide), weight.to(wide)
        if self.kind == "layer":
            hidden = hidden if bias is None else hidden.to(bias.dtype)
            return F.layer_norm(hidden, shape, weight, bias, self.eps)
        return F.rms_norm(hidden, shape, weight, self.eps)

    def modulate(self, normed: Tensor) -> Tensor:
        if self.scale is not None:
            normed = normed * (1 + _per_sample(self.scale, normed))
        return normed if self.shift is None else normed + _per_sample(self.shift, normed)


def _per_sample(vector: Tensor, like: Tensor) -> Tensor:
    """(B, D) as (B, 1, ..., D)."""
    return vector.view(vector.shape[0], *[1] * (like.dim() - 2), vector.shape[-1])
