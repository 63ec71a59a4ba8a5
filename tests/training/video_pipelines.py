"""Video pipelines of tiny, random components, in the diffusers format on disk: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tests.dit.pipelines import cogvideox, hunyuan_video, t5, tokenizer, wan
from tests.dit.tiny import stock_model


def _with_channels(name: str, channels: int) -> Any:
    stock = stock_model(name, torch.float32)
    return type(stock).from_config({**stock.config, "in_channels": channels})


def _wan() -> Any:
    pipe = wan()[0]
    pipe.vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[0.5, 2.0, 1.0, 3.0])
    return pipe


def _ltx() -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(4, 4), decoder_block_out_channels=(4, 4),
        down_block_types=("LTXVideoDownBlock3D",) * 2, layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True), decoder_spatio_temporal_scaling=(True, True), patch_size=2,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1,) * 2,
        downsample_type=("conv",) * 2, scaling_factor=0.5,
    ).eval()  # fmt: skip
    vae.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    vae.latents_std.copy_(torch.tensor([0.5, 2.0, 1.0, 3.0]))
    return diffusers.LTXPipeline(
        transformer=stock_model("ltx", torch.float32), vae=vae, text_encoder=t5(), tokenizer=tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def _mochi() -> Any:
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5, scaling_factor=0.5,
    ).eval()  # fmt: skip
    return diffusers.MochiPipeline(
        transformer=_with_channels("mochi", 12), vae=vae, text_encoder=t5(), tokenizer=tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), force_zeros_for_empty_prompt=True,
    )  # fmt: skip


def _hunyuan_video15() -> Any:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=8,
    ).eval()  # fmt: skip
    config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [1, 1, 0]},
    )  # fmt: skip
    characters = transformers.ByT5Tokenizer()
    characters.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    small_t5 = transformers.T5Config(vocab_size=400, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    # the pipeline also gives the transformer a first frame (none for text to video) and its mask
    transformer = _with_channels("hunyuan-video-1.5", 9)
    return diffusers.HunyuanVideo15Pipeline(
        transformer=transformer, vae=vae,
        text_encoder=transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel(config).eval(),
        tokenizer=characters, text_encoder_2=transformers.T5EncoderModel(small_t5).eval(),
        tokenizer_2=transformers.ByT5Tokenizer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    )  # fmt: skip


_SHORT = {"max_sequence_length": 8}
_TEMPLATE = {"prompt_template": {"template": "{}", "crop_start": 0}}
# name: how it is made, further arguments of `encode_prompt`, frames and size of a clip that its VAE takes
PIPELINES: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "hunyuan-video": (lambda: hunyuan_video()[0], {**_SHORT, **_TEMPLATE}, 5, 16),
    "hunyuan-video-1.5": (_hunyuan_video15, {}, 5, 16),
    "cogvideox": (lambda: cogvideox()[0], {"max_sequence_length": 5}, 5, 32),
    "mochi": (_mochi, _SHORT, 7, 16),
    "wan": (_wan, _SHORT, 5, 16),
    "ltx": (_ltx, _SHORT, 5, 32),
}


def save_pipeline(name: str, folder: Path) -> Any:
    """Make a pipeline, save it at `folder` and return it."""
    torch.manual_seed(0)
    pipe = PIPELINES[name][0]()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
