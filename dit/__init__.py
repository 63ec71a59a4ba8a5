"""Attention Residuals (arXiv 2603.15031) for diffusers' image and video transformers.

Importing this makes the classes of `dit.models` known to diffusers' pipelines.
"""

from dit import families as families
from dit import models as models
from dit.convert import convert

__all__ = ["convert", "families", "models"]
