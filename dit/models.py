"""The AttnRes classes of diffusers' transformers: `AttnRes<class>` for every class in the reader table.

    transformer = AttnResSD3Transformer2DModel.from_pretrained(stock_directory, attnres={"query": "condition"})

The classes are made by `dit.host.diffusers_host_class`. Pipelines find them here: diffusers asks for the module of a
foreign class, for the name `ModelMixin` in it, and that it has been imported (`import dit`).
"""

from __future__ import annotations

from diffusers import ModelMixin as ModelMixin

from attnres_vision.attach.families import MODELS
from dit.families import diffusers_class, diffusers_host_class

__all__ = []

for _path in MODELS:
    _base = diffusers_class(_path) if _path.startswith("diffusers.") else None
    if _base is not None:
        globals()[f"AttnRes{_base.__name__}"] = diffusers_host_class(_base)
        __all__ += [f"AttnRes{_base.__name__}"]
