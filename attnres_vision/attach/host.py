"""AttnResHost: what the class of an attached model does beside its base class.

`attach` gives a model the class `AttnRes<its class>`, its own class with this mixin, or a host library's, in front (as
FSDP2 does), and `detach` gives the old class back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn

from attnres_vision.config import AttnResConfig
from attnres_vision.stream.reader import DepthAttention


class AttnResHost:
    """Mixin of models whose residual stream is a DepthStream: the few methods that hooks cannot reach."""

    attnres_config: AttnResConfig
    make_class: ClassVar[Callable[[Any], Any]]  # this class from a stock class

    def attached(self) -> None:
        """Called when `attach` is done with this model."""

    def detaching(self) -> None:
        """Called before `detach` gives the stock class back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not type(self).make_class(stock_class(type(self))):  # a user's subclass, which has a name
            return super().__reduce_ex__(protocol)
        # The class is made at run time, so pickle cannot find it by name; this also serves copy and deepcopy.
        return _new_host, (self.make_class, stock_class(type(self))), self.__dict__

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's `no_weight_decay`, and all depth parameters: decay would pull them to the standard residual."""
        depth = {
            f"{path}.{name}"
            for path, module in cast(nn.Module, self).named_modules()
            if isinstance(module, DepthAttention)
            for name, _ in module.named_parameters()
        }
        base: set[str] = getattr(super(), "no_weight_decay", set)()
        return set(base) | depth

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError("AttnRes models do not support TorchScript: use torch.compile or torch.export")


@functools.cache
def host_class(base: Any) -> Any:
    """`AttnRes<base>`: the class of an attached model of class `base`, of no library that has its own."""
    return make_class(AttnResHost, base)


AttnResHost.make_class = staticmethod(host_class)


def make_class(mixin: type[AttnResHost], base: Any) -> Any:
    """`AttnRes<base>` with another mixin."""
    return type(f"AttnRes{base.__name__}", (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def stock_class(cls: type) -> type[nn.Module]:
    """The host library's own class behind an `AttnRes<base>` class."""
    return cls.__mro__[cls.__mro__.index(AttnResHost) + 1]


def _new_host(make_class: Callable[[Any], Any], base: Any) -> nn.Module:
    cls = make_class(base)
    return cls.__new__(cls)
