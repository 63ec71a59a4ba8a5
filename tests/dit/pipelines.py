"""Stock pipelines made of tiny, random components: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tests.dit.tiny import stock_model

WORDS = ("a", "photo", "of", "the", "sea", "at", "night", "two", "dogs", "<pad>", "<unk>", "<s>", "</s>")
PROMPT = "a photo of the sea at night"


def tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", bos_token="<s>",
        model_max_length=16,
    )  # fmt: skip


def clip(projection: bool, width: int = 4) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=4, pad_token_id=9, bos_token_id=11, eos_token_id=12,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=9
    )
    return transformers.T5EncoderModel(config).eval()


def image_vae(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=channels, block_out_channels=(4, 4), norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0,
    ).eval()  # fmt: skip


def sd3() -> tuple[Any, dict[str, Any]]:
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=stock_model("sd35", torch.float32), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4), text_encoder=clip(True), tokenizer=tokenizer(), text_encoder_2=clip(True),
        tokenizer_2=tokenizer(), text_encoder_3=t5(), tokenizer_3=tokenizer(),
    )  # fmt: skip
    return pipe, {"height": 16, "width": 16, "guidance_scale": 4.0, "max_sequence_length": 8}


def flux() -> tuple[Any, dict[str, Any]]:
    pipe = diffusers.FluxPipeline(
        transformer=stock_model("flux", torch.float32), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(1), text_encoder=clip(False, width=8), tokenizer=tokenizer(), text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
    )  # fmt: skip
    return pipe, {"height": 16, "width": 16, "max_sequence_length": 8}


def hunyuan_video() -> tuple[Any, dict[str, Any]]:
    llama = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=9, bos_token_id=11, eos_token_id=12,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2,
    ).eval()  # fmt: skip
    pipe = diffusers.HunyuanVideoPipeline(
        transformer=stock_model("hunyuan-video", torch.float32), vae=vae,
        text_encoder=transformers.LlamaModel(llama).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), tokenizer=tokenizer(),
        text_encoder_2=clip(False, width=8), tokenizer_2=tokenizer(),
    )  # fmt: skip
    template = {"template": "{}", "crop_start": 0}
    return pipe, {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 8, "prompt_template": template}


def cogvideox() -> tuple[Any, dict[str, Any]]:
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_height=32,
        sample_width=32,
    ).eval()  # fmt: skip
    pipe = diffusers.CogVideoXPipeline(
        transformer=stock_model("cogvideox", torch.float32), vae=vae, scheduler=diffusers.CogVideoXDDIMScheduler(),
        text_encoder=t5(), tokenizer=tokenizer(),
    )  # fmt: skip
    return pipe, {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 5, "guidance_scale": 4.0}


def wan() -> tuple[Any, dict[str, Any]]:
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    pipe = diffusers.WanPipeline(
        transformer=stock_model("wan", torch.float32), vae=vae, text_encoder=t5(), tokenizer=tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip
    return pipe, {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 8, "guidance_scale": 4.0}


PIPELINES = {"sd3": sd3, "flux": flux, "hunyuan-video": hunyuan_video, "cogvideox": cogvideox, "wan": wan}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline with a stock transformer, and the arguments to call it with."""
    torch.manual_seed(0)
    pipe, arguments = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe, {**arguments, "prompt": PROMPT, "num_inference_steps": 2, "output_type": "pt"}


def generate(pipe: Any, arguments: dict[str, Any], seed: int = 0) -> torch.Tensor:
    output = pipe(**arguments, generator=torch.Generator().manual_seed(seed))
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))
