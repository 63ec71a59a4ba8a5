"""Reader tables for timm: one line per block class, one per model class. See attnres_vision/families.py."""

from attnres_vision.families import BLOCKS, LAST_BLOCK_OUTPUT, MODELS, Family

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

for _name, _family in {
    "vision_transformer.VisionTransformer": Family(),
    "vision_transformer_relpos.VisionTransformerRelPos": Family(),
    "vision_transformer_sam.VisionTransformerSAM": Family(exits=("neck.0",), pruned_exits=("neck",)),
    "eva.Eva": Family(),
    "naflexvit.NaFlexVit": Family(
        condition=None, why_no_condition="its token mean would include the padding of variable-size inputs"
    ),
    "beit.Beit": Family(),
    # Each class-attention block reads the finished patch stream, and the norm reads it with the class token.
    "cait.Cait": Family(exits=("blocks_token_only.*", "norm")),
    "convit.ConVit": Family(),
    "deepseek_vit.DeepseekVitEncoder": Family(),
    "deepseek_vit.DeepseekVitClassifier": Family(inner="encoder"),
    "mlp_mixer.MlpMixer": Family(),
    "qwen3_vit.Qwen3VitEncoder": Family(exits=(LAST_BLOCK_OUTPUT,), pruned_exits=(LAST_BLOCK_OUTPUT,)),
    "qwen3_vit.Qwen3VitClassifier": Family(
        inner="encoder", exits=(LAST_BLOCK_OUTPUT,), pruned_exits=(LAST_BLOCK_OUTPUT,)
    ),
    # The class-attention blocks mix tokens outside the residual form: they run on the tensor that the first one reads.
    "xcit.Xcit": Family(exits=("cls_attn_blocks.0",), shared_exits=("norm",)),
}.items():
    MODELS[f"timm.models.{_name}"] = _family
