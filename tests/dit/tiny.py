"""The smallest models of every supported class, with weights and inputs that exercise them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

LAYERS = 3
TEXT_TOKENS = 5


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _flux_inputs(batch: int, size: int) -> dict[str, Any]:
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1).reshape(-1, 2)
    return {
        "hidden_states": _randn(batch, size * size, 4),
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
        "pooled_projections": _randn(batch, 8),
        "timestep": torch.tensor([0.3, 0.8], dtype=torch.float64)[:batch],
        "img_ids": torch.cat([torch.zeros(size * size, 1), grid], -1),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
    }


def _sd3_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": _randn(batch, 4, 2 * size, 2 * size),
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
        "pooled_projections": _randn(batch, 8),
        "timestep": torch.tensor([300.0, 800.0], dtype=torch.float64)[:batch],
    }


def _text_mask(batch: int) -> Tensor:
    mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.long)
    mask[-1, 3:] = 0
    return mask


def _video_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": _randn(batch, 4, 2, size, size),
        "timestep": torch.tensor([300.0, 800.0], dtype=torch.float64)[:batch],
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
    }


def _hunyuan_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        **_video_inputs(batch, size),
        "encoder_attention_mask": _text_mask(batch),
        "pooled_projections": _randn(batch, 8),
        "guidance": torch.full((batch,), 6000.0, dtype=torch.float64),
    }


def _hunyuan15_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        **_video_inputs(batch, size),
        "encoder_attention_mask": _text_mask(batch),
        "encoder_hidden_states_2": _randn(batch, TEXT_TOKENS, 8),
        "encoder_attention_mask_2": _text_mask(batch),
        "image_embeds": torch.zeros(batch, 3, 8, dtype=torch.float64),
    }


def _flux2_inputs(batch: int, size: int) -> dict[str, Any]:
    inputs = _flux_inputs(batch, size)
    del inputs["pooled_projections"]
    inputs["img_ids"] = torch.cat([inputs["img_ids"], torch.zeros(size * size, 1)], -1)
    inputs["txt_ids"] = torch.zeros(TEXT_TOKENS, 4)
    return {**inputs, "guidance": torch.full((batch,), 3.5, dtype=torch.float64)}


def _chroma_inputs(batch: int, size: int) -> dict[str, Any]:
    inputs = _flux_inputs(batch, size)
    del inputs["pooled_projections"]
    mask = torch.cat([_text_mask(batch), torch.ones(batch, size * size, dtype=torch.long)], 1)
    return {**inputs, "attention_mask": mask.double()}


def _qwen_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": _randn(batch, size * size, 16),
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
        "encoder_hidden_states_mask": _text_mask(batch),
        "timestep": torch.tensor([0.3, 0.8], dtype=torch.float64)[:batch],
        "img_shapes": [[(1, size, size)]] * batch,
    }


def _cogview4_inputs(batch: int, size: int) -> dict[str, Any]:
    sizes = torch.full((batch, 2), 64.0, dtype=torch.float64)
    return {
        "hidden_states": _randn(batch, 4, 2 * size, 2 * size),
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
        "timestep": torch.tensor([300.0, 800.0], dtype=torch.float64)[:batch],
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": torch.zeros_like(sizes),
    }


def _ltx_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": _randn(batch, 2 * size * size, 4),
        "encoder_hidden_states": _randn(batch, TEXT_TOKENS, 8),
        "encoder_attention_mask": _text_mask(batch),
        "timestep": torch.tensor([300.0, 800.0], dtype=torch.float64)[:batch],
        "num_frames": 2,
        "height": size,
        "width": size,
    }


def _without(inputs: Callable[[int, int], dict[str, Any]], *names: str) -> Callable[[int, int], dict[str, Any]]:
    def reduced(batch: int, size: int) -> dict[str, Any]:
        return {name: value for name, value in inputs(batch, size).items() if name not in names}

    return reduced


def _cogvideox_inputs(batch: int, size: int) -> dict[str, Any]:
    inputs = _video_inputs(batch, size)
    return {**inputs, "hidden_states": inputs["hidden_states"].transpose(1, 2).contiguous()}


def _easyanimate_inputs(batch: int, size: int) -> dict[str, Any]:
    inputs = _video_inputs(batch, size)
    inputs["encoder_hidden_states_t5"] = None
    return inputs


def _mochi_inputs(batch: int, size: int) -> dict[str, Any]:
    return {**_video_inputs(batch, size), "encoder_attention_mask": _text_mask(batch).bool()}


# fmt: off
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
_SD3: dict[str, Any] = {
    **_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS,
    "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8, "pos_embed_max_size": 8,
}
_FLUX: dict[str, Any] = {
    **_HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": LAYERS, "joint_attention_dim": 8,
    "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4),
}
_HUNYUAN: dict[str, Any] = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": LAYERS,
    "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 8, "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 2, 4),
}

# name: (class, config, inputs for (batch, size))
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int, int], dict[str, Any]]]] = {
    "sd3": ("SD3Transformer2DModel", _SD3, _sd3_inputs),
    "sd35": (
        "SD3Transformer2DModel",
        {**_SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        _sd3_inputs,
    ),
    "flux": ("FluxTransformer2DModel", _FLUX, _flux_inputs),
    "flux-guidance": (
        "FluxTransformer2DModel",
        {**_FLUX, "guidance_embeds": True},
        lambda batch, size: {**_flux_inputs(batch, size), "guidance": torch.full((batch,), 3.5, dtype=torch.float64)},
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            **_HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": LAYERS, "joint_attention_dim": 8,
            "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2),
        },
        _flux2_inputs,
    ),
    "hunyuan-video": ("HunyuanVideoTransformer3DModel", _HUNYUAN, _hunyuan_inputs),
    "hunyuan-video-token-replace": (
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "image_condition_type": "token_replace", "guidance_embeds": False},
        _without(_hunyuan_inputs, "guidance"),
    ),
    "hunyuan-video-1.5": (
        "HunyuanVideo15Transformer3DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS, "num_refiner_layers": 1,
            "text_embed_dim": 8, "text_embed_2_dim": 8, "image_embed_dim": 8, "rope_axes_dim": (2, 2, 4),
            "target_size": 16, "task_type": "t2v",
        },
        _hunyuan15_inputs,
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS, "time_embed_dim": 4,
            "text_embed_dim": 8, "sample_width": 4, "sample_height": 4, "sample_frames": 5, "patch_size": 2,
            "max_text_seq_length": TEXT_TOKENS,
        },
        _cogvideox_inputs,
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {
            **_HEADS, "in_channels": 4, "num_layers": LAYERS, "pooled_projection_dim": 12, "text_embed_dim": 8,
            "time_embed_dim": 4,
        },
        _mochi_inputs,
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {
            **_HEADS, "in_channels": 16, "out_channels": 4, "num_layers": LAYERS, "joint_attention_dim": 8,
            "axes_dims_rope": (4, 2, 2),
        },
        _qwen_inputs,
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            **_HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": LAYERS, "joint_attention_dim": 8,
            "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 16, "approximator_hidden_dim": 8,
            "approximator_layers": 1,
        },
        _chroma_inputs,
    ),
    "cogview4": (
        "CogView4Transformer2DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS, "text_embed_dim": 8,
            "time_embed_dim": 8, "condition_dim": 4, "patch_size": 2, "sample_size": 8, "rope_axes_dim": (8, 8),
        },
        _cogview4_inputs,
    ),
    "easyanimate": (
        "EasyAnimateTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "num_layers": LAYERS, "mmdit_layers": 2,
            "text_embed_dim": 8, "text_embed_dim_t5": None, "time_embed_dim": 8, "patch_size": 2, "sample_width": 8,
            "sample_height": 8, "after_norm": True,
        },
        _easyanimate_inputs,
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            **_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 2,
            "num_single_dit_layers": LAYERS, "joint_attention_dim": 8, "caption_projection_dim": 16, "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        _without(_sd3_inputs, "pooled_projections"),
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS, "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        _ltx_inputs,
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
            "freq_dim": 16, "ffn_dim": 32, "num_layers": LAYERS, "rope_max_seq_len": 32,
        },
        _video_inputs,
    ),
    "wan-raw-cross-attention": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
            "freq_dim": 16, "ffn_dim": 32, "num_layers": LAYERS, "rope_max_seq_len": 32, "cross_attn_norm": False,
        },
        _video_inputs,
    ),
}
# fmt: on
# These compute norms in fp32 whatever the model's dtype is.
FP32_NORMS = ("mochi", "wan", "wan-raw-cross-attention", "ltx", "auraflow", "easyanimate")


def stock_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A stock model, all of whose parameters are random: zero gates and zero biases would hide mistakes."""
    class_name, config, _ = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(diffusers, class_name)(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.normal_(0.0, fan_in**-0.5 if parameter.ndim > 1 else 0.3)
    return model.to(dtype).eval()


def inputs_for(name: str, dtype: torch.dtype = torch.float64, batch: int = 2, size: int = 4, seed: int = 1) -> Any:
    """Inputs for one forward pass, with `return_dict=False`."""
    torch.manual_seed(seed)
    inputs = MODELS[name][2](batch, size)
    cast = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float64 else value
        for key, value in inputs.items()
    }
    return {**cast, "return_dict": False}


def randomise_queries(model: nn.Module, seed: int = 2, scale: float = 0.5) -> None:
    """Random depth parameters, large enough to move every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".depth" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max()).item()
