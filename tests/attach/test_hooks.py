"""A read that waits for its LayerNorm is seen by nobody: norms of one's own and hooks are given the tensor."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.timm.tiny import attached_copy, images, randomise_depth, stock_model


class DoublingNorm(nn.LayerNorm):
    """A user's LayerNorm that computes with its input first."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(2 * x - x.mean(1, keepdim=True))


class InPlaceNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.add_(torch.arange(float(x.shape[-1])))
        return super().forward(x)


@pytest.mark.parametrize("norm", [DoublingNorm, InPlaceNorm])
def test_a_layer_norm_of_ones_own_is_given_the_tensor(norm: type[nn.LayerNorm]) -> None:
    kwargs = dict(img_size=32, embed_dim=48, depth=3, num_heads=4, norm_layer=norm)
    stock = timm.create_model("vit_tiny_patch16_224", **kwargs).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.allclose(attached_copy(stock)(x), stock(x), rtol=1e-10, atol=1e-12)


def test_a_hook_on_a_norm_is_given_the_tensor_that_the_norm_reads() -> None:
    """Feature extractors and norm statistics hook norms; their hook runs after ours."""
    model = randomise_depth(attached_copy(stock_model("prenorm", torch.float64), query="token", rank=3))
    x = images("prenorm", torch.float64)
    plain = model(x)
    seen: list[Tensor] = []
    handle = model.blocks[1].norm2.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    assert torch.allclose(model(x), plain, rtol=1e-10)
    handle.remove()
    assert type(seen[0]) is Tensor and seen[0].shape == (2, 17, 48)
    gradients: list[Tensor] = []
    handle = model.blocks[1].norm2.register_full_backward_hook(lambda module, inputs, out: gradients.append(inputs[0]))
    model(x).sum().backward()
    handle.remove()
    assert gradients[0].shape == (2, 17, 48)
    doubled = model.blocks[1].norm2.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert torch.allclose(model(x), plain, rtol=1e-4, atol=1e-4)  # a LayerNorm undoes the factor, but for its epsilon
    doubled.remove()
