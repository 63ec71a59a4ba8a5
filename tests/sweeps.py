"""What of a parametrised test the default run takes; `pytest -m exhaustive` runs the rest."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """One row of `pytest.mark.parametrize`, for what another row of the default run already shows the kind of."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)


def covering(**axes: Iterable[Any]) -> Any:
    """`parametrize` over all combinations; the default run takes as many as it needs to meet every value once.

    Args:
        axes: argument name to its values, or to a mapping of ids to values.
    """
    named = [
        dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()
    ]
    ids = [list(axis) for axis in named]
    default = {tuple(axis[row % len(axis)] for axis in ids) for row in range(max(map(len, ids)))}
    rows = []
    for combination in itertools.product(*ids):
        values = [axis[name] for axis, name in zip(named, combination, strict=True)]
        marks = () if combination in default else (pytest.mark.exhaustive,)
        rows.append(pytest.param(*values, id="-".join(name for name in combination if name), marks=marks))
    return pytest.mark.parametrize(tuple(axes), rows)
