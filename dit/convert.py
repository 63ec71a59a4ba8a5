"""convert: a loaded stock transformer of diffusers becomes its AttnRes class, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from diffusers import ModelMixin

from attnres_vision.attach import attach
from attnres_vision.config import AttnResConfig


def convert(
    transformer: ModelMixin, config: AttnResConfig | Mapping[str, Any] | None = None, **fields: Any
) -> ModelMixin:
    """Turn a diffusers transformer into its AttnRes class of `dit.models`, in place.

        pipe.transformer = dit.convert(pipe.transformer, {"query": "condition"})

    The queries start at zero, where the model computes what it computed before.

    Args:
        transformer: an image or video transformer whose class is in the reader table (dit/families.py).
        config: an AttnResConfig or a mapping of its fields; or give the fields themselves as keywords.

    Returns:
        The same object, now of class `dit.models.AttnRes<its class>`.

    Raises:
        TypeError: not a diffusers model.
        ValueError: a class outside of the table (the message lists the table and says how to add a line), an attached
            model, or a config that does not fit it. The model is then untouched.
    """
    if not isinstance(transformer, ModelMixin):
        raise TypeError(
            f"transformer must be a model of diffusers', got {type(transformer).__name__} (for timm models: "
            "attnres_vision.attach; for a pipeline: its transformer)"
        )
    attach(cast(Any, transformer), config, **fields)
    return transformer
