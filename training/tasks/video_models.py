"""Video transformers of diffusers for training: built, frozen where asked, and called alike.

What a class takes besides the noisy clip, the timestep and the text differs; `predict` knows all of them, as their
pipelines in diffusers call them. All are told timesteps in 0..1000. Mochi counts them from noise to data and predicts
`clean - noise`; here it is turned round, so that one objective serves every class.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers import CogVideoXPipeline, LTXPipeline
from torch import Tensor, nn

import dit
from training.config.video import VideoModelConfig
from training.loop.optim import depth_parameters
from training.tasks.objective import LEVELS

_VAE_STEPS, _VAE_STRIDE = 8, 32  # frames and pixels that a latent of LTX stands for
_FRAME_RATE = 25


def build_model(config: VideoModelConfig) -> nn.Module:
    """The transformer of the config, from scratch or with a checkpoint's weights; on `meta`, without weights.

    Depth parameters draw no random number before the standard model is made: all variants start from the same weights.

    Raises:
        ValueError: `model.pretrained` is no folder of this class's checkpoint, or `model.lora.targets` fits nothing.
    """
    cls: Any = getattr(diffusers, config.name)
    if config.pretrained is None:
        model = cls(**config.kwargs)
        if config.zero_init:
            _zero_init(model)
    else:
        # in bf16 at once: in fp32 HunyuanVideo would take 52 GB for a moment
        half = config.frozen_dtype == "bf16" and config.train != "full"
        model = _load(cls, config.pretrained, torch.bfloat16 if half else torch.float32)
    if config.residual == "attnres":
        with torch.random.fork_rng(devices=[]):  # adapters, too, start the same in all variants
            model = dit.convert(model, config.attnres)
    _freeze(model, config)
    if config.grad_checkpointing:
        model.enable_gradient_checkpointing()
    return model


def _load(cls: Any, folder: str, dtype: torch.dtype) -> Any:
    try:
        stored = cls.load_config(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.pretrained must be the folder of a diffusers transformer (with config.json), got {folder!r}"
        ) from error
    if stored.get("_class_name", "").startswith("AttnRes"):
        raise ValueError(
            f"model.pretrained must be a stock checkpoint, got an AttnRes one in {folder!r}: its queries would be lost"
        )
    if stored.get("_class_name", "") != cls.__name__:
        raise ValueError(
            f"model.name must be the class in {folder!r}, {stored.get('_class_name')}, got {cls.__name__!r}"
        )
    if torch.get_default_device().type == "meta":  # counted, not run
        return cls.from_config(stored)
    return cls.from_pretrained(folder, local_files_only=True, torch_dtype=dtype)


def _zero_init(model: Any) -> None:
    """adaLN-zero: every block starts as the identity, and the prediction as zero."""
    linears = [module.linear for module in model.modules() if "Norm" in type(module).__name__ and _modulates(module)]
    for linear in (*linears, model.proj_out):
        nn.init.zeros_(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def _modulates(module: Any) -> bool:
    return isinstance(getattr(module, "linear", None), nn.Linear)


def _freeze(model: Any, config: VideoModelConfig) -> None:
    if config.train != "full":
        model.requires_grad_(False)
    if "lora" in config.train:
        from peft import LoraConfig  # slow to import, and most runs have no adapters

        adapter = LoraConfig(r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules=list(config.lora.targets))
        try:
            model.add_adapter(adapter)
        except ValueError as error:
            raise ValueError(f"model.lora.targets must name layers of {config.name}: {error}") from error
    exact = model._keep_in_fp32_modules or ()  # as diffusers loads them
    if config.name == "HunyuanVideo15Transformer3DModel":
        # Nobody reads what its last block writes to the text: DDP would wait for gradients that do not come.
        last = model.transformer_blocks[-1]
        for module in (last.attn.to_add_out, last.ff_context):
            module.requires_grad_(False)
    for parameter in depth_parameters(model):
        parameter.requires_grad_(not config.freeze_queries and config.train != "lora")
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim > 1 and not any(part in exact for part in name.split("."))
        half = matrix and not parameter.requires_grad and config.frozen_dtype == "bf16"
        parameter.data = parameter.data.to(torch.bfloat16 if half else torch.float32)


def predict(
    model: Any, config: VideoModelConfig, noisy: Tensor, timestep: Tensor, text: Mapping[str, Tensor]
) -> Tensor:
    """The model's prediction, (B, C, F, H, W), as the objective defines it.

    Args:
        model: a model of `build_model`, also wrapped (DDP) or compiled.
        config: the config that it was built from.
        noisy: (B, C, F, H, W).
        timestep: (B,) in 0..1000, 1000 is noise.
        text: `text` (B, L, D), `text_mask` (B, L) and `pooled` (B, D); HunyuanVideo 1.5 also takes `text_2` and
            `text_mask_2`, of its second encoder, and without them sees none, as its pipeline does for most captions.
    """
    output = model(**model_inputs(model, config, noisy, timestep, text), return_dict=False)[0]
    if config.name.startswith("CogVideoX"):
        return output.transpose(1, 2)
    if config.name.startswith("Mochi"):
        return -output
    if config.name.startswith("LTX"):
        p_t, p = _ltx_patches(model)
        frames, height, width = noisy.shape[2] // p_t, noisy.shape[3] // p, noisy.shape[4] // p
        return LTXPipeline._unpack_latents(output, frames, height, width, p, p_t)
    return output


def model_inputs(
    model: Any, config: VideoModelConfig, noisy: Tensor, timestep: Tensor, text: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The keyword arguments of the model's `forward`, by class; see `predict`."""
    arguments = {"hidden_states": noisy, "timestep": timestep, "encoder_hidden_states": text["text"]}
    stored = _bare(model).config
    mask = text["text_mask"].bool()
    # A caption without a token (a tokenizer may make that of "") keeps its first place: a mean over none is nan.
    mask = torch.cat([mask[:, :1] | ~mask.any(1, keepdim=True), mask[:, 1:]], 1)
    if config.name == "HunyuanVideoTransformer3DModel":
        if stored.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, config.guidance * LEVELS, dtype=noisy.dtype)
        return {
            **arguments,
            "encoder_attention_mask": mask,
            "pooled_projections": text["pooled"],
        }
    if config.name == "HunyuanVideo15Transformer3DModel":
        return {**arguments, "encoder_attention_mask": mask, **_hunyuan15(stored, noisy, text)}
    if config.name == "CogVideoXTransformer3DModel":
        clip = noisy.transpose(1, 2)
        return {**arguments, "hidden_states": clip, "image_rotary_emb": _cogvideox_positions(model, clip)}
    if config.name == "MochiTransformer3DModel":
        return {
            **arguments,
            "timestep": LEVELS - timestep,
            "encoder_attention_mask": mask,
        }
    if config.name == "WanTransformer3DModel":  # has no mask: its pipeline zeroes what is behind the caption
        return {**arguments, "encoder_hidden_states": text["text"] * text["text_mask"].to(text["text"])[..., None]}
    p_t, p = _ltx_patches(model)
    return {
        **arguments,
        "hidden_states": LTXPipeline._pack_latents(noisy, p, p_t),
        "encoder_attention_mask": mask,
        "num_frames": noisy.shape[2] // p_t,
        "height": noisy.shape[3] // p,
        "width": noisy.shape[4] // p,
        "rope_interpolation_scale": (_VAE_STEPS / _FRAME_RATE, _VAE_STRIDE, _VAE_STRIDE),
    }


def _hunyuan15(stored: Any, noisy: Tensor, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    batch, channels = noisy.shape[:2]
    given = {}
    if stored.in_channels == 2 * channels + 1:  # the first frame and its mask: empty for text to video
        empty = noisy.new_zeros(batch, channels + 1, *noisy.shape[2:])
        given["hidden_states"] = torch.cat([noisy, empty], 1)
    text_2 = text.get("text_2", noisy.new_zeros(batch, 1, stored.text_embed_2_dim))
    return {
        **given,
        "encoder_hidden_states_2": text_2,
        "encoder_attention_mask_2": text.get("text_mask_2", torch.zeros_like(text_2[..., 0], dtype=torch.bool)),
        "image_embeds": noisy.new_zeros(batch, 1, stored.image_embed_dim),
    }


def _cogvideox_positions(model: Any, clip: Tensor) -> Any:
    """What CogVideoX's pipeline computes; the clip is (B, F, C, H, W)."""
    bare = _bare(model)
    if not bare.config.use_rotary_positional_embeddings:
        return None
    pipeline: Any = SimpleNamespace(vae_scale_factor_spatial=1, transformer=bare)
    frames, height, width = clip.shape[1], clip.shape[3], clip.shape[4]
    return CogVideoXPipeline._prepare_rotary_positional_embeddings(pipeline, height, width, frames, clip.device)


def _ltx_patches(model: Any) -> tuple[int, int]:
    stored = _bare(model).config
    return stored.patch_size_t, stored.patch_size


def _bare(model: Any) -> Any:
    """The model itself, out of DDP and torch.compile, for its config."""
    for name in ("module", "_orig_mod"):
        if name in getattr(model, "_modules", {}):
            return _bare(model._modules[name])
    return model
