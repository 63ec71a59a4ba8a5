"""What a depth stream refuses to do, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refusal(operation: str) -> str:
    return (
        f"{operation} reads the residual stream of an AttnRes model, which is a list of sources and not one tensor. "
        "If a module of the model does this, name that module as a reader of its block in attnres_vision.families; "
        "in your own code, take stream.total() for the plain residual sum"
    )


_SUBTRACTION = (
    "the operator - (diffusers' residual caches, such as FirstBlockCache, do this, and cannot be used: "
    "PyramidAttentionBroadcastConfig, FasterCacheConfig and TaylorSeerCacheConfig cache attention outputs instead)"
)


def refuse(operation: str) -> NoReturn:
    """Raise the TypeError for an operation that a stream does not know."""
    raise TypeError(refusal(operation))


def refuse_operators(cls: type) -> None:
    """Give a class all arithmetic but `+`, to say what to do instead.

    Python looks operators up on the class, past __getattr__; its own message would name no way out.
    """
    for symbol, names in _OPERATORS.items():
        for name in names:
            setattr(cls, f"__{name}__", _refused_operator(symbol))


def _refused_operator(symbol: str) -> Callable[..., NoReturn]:
    def operator(stream: object, *operands: Any) -> NoReturn:
        refuse(_SUBTRACTION if symbol == "-" else f"the operator {symbol}")

    return operator


_OPERATORS = {
    "-": ("neg", "sub", "rsub"),
    "*": ("mul", "rmul"),
    "/": ("truediv", "rtruediv"),
    "//": ("floordiv", "rfloordiv"),
    "%": ("mod", "rmod"),
    "**": ("pow", "rpow"),
    "@": ("matmul", "rmatmul"),
    "<": ("lt",),
    "<=": ("le",),
    ">": ("gt",),
    ">=": ("ge",),
}
