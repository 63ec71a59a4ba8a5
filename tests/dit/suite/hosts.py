"""One tiny model of every class in `dit.models`, with default `attnres` arguments and random queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dit
from tests.dit.tiny import MODELS, inputs_for, randomise_queries, stock_model
from tests.sweeps import exhaustive

# One config per class
NAMES = [
    "sd35", "flux", "flux2", "hunyuan-video", "hunyuan-video-1.5", "cogvideox", "mochi", "qwen-image", "chroma",
    "cogview4", "easyanimate", "auraflow", "ltx", "wan",
]  # fmt: skip
every_class = pytest.mark.parametrize("name", NAMES)
# What every class goes through in the default run, for what hangs on the kind of model and not on the class
KINDS = ["sd35", "flux", "cogvideox", "wan"]


def every_class_exhaustively(names: list[str] | None = None) -> Any:
    """The classes; all but one per kind of model (two streams, joint blocks, shared norms, one stream) on demand."""
    every = NAMES if names is None else names
    return pytest.mark.parametrize("name", [name if name in KINDS else exhaustive(name) for name in every])


def default_model(name: str, dtype: torch.dtype = torch.float32, zero: bool = False) -> Any:
    """`AttnRes<class>(**config)` without an `attnres` argument, with the weights of `stock_model`."""
    stock = stock_model(name, dtype)
    class_name, config, _ = MODELS[name]
    model = getattr(dit.models, f"AttnRes{class_name}")(**config)
    model.load_state_dict(stock.state_dict(), strict=False)
    model.to(dtype).eval()
    if not zero:
        randomise_queries(model)
    return model


@torch.no_grad()
def output(model: Any, name: str, dtype: torch.dtype = torch.float32, size: int = 4, **more: Any) -> Tensor:
    """Of the inputs of `inputs_for`, and what else a test gives the model."""
    result: Tensor = model(**inputs_for(name, dtype, size=size), **more)[0]
    return result


def depth_values(model: Any) -> dict[str, Tensor]:
    """Copies of the depth parameters, under their names."""
    return {key: value.detach().clone() for key, value in model.named_parameters() if ".depth" in key}


def assert_depth_is(model: Any, wanted: dict[str, Tensor]) -> None:
    """No depth parameter changed its name or a bit."""
    found = depth_values(model)
    assert found.keys() == wanted.keys() and wanted
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
