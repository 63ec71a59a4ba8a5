"""Attention Residuals (arXiv 2603.15031) for diffusers' image and video transformers.

Importing this makes the classes of `dit.models` known to diffusers' pipelines.
"""

try:
    import diffusers as _diffusers  # noqa: F401
except ImportError as error:
    raise ImportError("dit needs diffusers: pip install 'attnres-vision[video]'") from error

from dit import families as families
from dit import models as models
from dit.convert import convert

__all__ = ["convert", "families", "models"]
