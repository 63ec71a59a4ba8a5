"""Rows of a parametrised test that the default run leaves out: `pytest -m exhaustive` runs them."""

from typing import Any

import pytest


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """One row of `pytest.mark.parametrize`, for what another row of the default run already shows the kind of."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)
