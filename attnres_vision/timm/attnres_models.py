"""Registers `attnres_<name>` for every model of the families in families.py, without copying a config.

An entrypoint of timm ends in `build_model_with_cfg(ModelClass, variant, ...)`. Ours runs the base model's entrypoint
with that one function replaced, so that the model it builds is attached (attach.py) before weights are loaded, and so
that stock weights load strictly with the depth parameters at their initial values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, model_entrypoint, register_model
from timm.models import get_arch_pretrained_cfgs as _pretrained_cfgs_of
from torch import Tensor, nn

from attnres_vision.attach import attach, attnres_state_dict, hosts
from attnres_vision.config import AttnResConfig

PREFIX = "attnres_"

# Modules of timm all of whose models are in families.py.
MODULES = (
    "beit",
    "cait",
    "convit",
    "deepseek_vit",
    "deit",
    "eva",
    "mlp_mixer",
    "naflexvit",
    "qwen3_vit",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "vitamin",
    "xcit",
)


def base_names() -> list[str]:
    """The timm models that have an `attnres_` counterpart."""
    known = timm.list_modules()
    return [name for module in MODULES if module in known for name in timm.list_models(module=module)]


def create(base: str, pretrained: bool, attnres: Mapping[str, Any] | None, **kwargs: Any) -> nn.Module:
    """The timm model `base` with Attention Residuals; what every registered entrypoint calls."""
    if attnres is not None and not isinstance(attnres, Mapping):
        # timm writes the arguments of create_model into config.json, so they must be JSON
        raise ValueError(f"attnres must be a mapping of AttnResConfig fields (config.to_dict()), got {attnres!r}")
    config = AttnResConfig.resolve(attnres)
    if kwargs.get("use_naflex"):
        raise ValueError(
            f"use_naflex must be False for {PREFIX}{base}, got True: use an {PREFIX}naflexvit_* model, or "
            f"attnres_vision.attach(timm.create_model({base!r}, use_naflex=True), ...)"
        )

    def build(
        model_cls: Callable[..., nn.Module],
        variant: str,
        pretrained: bool,
        *args: Any,
        pretrained_filter_fn: Callable | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        def model_with_attnres(*args: Any, **kwargs: Any) -> nn.Module:
            model = attach(model_cls(*args, **kwargs), config)
            used = next(host for _, host in hosts(model)).attnres_config
            model._model_args = {"attnres": used.to_dict()}  # type: ignore[assignment]
            return model

        # Some entrypoints look the base model's config up themselves; saved, it would name the base model.
        kwargs["pretrained_cfg_overlay"] = {
            **(kwargs.get("pretrained_cfg_overlay") or {}),
            "architecture": PREFIX + base,
        }
        kwargs["pretrained_filter_fn"] = _with_depth_parameters(pretrained_filter_fn)
        return build_model_with_cfg(model_with_attnres, PREFIX + base, pretrained, *args, **kwargs)

    return _with_builder(model_entrypoint(base), build)(pretrained=pretrained, **kwargs)


def _with_builder(entrypoint: Callable[..., nn.Module], build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A copy of a timm entrypoint whose module sees `build` as `build_model_with_cfg`. timm itself stays as it is."""
    module = vars(sys.modules[entrypoint.__module__])
    scope = {**module, "build_model_with_cfg": build}
    for name, value in module.items():
        if isinstance(value, FunctionType) and value.__globals__ is module:
            copy = FunctionType(value.__code__, scope, value.__name__, value.__defaults__, value.__closure__)
            copy.__kwdefaults__ = value.__kwdefaults__
            scope[name] = copy
    return scope[entrypoint.__name__]


def _with_depth_parameters(base_filter: Callable | None) -> Callable[[dict, nn.Module], dict]:
    """A checkpoint filter that lets stock weights load strictly: missing depth parameters keep their initial values."""

    def filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
        own = attnres_state_dict(model)
        depth = {name: value for name, value in state_dict.items() if ".depth." in name}
        stock = {name: value for name, value in state_dict.items() if name not in depth}
        result = {**(base_filter(stock, model) if base_filter else stock), **depth}
        if not any(name in result for name in own):  # a stock checkpoint: some but not all would be a broken one
            result.update(own)
        return result

    return filter_fn


def _register(base: str) -> None:
    def entrypoint(pretrained: bool = False, attnres: Mapping[str, Any] | None = None, **kwargs: Any) -> nn.Module:
        return create(base, pretrained, attnres, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = PREFIX + base
    entrypoint.__doc__ = f"timm's {base} with Attention Residuals; attnres={{...}} takes the fields of AttnResConfig."
    register_model(entrypoint)


def _default_cfgs(names: list[str]) -> dict[str, Any]:
    cfgs: dict[str, Any] = {}
    for name in names:
        of_name = _pretrained_cfgs_of(name)
        default = timm.models.get_pretrained_cfg(name, allow_unregistered=False)
        # The first tag with weights becomes the default: put the base model's default first.
        for key, cfg in sorted(of_name.items(), key=lambda item: item[1].tag != (default and default.tag)):
            cfgs[PREFIX + key] = cfg
    return generate_default_cfgs(cfgs)


__all__: list[str] = []  # register_model adds the names
_names = base_names()
default_cfgs = _default_cfgs(_names)  # register_model looks for this name
for _name in _names:
    _register(_name)
