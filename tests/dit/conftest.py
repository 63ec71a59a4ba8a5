"""Without diffusers only test_import.py is collected, which skips and says why."""

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("diffusers") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_import.py"]


@pytest.fixture(autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers warns about float64, deprecated names and CPU autocast, none of which these tests are about."""
    logging = pytest.importorskip(
        "diffusers.utils.logging", reason="dit needs diffusers: pip install 'attnres-vision[video]'"
    )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="In CPU autocast")
        yield
    logging.set_verbosity(verbosity)
