import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers warns about float64, deprecated names and CPU autocast, none of which these tests are about."""
    from diffusers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="In CPU autocast")
        yield
    logging.set_verbosity(verbosity)
