"""Attention Residuals (arXiv 2603.15031) for vision models. Importing this registers timm's `attnres_*` models."""

from attnres_vision import ops as ops
from attnres_vision import timm as timm
from attnres_vision.attach import attach, attnres_state_dict, detach, load_attnres_state_dict, readers
from attnres_vision.attach import families as families
from attnres_vision.attach.optim import depth_param_groups
from attnres_vision.attach.record import DepthWeights, record_depth_weights
from attnres_vision.config import AttnResConfig
from attnres_vision.stream import DepthAttention, DepthStream

__version__ = "0.1.0"

__all__ = [
    "AttnResConfig",
    "DepthAttention",
    "DepthStream",
    "DepthWeights",
    "attach",
    "attnres_state_dict",
    "depth_param_groups",
    "detach",
    "load_attnres_state_dict",
    "ops",
    "readers",
    "record_depth_weights",
]
