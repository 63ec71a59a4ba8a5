"""Reader tables for diffusers: one line per block class, one per model class. See attnres_vision/attach/families.py.

`image` is what a block calls `hidden_states` (the video, in a video model), `text` its `encoder_hidden_states`; JOINT
are both, joined along the tokens in single-stream blocks. A reader sits on the norm in front of a sublayer, or on the
sublayer where nothing is in front of it (LTX's cross-attention). A module in both lists reads both streams.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnres_vision.attach.families import BLOCKS, JOINT, MODELS, ConditionSource, Family, StreamArgument, Sublayers
from attnres_vision.stream.lazy_read import WRAPPERS
from dit.host import diffusers_class, diffusers_host_class

IMAGE = StreamArgument("image", 0, "hidden_states")
TEXT = StreamArgument("text", 1, "encoder_hidden_states")

TWO_NORMS = ("norm1", "norm2")
TWO_CONTEXT_NORMS = ("norm1_context", "norm2_context")
DUAL: dict[str, Sublayers] = {"image": TWO_NORMS, "text": TWO_CONTEXT_NORMS}
SHARED: dict[str, Sublayers] = {"image": TWO_NORMS, "text": TWO_NORMS}
SINGLE: dict[str, Sublayers] = {JOINT: ("norm",)}

_BLOCKS: dict[str, dict[str, Sublayers]] = {
    "attention.JointTransformerBlock": {"image": TWO_NORMS, "text": ("norm1_context", "norm2_context?")},
    "transformers.transformer_flux.FluxTransformerBlock": DUAL,
    "transformers.transformer_flux.FluxSingleTransformerBlock": SINGLE,
    "transformers.transformer_flux2.Flux2TransformerBlock": DUAL,
    "transformers.transformer_flux2.Flux2SingleTransformerBlock": SINGLE,
    "transformers.transformer_chroma.ChromaTransformerBlock": DUAL,
    "transformers.transformer_chroma.ChromaSingleTransformerBlock": SINGLE,
    "transformers.transformer_hunyuan_video.HunyuanVideoTransformerBlock": DUAL,
    "transformers.transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock": SINGLE,
    "transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceTransformerBlock": DUAL,
    "transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceSingleTransformerBlock": SINGLE,
    "transformers.transformer_hunyuan_video15.HunyuanVideo15TransformerBlock": DUAL,
    "transformers.cogvideox_transformer_3d.CogVideoXBlock": SHARED,
    "transformers.transformer_easyanimate.EasyAnimateTransformerBlock": SHARED,
    "transformers.transformer_cogview4.CogView4TransformerBlock": {
        "image": TWO_NORMS,
        "text": ("norm1", "norm2_context"),
    },
    # A post-norm sandwich: norm2 and norm4 read the sublayers' outputs
    "transformers.transformer_mochi.MochiTransformerBlock": {
        "image": ("norm1", "norm3"),
        "text": ("norm1_context", "norm3_context?"),
    },
    "transformers.transformer_qwenimage.QwenImageTransformerBlock": {
        "image": ("img_norm1", "img_norm2"),
        "text": ("txt_norm1", "txt_norm2"),
    },
    # One write per block: the attention's output reaches the MLP, but not the stream
    "transformers.auraflow_transformer_2d.AuraFlowJointTransformerBlock": {
        "image": (TWO_NORMS,),
        "text": (TWO_CONTEXT_NORMS,),
    },
    "transformers.auraflow_transformer_2d.AuraFlowSingleTransformerBlock": {JOINT: (TWO_NORMS,)},
    "transformers.transformer_ltx.LTXVideoTransformerBlock": {"image": ("norm1", "attn2", "norm2")},
    "transformers.transformer_wan.WanTransformerBlock": {"image": ("norm1", "norm2", "norm3")},
}
BLOCKS.update({f"diffusers.models.{_name}": _readers for _name, _readers in _BLOCKS.items()})

# adaLN modules that do nothing with their input but norm it: read and LayerNorm are then one operation.
for _name in (
    "normalization.AdaLayerNormZero",
    "normalization.AdaLayerNormZeroSingle",
    "normalization.SD35AdaLayerNormZeroX",
    "normalization.AdaLayerNormContinuous",
    "transformers.transformer_chroma.ChromaAdaLayerNormZeroPruned",
    "transformers.transformer_chroma.ChromaAdaLayerNormZeroSinglePruned",
    "transformers.transformer_chroma.ChromaAdaLayerNormContinuousPruned",
    "transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceAdaLayerNormZero",
    "transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceAdaLayerNormZeroSingle",
):
    _class = diffusers_class(f"diffusers.models.{_name}")
    if _class is not None:
        WRAPPERS[_class.forward] = "norm"


def inner_width(model: Any, stream: str) -> int:
    """The width of all streams of most models."""
    return int(model.config.num_attention_heads) * int(model.config.attention_head_dim)


def mochi_width(model: Any, stream: str) -> int:
    """Mochi's text stream is narrower than its image stream."""
    return int(model.config.pooled_projection_dim) if stream == "text" else inner_width(model, stream)


def first_row(output: Any) -> Tensor:
    """Chroma's embedding of the timestep for its first modulation vector, of (B, modulations, C)."""
    row: Tensor = output[:, 0]
    return row


def chroma_width(model: Any) -> int:
    return int(model.config.approximator_num_channels)


def dit_family(
    *blocks: str,
    timestep: str | ConditionSource,
    pooled_text: str | None = None,
    final: str = "norm_out",
    streams: tuple[StreamArgument, ...] = (IMAGE, TEXT),
    **options: Any,
) -> Family:
    """The line of a diffusers transformer.

    Args:
        blocks: paths of the containers of its blocks, in depth order.
        timestep: path of the submodule whose output is the time embedding, or its `ConditionSource`.
        pooled_text: the same for the projection of the pooled text embedding, if the model has one.
        final: path of the module that reads the image stream behind the blocks.
        streams: the streams that a block is given; `(IMAGE,)` for models whose text is not a residual stream.
        options: other fields of `Family`.
    """
    condition = {"timestep": timestep if isinstance(timestep, ConditionSource) else ConditionSource(timestep)}
    if pooled_text is not None:
        condition["pooled_text"] = ConditionSource(pooled_text)
    options = {"width": inner_width, "host_class": diffusers_host_class, **options}
    return Family(blocks=blocks, exits=(final,), pruned_exits=(), streams=streams, condition=condition, **options)


_BOTH = ("transformer_blocks", "single_transformer_blocks")
_TIME, _POOLED = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"

for _name, _family in {
    "transformer_sd3.SD3Transformer2DModel": dit_family(
        "transformer_blocks", timestep=_TIME, pooled_text=_POOLED, skips_blocks=True
    ),
    "transformer_flux.FluxTransformer2DModel": dit_family(*_BOTH, timestep=_TIME, pooled_text=_POOLED),
    "transformer_flux2.Flux2Transformer2DModel": dit_family(*_BOTH, timestep="time_guidance_embed.timestep_embedder"),
    "transformer_hunyuan_video.HunyuanVideoTransformer3DModel": dit_family(*_BOTH, timestep=_TIME, pooled_text=_POOLED),
    "transformer_hunyuan_video15.HunyuanVideo15Transformer3DModel": dit_family(
        "transformer_blocks", timestep="time_embed.timestep_embedder"
    ),
    "cogvideox_transformer_3d.CogVideoXTransformer3DModel": dit_family(
        "transformer_blocks", timestep="time_embedding", final="norm_final"
    ),
    "transformer_mochi.MochiTransformer3DModel": dit_family(
        "transformer_blocks",
        timestep="time_embed.timestep_embedder",
        pooled_text="time_embed.pooler",
        width=mochi_width,
    ),
    "transformer_qwenimage.QwenImageTransformer2DModel": dit_family("transformer_blocks", timestep=_TIME),
    "transformer_chroma.ChromaTransformer2DModel": dit_family(
        *_BOTH, timestep=ConditionSource("time_text_embed", pick=first_row, width=chroma_width)
    ),
    "transformer_cogview4.CogView4Transformer2DModel": dit_family(
        "transformer_blocks", timestep="time_condition_embed.timestep_embedder"
    ),
    "transformer_easyanimate.EasyAnimateTransformer3DModel": dit_family(
        "transformer_blocks", timestep="time_embedding", final="norm_final"
    ),
    "auraflow_transformer_2d.AuraFlowTransformer2DModel": dit_family(
        "joint_transformer_blocks", "single_transformer_blocks", timestep="time_step_proj"
    ),
    "transformer_ltx.LTXVideoTransformer3DModel": dit_family(
        "transformer_blocks",
        timestep=ConditionSource("time_embed.emb.timestep_embedder", per_token=True),
        streams=(IMAGE,),
    ),
    "transformer_wan.WanTransformer3DModel": dit_family(
        "blocks", timestep="condition_embedder.time_embedder", streams=(IMAGE,)
    ),
}.items():
    MODELS[f"diffusers.models.transformers.{_name}"] = _family
