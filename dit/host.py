"""DiffusersHost: what the AttnRes classes of diffusers' transformers do beside their base class.

A class is made from the base class at run time: its `__init__` has the arguments that the installed diffusers version
gives the base class, and `attnres`, all of them registered config entries. No `forward` is touched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from accelerate.utils import offload_state_dict
from diffusers.configuration_utils import FrozenDict, register_to_config
from torch import nn

from attnres_vision.attach import attach, families
from attnres_vision.attach.begin import begin_streams
from attnres_vision.attach.host import AttnResHost, stock_class
from attnres_vision.config import AttnResConfig
from attnres_vision.stream.reader import DepthAttention
from dit.caches import check_cache, let_blocks_be_skipped
from dit.parallel import remove_splits, split_blocks, split_embeddings, without_blocks


class DiffusersHost(AttnResHost):
    """Mixin of the AttnRes classes in `dit.models`."""

    def attached(self) -> None:
        self.register_to_config(attnres=self.attnres_config.to_dict())  # type: ignore[attr-defined]
        if not getattr(self, "_repeated_blocks", None):
            # Some of diffusers' classes name no blocks for compile_repeated_blocks
            blocks = families.blocks_of(cast(nn.Module, self)).values()
            self._repeated_blocks = sorted({type(block).__name__ for block in blocks})
        if getattr(self, "gradient_checkpointing", False):
            self._begin_outside_of_checkpoints()

    def detaching(self) -> None:
        config = {key: value for key, value in self.config.items() if key != "attnres"}  # type: ignore[attr-defined]
        self._internal_dict = FrozenDict(config)
        self.__dict__.pop("_repeated_blocks", None)
        remove_splits(cast(nn.Module, self))
        function = self.__dict__.get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointAfterBegin):
            self._gradient_checkpointing_func = function.function

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Callable | None = None) -> None:
        """diffusers' own, except that the streams begin before the first checkpoint, whose recomputation has no box."""
        super().enable_gradient_checkpointing(gradient_checkpointing_func)  # type: ignore[misc]
        self._begin_outside_of_checkpoints()

    def _begin_outside_of_checkpoints(self) -> None:
        function = self.__dict__["_gradient_checkpointing_func"]
        if not isinstance(function, CheckpointAfterBegin):
            self._gradient_checkpointing_func = CheckpointAfterBegin(function)

    def set_attention_backend(self, backend: str) -> None:
        """diffusers' own.

        Raises:
            RuntimeError: xformers without CUDA, which diffusers would find out in the first forward pass.
        """
        if str(backend).startswith("xformers") and not torch.cuda.is_available():
            raise RuntimeError(
                "the attention backend 'xformers' needs CUDA, and torch finds none here: leave the default backend "
                "('native') on a CPU"
            )
        super().set_attention_backend(backend)  # type: ignore[misc]

    def enable_parallelism(self, *, config: Any, cp_plan: Any = None) -> None:
        """diffusers' own; what a context-parallel plan splits at the blocks is split before the streams begin.

        Raises:
            ValueError: context parallelism with the condition "other_stream".
        """
        host = cast(nn.Module, self)
        plan = getattr(self, "_cp_plan", None) if cp_plan is None else cp_plan
        rest, blocks = without_blocks(host, plan or {})
        parallel = config if hasattr(config, "ulysses_degree") else getattr(config, "context_parallel_config", None)
        if parallel is not None and "other_stream" in (self.attnres_config.condition or ()):
            raise ValueError(
                "condition 'other_stream' cannot be used with context parallelism: it is a mean over all tokens of a "
                "stream, of which every process has some only"
            )
        super().enable_parallelism(config=config, cp_plan=None if plan is None else rest)  # type: ignore[misc]
        if parallel is not None:
            split_blocks(host, blocks, parallel)

    @classmethod
    def _load_pretrained_model(
        cls, model: nn.Module, state_dict: Any, files: Any, name: Any, loaded_keys: list[str], **kwargs: Any
    ) -> Any:
        """diffusers' own, which leaves parameters that a stock checkpoint does not have on the meta device."""
        depth = depth_parameter_names(model)
        missing = [key for key in depth if key not in loaded_keys]
        if len(missing) == len(depth):  # a stock checkpoint: they are meant to be missing, and diffusers would warn
            loaded_keys = [*loaded_keys, *missing]
        model, still_missing, *rest = super()._load_pretrained_model(  # type: ignore[misc]
            model, state_dict, files, name, loaded_keys, **kwargs
        )
        device_map = kwargs.get("device_map")
        materialise_depth(model, missing, device_map, kwargs.get("dtype"), kwargs.get("keep_in_fp32_modules") or ())
        offloaded = [name for name in missing if _place(name, device_map) == "disk"]
        if offloaded:  # accelerate looks them up in the folder to which diffusers has written the checkpoint's own
            offload_state_dict(
                kwargs["offload_folder"], {name: model.get_parameter(name).detach() for name in offloaded}
            )
        return model, [key for key in still_missing if key not in missing], *rest

    @classmethod
    def from_single_file(cls, *args: Any, attnres: Any = None, **kwargs: Any) -> Any:
        """The base class's `from_single_file`, converted.

        Raises:
            NotImplementedError: the base class has none.
        """
        base: Any = stock_class(cls)
        if not hasattr(base, "from_single_file"):
            raise NotImplementedError(
                f"{base.__name__} has no from_single_file: load it in another way and call dit.convert on it"
            )
        return attach(base.from_single_file(*args, **kwargs), AttnResConfig.resolve(attnres))


class CachingHost(DiffusersHost):
    """The mixin for base classes that have caches."""

    def enable_cache(self, config: Any) -> None:
        """diffusers' own.

        Raises:
            ValueError: a cache that does arithmetic on the residual streams.
        """
        check_cache(cast(nn.Module, self), config)
        super().enable_cache(config)  # type: ignore[misc]
        if type(config).__name__ == "TaylorSeerCacheConfig":
            let_blocks_be_skipped(cast(nn.Module, self))


class CheckpointAfterBegin:
    """A gradient checkpointing function that begins the streams of the first block before it checkpoints it."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        for hook in block._forward_pre_hooks.values():
            if hook in (split_embeddings, begin_streams):
                args, kwargs = hook(block, args, kwargs)
        return self.function(block, *args, **kwargs)


def diffusers_class(path: str) -> Any:
    """A class of diffusers by its path, None if the installed version does not have it."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


@functools.cache
def diffusers_host_class(base: Any) -> Any:
    """`dit.models.AttnRes<base>`: the AttnRes class of a diffusers transformer class."""
    base_init = inspect.unwrap(base.__init__)

    def __init__(self: Any, *args: Any, attnres: Any = None, **kwargs: Any) -> None:
        base_init(self, *args, **kwargs)
        attach(self, AttnResConfig.resolve(attnres))

    signature = inspect.signature(base_init)
    attnres = inspect.Parameter("attnres", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="dict | None")
    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), attnres]
    )
    mixin = CachingHost if hasattr(base, "enable_cache") else DiffusersHost
    name = f"AttnRes{base.__name__}"
    doc = f"`{base.__name__}` with Attention Residuals: its arguments, and `attnres`, an `AttnResConfig` as a dict."
    members = {"__init__": register_to_config(__init__), "__module__": "dit.models", "__doc__": doc}
    made = type(name, (mixin, base), members)
    # Pipelines look the class up there; a class of somebody else's with the same name must not take its place
    if "dit.models" in sys.modules and base.__module__.startswith("diffusers."):
        setattr(sys.modules["dit.models"], name, made)
    return made


DiffusersHost.make_class = staticmethod(diffusers_host_class)


def depth_parameter_names(model: nn.Module) -> list[str]:
    """The names of the depth parameters of a model."""
    readers = [(path, module) for path, module in model.named_modules() if isinstance(module, DepthAttention)]
    return [f"{path}.{name}" for path, reader in readers for name, _ in reader.named_parameters()]


def materialise_depth(model: nn.Module, names: list[str], device_map: Any, dtype: Any, keep_in_fp32: Any) -> None:
    """Give the depth parameters in `names` their first values.

    They go to the device that the `device_map` has for the module they sit on, in the dtype of the checkpoint.
    """
    for full in names:
        path, _, name = full.rpartition(".")
        reader = model.get_submodule(path)
        assert isinstance(reader, DepthAttention)
        parameter = reader.get_parameter(name)
        kept = any(part in keep_in_fp32 for part in full.split("."))
        wanted = torch.float32 if kept else dtype if isinstance(dtype, torch.dtype) else parameter.dtype
        device = _device(full, device_map) if parameter.is_meta else parameter.device
        value = torch.empty(parameter.shape, device=device, dtype=wanted)
        reader.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        reader.reset_parameters(name)


def _device(name: str, device_map: Any) -> Any:
    """The device on which a parameter of a device map is made: "cpu" for those that are offloaded."""
    place = _place(name, device_map)
    return "cpu" if place == "disk" else place


def _place(name: str, device_map: Any) -> Any:
    """Where a device map has a parameter: a device or "disk"."""
    if not isinstance(device_map, dict):
        return device_map if device_map not in (None, "auto") else "cpu"
    prefixes = [key for key in device_map if not key or name == key or name.startswith(f"{key}.")]
    return device_map[max(prefixes, key=len)] if prefixes else "cpu"
