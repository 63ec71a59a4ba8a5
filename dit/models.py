"""The AttnRes classes of diffusers' transformers: `AttnRes<class>` for every class in the reader table.

    transformer = AttnResSD3Transformer2DModel.from_pretrained(stock_directory, attnres={"query": "condition"})

The classes are made by `dit.host.diffusers_host_class`. Pipelines find them here: diffusers asks for the module of a
foreign class, for the name `ModelMixin` in it, and that it has been imported (`import dit`).
"""

from __future__ import annotations

import importlib

from diffusers import ModelMixin as ModelMixin

from attnres_vision.families import MODELS
from dit.families import diffusers_host_class

__all__ = []

for _path in MODELS:
    if _path.startswith("diffusers."):
        _module, _, _name = _path.rpartition(".")
        try:
            _base = getattr(importlib.import_module(_module), _name)
        except (ImportError, AttributeError):  # a model that the installed diffusers does not have
            continue
        globals()[f"AttnRes{_name}"] = diffusers_host_class(_base)
        __all__ += [f"AttnRes{_name}"]
