"""A module's arguments, however they were given."""

from __future__ import annotations

from typing import Any


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, keyword: str) -> Any:
    """A module's argument, however it was given; None if it was not."""
    return args[position] if len(args) > position else kwargs.get(keyword)


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, keyword: str, value: Any) -> Any:
    """`args` and `kwargs` with another value for that argument."""
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, keyword: value}
