"""Every family's gradients, with random queries and unusual consumers, against autograd through the decomposed form.

The eager path has an analytic backward, adds source gradients up in place and fuses reads with norms; the decomposed
operator has none of that. Whatever takes the features, the gradients must be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnres_vision.ops import dispatch
from tests.compat.models import MODELS, attached
from tests.sweeps import covering

CONFIGS = {
    "block": {"block_size": 3},
    "full-heads": {"mode": "full", "heads": 2},
    "token-rank": {"query": "token", "rank": 4, "block_size": 2},
    "block-query-mean": {"query": "block", "block_size": 3, "form": "mean"},
    "condition-rank": {"query": "condition", "rank": 2, "block_size": 3},
}
NORM_IN_FP32 = ("deepseek", "qwen")  # their own norms round to fp32, which the two paths do at different places


def logits(model: torch.nn.Module, images: Tensor) -> list[Tensor]:
    outputs = model(images)
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def transposed_features(model: torch.nn.Module, images: Tensor) -> list[Tensor]:
    """A dense head's view of the intermediates: its gradients come back with transposed strides."""
    host = getattr(model, "encoder", model)
    if not hasattr(host, "forward_intermediates"):
        pytest.skip("this family has no forward_intermediates in timm")
    options = {} if "sam" in type(host).__name__.lower() else {"output_fmt": "NLC"}
    features = host.forward_intermediates(images, indices=3, norm=False, intermediates_only=True, **options)
    return [feature.transpose(1, 2) for feature in features]


def gradients(name: str, config: dict, consume: Callable[..., list[Tensor]]) -> dict[str, Tensor | None]:
    model = attached(name, config).double()
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    outputs = consume(model, images)
    torch.manual_seed(1)
    # by shape: randn_like would fill the memory in the order of the strides, which need not be the same twice
    sum((output.square() * torch.randn(output.shape).to(output)).sum() for output in outputs).backward()
    return {"images": images.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


@covering(name=list(MODELS), config=CONFIGS, consume={"logits": logits, "features": transposed_features})
def test_gradients_equal_the_decomposed_operators(name, config, consume, monkeypatch):
    if name.startswith("naflex") and config.get("query") == "condition":
        pytest.skip("NaFlexVit has no condition")
    found = gradients(name, config, consume)
    monkeypatch.setattr(dispatch, "is_traced", lambda kernel="eager": True)
    expected = gradients(name, config, consume)
    rounded = any(part in name for part in NORM_IN_FP32)
    for parameter, wanted in expected.items():
        assert (found[parameter] is None) == (wanted is None), parameter
        if wanted is not None:
            scale = 1 + float(wanted.abs().max())
            rtol, atol = (1e-3, 2e-4 * scale) if rounded else (1e-7, 1e-9 * scale)
            torch.testing.assert_close(found[parameter], wanted, rtol=rtol, atol=atol, msg=parameter)
