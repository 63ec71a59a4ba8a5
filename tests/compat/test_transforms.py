"""torch.func and forward-mode AD: attached models and the operator give the derivatives of plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from attnres_vision.ops import depth_attention, reference
from tests.compat.models import SIZE, attached

KINDS = [{}, {"query": "token", "rank": 4}, {"mode": "full", "heads": 2}]


def model_and_images(fields: dict) -> tuple[nn.Module, Tensor]:
    model = attached("vit", fields).double().eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # torch has no forward-mode rule for it
    torch.manual_seed(1)
    return model, torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)


@pytest.mark.parametrize("fields", KINDS, ids=["static", "token", "full"])
def test_func_grad_and_gradients_per_sample(fields):
    model, images = model_and_images(fields)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(model, parameters, (images,)).square().sum()

    whole = grad(loss)(parameters, images)
    per_sample = vmap(grad(loss), (None, 0))(parameters, images.unsqueeze(1))
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(per_sample[name].sum(0), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fields", KINDS, ids=["static", "token", "full"])
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode(frozen, fields):
    """Frozen parameters count: a custom operator would hand out no tangent, which reads as a derivative of zero."""
    model, images = model_and_images(fields)
    model.requires_grad_(not frozen)
    direction = torch.randn_like(images)
    by_step = (model(images + 1e-6 * direction) - model(images - 1e-6 * direction)).detach() / 2e-6
    with fwd.dual_level():
        tangent = fwd.unpack_dual(model(fwd.make_dual(images, direction))).tangent
    torch.testing.assert_close(tangent, by_step, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(jvp(model, (images,), (direction,))[1], by_step, rtol=1e-6, atol=1e-7)


def test_second_derivatives_of_the_operator():
    torch.manual_seed(0)
    sources, query = [torch.randn(2, 7, 12, dtype=torch.float64) for _ in range(3)], torch.randn(12).double()

    def slope(read, query: Tensor) -> Tensor:
        return grad(lambda q: F.gelu(read(sources, q)).sum())(query).square().sum()

    found = grad(lambda q: slope(depth_attention, q))(query)
    exact = grad(lambda q: slope(reference.depth_attention, q))(query)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)
