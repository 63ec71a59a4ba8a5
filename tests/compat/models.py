"""The tiny timm models that the tests in this folder share: one per family and block class of the reader tables."""

import copy

import torch
from timm.layers import GatedMlp
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.convit import ConVit
from timm.models.deepseek_vit import DeepseekVitClassifier, DeepseekVitEncoder
from timm.models.eva import Eva
from timm.models.mlp_mixer import MlpMixer, ResBlock, SpatialGatingBlock
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.qwen3_vit import Qwen3VitClassifier, Qwen3VitEncoder
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from timm.models.xcit import Xcit
from torch import nn

import attnres_vision

SIZE = 32
DEPTH = 4
WIDTH = 32

_TINY = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "num_classes": 5}
_ENCODER = {key: value for key, value in _TINY.items() if key != "num_classes"}
_MIXER = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "num_blocks": DEPTH, "num_classes": 5}


def _naflex(**kwargs: object) -> NaFlexVit:
    cfg = {"patch_size": 8, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "pos_embed_grid_size": (4, 4)}
    return NaFlexVit(NaFlexVitCfg(**(cfg | kwargs)), num_classes=5, img_size=SIZE)


# id -> (class, keyword arguments). One line per model class and per block class of attnres_vision/timm/families.py.
MODELS = {
    "vit": (VisionTransformer, {**_TINY, "init_values": 0.5, "reg_tokens": 2}),
    "vit-parallel": (VisionTransformer, {**_TINY, "block_fn": ParallelScalingBlock}),
    "vit-diff_parallel": (VisionTransformer, {**_TINY, "block_fn": DiffParallelScalingBlock}),
    "vit-parallel_things": (VisionTransformer, {**_TINY, "block_fn": ParallelThingsBlock}),
    "vit-post_norm": (VisionTransformer, {**_TINY, "block_fn": ResPostBlock}),
    "vit-no_norm": (VisionTransformer, {**_TINY, "final_norm": False, "global_pool": "avg", "fc_norm": False}),
    "eva": (Eva, {**_TINY, "use_rot_pos_emb": True, "init_values": 0.5}),
    "eva-rope_mixed": (Eva, {**_TINY, "use_rot_pos_emb": True, "rope_type": "mixed", "global_pool": "token"}),
    "eva-post_norm": (Eva, {**_TINY, "use_post_norm": True}),
    "naflex": (_naflex, {"class_token": True, "global_pool": "token"}),
    "naflex-rope": (_naflex, {"rope_type": "axial", "attn_type": "rope", "global_pool": "avg"}),
    "beit": (Beit, {**_TINY, "init_values": 0.5, "use_shared_rel_pos_bias": True}),
    "relpos": (VisionTransformerRelPos, {**_TINY, "class_token": True, "init_values": 0.5}),
    "relpos-post_norm": (
        VisionTransformerRelPos,
        {**_TINY, "block_fn": ResPostRelPosBlock, "class_token": True, "init_values": None},
    ),
    "sam": (VisionTransformerSAM, {**_TINY, "window_size": 2, "global_attn_indexes": (1, 3), "neck_chans": 16}),
    "mixer": (MlpMixer, _MIXER),
    "resmlp": (MlpMixer, {**_MIXER, "mlp_ratio": 4, "block_layer": ResBlock}),
    "gmlp": (MlpMixer, {**_MIXER, "mlp_ratio": 4, "block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp}),
    "convit": (ConVit, {**_TINY, "embed_dim": 8, "num_heads": 4, "local_up_to_layer": 2}),
    "cait": (Cait, {**_TINY, "init_values": 0.5}),
    "xcit": (Xcit, {**_TINY, "eta": 0.5}),
    "deepseek-encoder": (DeepseekVitEncoder, {**_ENCODER, "downsample_ratio": 2, "out_features": 24}),
    "deepseek-classifier": (DeepseekVitClassifier, {**_TINY, "downsample_ratio": 2}),
    "qwen3-encoder": (Qwen3VitEncoder, {**_ENCODER, "pos_embed_grid_size": 4}),
    "qwen3-classifier": (Qwen3VitClassifier, {**_TINY, "pos_embed_grid_size": 4}),
}


def stock(name: str, **kwargs: object) -> nn.Module:
    """The timm model, in eval mode; every parameter is random, so that none hides behind a zero or a one."""
    torch.manual_seed(0)
    make, defaults = MODELS[name]
    model = make(**(defaults | kwargs)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def attached(name: str, config: dict | None = None, *, std: float = 0.5, **kwargs: object) -> nn.Module:
    """`stock(name)` with Attention Residuals and random queries. By default blocks of 3 sublayers, a short last one."""
    model = attnres_vision.attach(stock(name, **kwargs), {"block_size": 3} if config is None else config)
    return randomise(model, std)


def randomise(model: nn.Module, std: float = 0.5) -> nn.Module:
    """Random depth parameters."""
    generator = torch.Generator().manual_seed(1)
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            with torch.no_grad():
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def converted(name: str, **kwargs: object) -> tuple[nn.Module, nn.Module]:
    """A stock model and its copy with Attention Residuals at zero queries."""
    model = stock(name, **kwargs)
    return model, attnres_vision.attach(copy.deepcopy(model), block_size=3)


def images(batch: int = 2, size: int = SIZE, seed: int = 2) -> torch.Tensor:
    """A batch of random images."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def host_of(model: nn.Module) -> nn.Module:
    """The transformer itself: the encoder of a model that wraps one."""
    return model.encoder if hasattr(model, "encoder") else model
