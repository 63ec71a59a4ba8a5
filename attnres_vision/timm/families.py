"""Reader tables for timm: one line per block class, one per model class. See attnres_vision/attach/families.py."""

from typing import Any

from attnres_vision.attach.families import BLOCKS, LAST_BLOCK_OUTPUT, MODELS, Family
from attnres_vision.timm.host import timm_host_class

PRE_NORM = ("norm1", "norm2")
POST_NORM = ("attn", "mlp")  # the norm follows the sublayer, which reads the stream itself

for _name, _readers in {
    "vision_transformer.Block": PRE_NORM,
    "vision_transformer.ResPostBlock": POST_NORM,
    "vision_transformer.ParallelScalingBlock": ("in_norm",),
    "vision_transformer.DiffParallelScalingBlock": ("in_norm",),
    "vision_transformer.ParallelThingsBlock": ("attns.*.norm", "ffns.*.norm"),
    "vision_transformer_relpos.RelPosBlock": PRE_NORM,
    "vision_transformer_relpos.ResPostRelPosBlock": POST_NORM,
    "vision_transformer_sam.Block": PRE_NORM,
    "eva.EvaBlock": PRE_NORM,
    "eva.EvaBlockPostNorm": POST_NORM,
    "beit.Block": PRE_NORM,
    "cait.LayerScaleBlock": PRE_NORM,
    "convit.Block": PRE_NORM,
    "deepseek_vit.DeepseekVitBlock": PRE_NORM,
    "mlp_mixer.MixerBlock": PRE_NORM,
    "mlp_mixer.ResBlock": PRE_NORM,
    "mlp_mixer.SpatialGatingBlock": ("norm",),
    "xcit.XCABlock": ("norm1", "norm3", "norm2"),  # attention, local patch interaction, MLP: in this order
}.items():
    BLOCKS[f"timm.models.{_name}"] = _readers


def timm_family(**options: Any) -> Family:
    """The line of a timm model; the options are the fields of `Family`."""
    return Family(host_class=timm_host_class, **options)


for _name, _family in {
    "vision_transformer.VisionTransformer": timm_family(),
    "vision_transformer_relpos.VisionTransformerRelPos": timm_family(),
    "vision_transformer_sam.VisionTransformerSAM": timm_family(exits=("neck.0",), pruned_exits=("neck",)),
    "eva.Eva": timm_family(),
    "naflexvit.NaFlexVit": timm_family(
        condition=None, why_no_condition="its token mean would include the padding of variable-size inputs"
    ),
    "beit.Beit": timm_family(),
    # Each class-attention block reads the finished patch stream, and the norm reads it with the class token.
    "cait.Cait": timm_family(exits=("blocks_token_only.*", "norm")),
    "convit.ConVit": timm_family(),
    "deepseek_vit.DeepseekVitEncoder": timm_family(),
    "deepseek_vit.DeepseekVitClassifier": timm_family(inner="encoder"),
    "mlp_mixer.MlpMixer": timm_family(),
    "qwen3_vit.Qwen3VitEncoder": timm_family(exits=(LAST_BLOCK_OUTPUT,), pruned_exits=(LAST_BLOCK_OUTPUT,)),
    "qwen3_vit.Qwen3VitClassifier": timm_family(
        inner="encoder", exits=(LAST_BLOCK_OUTPUT,), pruned_exits=(LAST_BLOCK_OUTPUT,)
    ),
    # The class-attention blocks mix tokens outside the residual form: they run on the tensor that the first one reads.
    "xcit.Xcit": timm_family(exits=("cls_attn_blocks.0",), shared_exits=("norm",)),
}.items():
    MODELS[f"timm.models.{_name}"] = _family
