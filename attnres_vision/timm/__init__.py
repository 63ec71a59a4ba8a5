"""Attention Residuals for timm: the reader tables, and the registered `attnres_*` models."""

from attnres_vision.timm import attnres_models as attnres_models
from attnres_vision.timm import families as families
