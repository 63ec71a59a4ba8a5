"""What runs on a CPU runs on a GPU too. There is no GPU kernel yet: these tests are of the PyTorch operator."""

from __future__ import annotations

import pytest
import timm
import torch

import attnres_vision
from attnres_vision.ops import depth_attention, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("query_shape", [(48,), (2, 48), (2, 7, 48)], ids=["static", "sample", "token"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_read_and_gradients_equal_the_reference(dtype, query_shape):
    torch.manual_seed(0)
    sources = [torch.randn(2, 7, 48, device="cuda", dtype=dtype, requires_grad=True) for _ in range(9)]
    query = torch.randn(query_shape, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(2, 7, 48, device="cuda", dtype=dtype)
    results = []
    for read in (depth_attention, reference.depth_attention):
        out = read(sources, query)
        results.append([out, *torch.autograd.grad(out, [*sources, query], upstream)])
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("attnres", [{"mode": "full"}, {"query": "token", "rank": 3}], ids=["full", "token"])
def test_a_model_on_the_gpu_equals_itself_on_the_cpu(attnres):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=6, num_heads=2, num_classes=7)
    attnres_vision.attach(model, attnres)
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            torch.nn.init.normal_(parameter)
    model.double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = model(images)
    torch.testing.assert_close(model.cuda()(images.cuda()).cpu(), expected, rtol=1e-9, atol=1e-9)
