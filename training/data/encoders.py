"""Clips to latents and back, and captions to embeddings, by the VAE and the text encoders of a diffusers pipeline.

Latents are scaled as the pipelines do it, so that a model trained on them works in its pipeline. A pipeline's own
`encode_prompt` embeds captions. Everything is loaded from a folder; nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from torch import Tensor, nn

from training.data.text import Text

# What `encode_prompt` of each pipeline gives back, in its order. None of them gives more than is named here, but for
# the embeddings of a negative prompt. CogVideoX attends to its padding; Wan sets it to zero.
_PROMPTS: dict[str, tuple[str, ...]] = {
    "CogVideoXPipeline": ("text",),
    "HunyuanVideoPipeline": ("text", "pooled", "text_mask"),
    "HunyuanVideo15Pipeline": ("text", "text_mask", "text_2", "text_mask_2"),
    "LTXPipeline": ("text", "text_mask"),
    "MochiPipeline": ("text", "text_mask"),
    "WanPipeline": ("text",),
}


def load_text_pipeline(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline at `folder` without its transformers.

    Raises:
        ValueError: there is no pipeline, or one whose embeddings are not known.
    """
    index = pipeline_index(folder)
    name = index["_class_name"]
    without: dict[str, Any] = {part: None for part in index if part.startswith("transformer")}
    cls = getattr(diffusers, name)
    return cls.from_pretrained(folder, **without, dtype=dtype, local_files_only=True).to(device)


def pipeline_index(folder: str) -> dict[str, Any]:
    """`model_index.json` of a pipeline whose embeddings are known; else a `ValueError`."""
    try:
        index = json.loads((Path(folder) / "model_index.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"pipeline must be the folder of a diffusers pipeline, got {folder!r}: {error}") from error
    if index.get("_class_name") not in _PROMPTS:
        raise ValueError(
            f"pipeline must be one of {', '.join(sorted(_PROMPTS))} for its text embeddings, got "
            f"{index.get('_class_name')} in {folder!r}"
        )
    return index


@torch.no_grad()
def embed_caption(pipeline: Any, caption: str, options: dict[str, Any]) -> Text:
    """One caption's embeddings, without the batch dimension, as the pipeline makes them.

    Args:
        pipeline: of `load_text_pipeline`.
        caption: the caption; `""` is the empty one of classifier-free guidance.
        options: further arguments of `encode_prompt`, such as `max_sequence_length`.

    Returns:
        `text` (L, D), `text_mask` (L,) bool and `pooled` (D,), of no channels where the model has none; for
        HunyuanVideo 1.5 also `text_2` and `text_mask_2`, of its second encoder.
    """
    if "do_classifier_free_guidance" in inspect.signature(pipeline.encode_prompt).parameters:
        options = {**options, "do_classifier_free_guidance": False}
    output = pipeline.encode_prompt(prompt=caption, **options)
    name_of_class = type(pipeline).__name__
    found = {name: value[0] for name, value in zip(_PROMPTS[name_of_class], output, strict=False)}
    if "text_mask" not in found:
        written = found["text"].abs().amax(-1) > 0
        found["text_mask"] = written if name_of_class == "WanPipeline" else torch.ones_like(written)
    found.setdefault("pooled", found["text"].new_zeros(0))
    return {name: value.bool() if "mask" in name else value for name, value in found.items()}


def vae_folder(folder: str | Path) -> Path:
    """The folder of the VAE: `folder` itself, or its part `vae` if it is a pipeline; else a `ValueError`."""
    for path in (Path(folder) / "vae", Path(folder)):
        if (path / "config.json").is_file():
            return path
    raise ValueError(f"vae must be the folder of a diffusers VAE (with config.json) or pipeline, got {str(folder)!r}")


def load_vae(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """The VAE at `folder`, or in the pipeline there.

    Raises:
        ValueError: there is none, or its latents are not scaled by numbers in its config.
    """
    path = vae_folder(folder)
    name = json.loads((path / "config.json").read_text()).get("_class_name", "")
    cls = getattr(diffusers, name, None)
    if not name.startswith("Autoencoder") or cls is None:
        raise ValueError(f"vae must be an AutoencoderKL or its like in diffusers, got {name or 'no class'} in {path}")
    vae = cls.from_pretrained(path, dtype=dtype, local_files_only=True).to(device).eval().requires_grad_(False)
    if hasattr(vae, "bn"):
        raise ValueError(f"vae must have its scale in its config; {name} normalises by a batch norm of packed latents")
    return vae


def is_video_vae(vae: nn.Module) -> bool:
    """Whether the VAE takes whole clips; an image VAE takes them frame by frame."""
    return any(isinstance(module, nn.Conv3d) for module in vae.modules())


def check_clip_shape(vae: Any, num_frames: int, size: tuple[int, int]) -> None:
    """Raise a `ValueError` if the VAE does not cover such a clip without a rest."""
    config = vae.config
    spatial = vars(vae).get("spatial_compression_ratio") or config.get("scale_factor_spatial")
    spatial = int(spatial or 2 ** (len(config.get("block_out_channels", (1,))) - 1))
    if size[0] % spatial or size[1] % spatial:
        raise ValueError(f"data.size must be multiples of {spatial} for {type(vae).__name__}, got {size}")
    if is_video_vae(vae):
        temporal = vars(vae).get("temporal_compression_ratio") or config.get("temporal_compression_ratio")
        temporal = int(temporal or config.get("scale_factor_temporal") or 1)
        if (num_frames - 1) % temporal:
            raise ValueError(
                f"data.num_frames must be a multiple of {temporal} plus 1 for {type(vae).__name__}, got {num_frames}"
            )


@torch.no_grad()
def encode_clip(
    vae: Any, clip: Tensor, posterior: Literal["mode", "sample"] = "mode", generator: torch.Generator | None = None
) -> Tensor:
    """The scaled latents of one clip.

    Args:
        vae: of `load_vae`.
        clip: (3, F, H, W) in -1..1.
        posterior: its mode, or a sample drawn with `generator`.
        generator: on the VAE's device.

    Returns:
        (C, F', H', W').
    """
    clip = clip.to(vae.device, vae.dtype)
    video = is_video_vae(vae)
    output = vae.encode(clip[None] if video else clip.transpose(0, 1))
    if hasattr(output, "latent_dist"):
        drawn = output.latent_dist
        latents = drawn.mode() if posterior == "mode" else drawn.sample(generator)
    else:  # deterministic autoencoders
        latents = output.latent
    return scale_latents(vae, latents[0] if video else latents.transpose(0, 1))


@torch.no_grad()
def decode_clips(vae: Any, latents: Tensor) -> Tensor:
    """Pixels (B, 3, F, H, W) in about -1..1 of scaled latents (B, C, F', H', W'), one clip at a time for memory."""
    raw = [unscale_latents(vae, clip.to(vae.device, vae.dtype)) for clip in latents]
    if is_video_vae(vae):
        return torch.cat([vae.decode(clip[None]).sample for clip in raw])
    return torch.stack([vae.decode(clip.transpose(0, 1)).sample.transpose(0, 1) for clip in raw])


def scale_latents(vae: Any, latents: Tensor) -> Tensor:
    """What the pipelines' transformers see of raw latents (C, F, H, W): the inverse of what they do before decoding."""
    shift, spread = _scale_of(vae, latents)
    return (latents - shift) / spread


def unscale_latents(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `scale_latents`."""
    shift, spread = _scale_of(vae, latents)
    return latents * spread + shift


def _scale_of(vae: Any, latents: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Shift and spread of raw latents: per channel, in buffers (LTX) or lists in the config, or single numbers."""
    mean, std = (_per_channel(vae, name, latents) for name in ("latents_mean", "latents_std"))
    factor = vae.config.get("scaling_factor") or 1.0
    if mean is not None and std is not None:
        return mean, std / factor
    return vae.config.get("shift_factor") or 0.0, 1 / factor


def _per_channel(vae: Any, name: str, latents: Tensor) -> Tensor | None:
    value = dict(vae.named_buffers()).get(name, vae.config.get(name))
    return None if value is None else torch.as_tensor(value).to(latents).view(-1, *[1] * (latents.dim() - 1))
