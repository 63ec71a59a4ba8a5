"""Tiny timm models, one per kind of residual stream, with weights that hide nothing.

At their initial values norms, LayerScale and class tokens are nearly the identity or nearly zero, and a wrong residual
stream can look right; `randomise` gives every stock parameter a value that matters.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm import layers
from timm.models import mlp_mixer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

import attnres_vision
from attnres_vision import DepthAttention

VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=4, num_classes=7)
MIXER = dict(img_size=32, patch_size=8, embed_dim=48, num_blocks=4, num_classes=7)
VLM = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=4)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A timm model name (a model class where a name fixes the width) and the arguments that make it small.

    `fp32_inside`: the stock model has float32 steps of its own, so float64 results agree to float32 rounding only.
    """

    name: str | Callable[..., nn.Module]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=lambda: VIT)
    fp32_inside: bool = False

    def create(self, prefix: str = "", **kwargs: Any) -> nn.Module:
        kwargs = {**self.kwargs, **kwargs}
        return timm.create_model(prefix + self.name, **kwargs) if isinstance(self.name, str) else self.name(**kwargs)


MODELS = {
    "prenorm": Tiny("vit_tiny_patch16_224"),
    "deit3": Tiny("deit3_small_patch16_224"),
    "dinov2-registers": Tiny("vit_small_patch14_reg4_dinov2"),
    "aimv2-rmsnorm": Tiny("aimv2_large_patch14_224"),
    "clip": Tiny("vit_base_patch32_clip_224"),
    "siglip-map": Tiny("vit_base_patch16_siglip_224"),
    "siglip-gap": Tiny("vit_base_patch16_siglip_gap_224"),
    "avg-fc_norm": Tiny("vit_base_patch16_224", VIT | dict(global_pool="avg")),
    "avg-no-fc_norm": Tiny("vit_base_patch16_224", VIT | dict(global_pool="avg", fc_norm=False)),
    "no-final-norm": Tiny("vit_base_patch16_224", VIT | dict(final_norm=False)),
    "parallel-scaling": Tiny("vit_base_patch16_xp_224"),
    "parallel-diff": Tiny("vit_dpwee_patch16_reg1_gap_256"),
    "parallel-things": Tiny("vit_small_patch16_18x2_224"),
    "respost": Tiny("vit_base_patch16_rpn_224"),
    "hybrid-stem": Tiny("vit_tiny_r_s16_p8_224", dict(img_size=64, embed_dim=48, depth=4, num_heads=4, num_classes=7)),
    "deit-distilled": Tiny("deit_tiny_distilled_patch16_224"),
    "eva02": Tiny("eva02_tiny_patch14_224"),
    "dinov3": Tiny("vit_small_patch16_dinov3"),
    "rope-mixed": Tiny("vit_small_patch16_rope_mixed_224"),
    "eva-postnorm": Tiny("eva02_enormous_patch14_clip_224"),
    "eva-no-final-norm": Tiny("vit_pe_spatial_tiny_patch16_512"),
    "naflex": Tiny("naflexvit_base_patch16_gap"),
    "naflex-eva": Tiny("naflexvit_so400m_patch16_siglip", VIT | dict(attn_type="rope", rope_type="axial")),
    "beit": Tiny("beit_base_patch16_224"),
    "relpos": Tiny("vit_relpos_small_patch16_224"),
    "relpos-postnorm": Tiny("vit_relpos_small_patch16_rpn_224"),
    "sam": Tiny("samvit_base_patch16", VIT | dict(global_attn_indexes=(1, 3), window_size=3, neck_chans=16)),
    "mixer": Tiny(MlpMixer, MIXER),
    "resmlp": Tiny(MlpMixer, MIXER | dict(mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine)),
    "gmlp": Tiny(
        MlpMixer, MIXER | dict(mlp_ratio=6, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=layers.GatedMlp)
    ),
    "convit": Tiny("convit_tiny", VIT | dict(embed_dim=12, local_up_to_layer=2)),
    "cait": Tiny("cait_xxs24_224"),
    "xcit": Tiny("xcit_nano_12_p8_224"),
    "deepseek-encoder": Tiny("deepseek_vit_412m_enc", VLM | dict(out_features=11), fp32_inside=True),
    "deepseek-classifier": Tiny("deepseek_vit_412m", VLM | dict(num_classes=7), fp32_inside=True),
    "qwen3-encoder": Tiny("qwen3_vit_88m_enc", VLM),
    "qwen3-classifier": Tiny("qwen3_vit_88m", VLM | dict(num_classes=7)),
}


def stock_model(key: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> nn.Module:
    """The tiny stock model of MODELS[key] with random, non-trivial weights."""
    return randomise(MODELS[key].create(**kwargs)).to(dtype)


def attached_copy(stock: nn.Module, **config: Any) -> nn.Module:
    """An attached deepcopy of a stock model; in blocks of 3 sublayers, unless the config says otherwise."""
    if not {"mode", "num_blocks", "block_size"} & config.keys():
        config["block_size"] = 3  # the tiny models have 4 or 8 sublayers: the last block is short
    return attnres_vision.attach(copy.deepcopy(stock), **config)


def images(key: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    size = MODELS[key].kwargs["img_size"]
    return torch.randn(batch, 3, size, size, dtype=dtype)


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Give the stock parameters and buffers of a model random values that all matter to the output."""
    for name, parameter in model.named_parameters():
        if ".depth." in name:
            continue
        noise = torch.randn_like(parameter)
        last = name.rsplit(".", 1)[-1]
        if "ls" in name.split(".")[-2:-1] or last.startswith("gamma") or ".ls1" in name or ".ls2" in name:
            parameter.copy_(0.3 * (1 + 0.5 * noise))
        elif last == "weight" and parameter.ndim == 1:
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.ndim == 1 or last == "bias":
            parameter.copy_(0.2 * noise)
        elif last == "weight":
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # tokens and position embeddings
            parameter.copy_(0.5 * noise)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def randomise_depth(model: nn.Module, std: float = 0.5) -> nn.Module:
    """Give every depth parameter a random value, so that no reader is the plain residual sum."""
    for module in model.modules():
        if isinstance(module, DepthAttention):
            for parameter in module.parameters():
                parameter.normal_(0, std)
    return model


def regularise(model: nn.Module, rate: float = 0.2) -> nn.Module:
    """Switch on every dropout of a model; drop path comes from `drop_path_rate`."""
    assert any(isinstance(module, layers.DropPath) for module in model.modules())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    return model
