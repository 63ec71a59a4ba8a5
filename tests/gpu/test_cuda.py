"""On a real GPU: the Triton kernels at the widths of real models, and what only a GPU has (graphs, several devices).

Options and small shapes are in tests/ops/test_triton.py, which runs on the GPU too where there is one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attnres_vision
from attnres_vision.ops import Norm, backend, depth_attention, operator, reference, two_phase
from attnres_vision.ops.collect import collect

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda"
# Relative to the largest number of a tensor: some roundings of the dtype
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MODELS = {"block": {"num_blocks": 3}, "full": {"mode": "full"}, "token": {"query": "token", "rank": 3}}


def vit(attnres: dict[str, Any] | None, **options: Any) -> nn.Module:
    """A small ViT whose queries are not zero."""
    options = {"img_size": 32, "embed_dim": 48, "depth": 6, "num_heads": 2, "num_classes": 7} | options
    model = timm.create_model("vit_tiny_patch16_224", **options)
    if attnres is not None:
        attnres_vision.attach(model, attnres)
        for reader in attnres_vision.readers(model).values():
            for parameter in reader.parameters():
                nn.init.normal_(parameter, std=0.2)  # a saturated softmax has gradients that are all rounding
    return model.to(DEVICE)


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, exact in zip(found, expected, strict=True):
        exact = exact.double()
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < tolerance, f"{tuple(ours.shape)}: relative error {error:.1e}"


@pytest.mark.parametrize("query_shape", [(48,), (2, 48), (2, 7, 48)], ids=["static", "sample", "token"])
def test_float64_sources_take_the_pytorch_operator(query_shape):
    sources = [torch.randn(2, 7, 48, device=DEVICE, dtype=torch.float64, requires_grad=True) for _ in range(9)]
    query = torch.randn(query_shape, device=DEVICE, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 7, 48, device=DEVICE, dtype=torch.float64)
    results = []
    for read in (depth_attention, reference.depth_attention):
        out = read(sources, query)
        results.append([out, *torch.autograd.grad(out, [*sources, query], upstream)])
    assert_close(*results, TOLERANCES[torch.float64])


@pytest.mark.parametrize("n", [2, 9, 25])
@pytest.mark.parametrize("width", [192, 768, 1024, 1152, 3072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_equal_the_reference_at_the_widths_of_real_models(dtype, width, n):
    shape = (2, 197, width)
    given = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(n + 1)]
    given += [0.1 * torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)]
    upstream = torch.randn(shape, device=DEVICE).to(dtype)
    results = []
    for is_ours in (True, False):
        cast = [(value if is_ours else value.double()).detach().requires_grad_() for value in given]
        *sources, add, query, weight = cast
        norm = Norm("layer", 1e-6, weight)
        if is_ours:
            with backend("triton"):
                out, partial = depth_attention(sources, query, add=add, norm=norm)
        else:
            partial = sources[-1] + add
            out = norm.apply(reference.depth_attention([*sources[:-1], partial], query))
        grads = torch.autograd.grad([out, partial], cast, [upstream.to(out.dtype)] * 2)
        results.append([out, partial, *grads])
    assert_close(*results, TOLERANCES[dtype])


@pytest.mark.parametrize("n", [9, 13])
@pytest.mark.parametrize("width", [768, 1024, 3072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_readers_equal_the_reference_at_the_widths_of_real_models(dtype, width, n):
    """Phase one has several warps there; gradients of the blocks are added in place."""
    torch.manual_seed(0)
    shape, count = (2, 7, width), 6
    given = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for _ in range(n + count - 1)]
    given += [(width**-0.5 * torch.randn(width, device=DEVICE)).requires_grad_() for _ in range(count)]
    upstream = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(count)]
    options = {"eps": 1e-6, "scale": 1.0, "form": "mean"}

    collected = [collect(block) for block in given[:n]]
    first, later = two_phase.attend_blocks(collected, given[-count:], kernel="triton", **options)
    merges = zip(given[n:-count], given[-count + 1 :], later, strict=True)
    outs = [first, *(operator.depth_attention([p], q, earlier=e, kernel="triton", **options) for p, q, e in merges)]
    grads = torch.autograd.grad(outs, given, upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    sources = [exact[:n], *([*exact[:n], partial] for partial in exact[n:-count])]
    expected = [reference.depth_attention(s, q, **options) for s, q in zip(sources, exact[-count:], strict=True)]
    wanted = torch.autograd.grad(expected, exact, [gradient.double() for gradient in upstream])
    assert_close([*outs, *grads], [*expected, *wanted], TOLERANCES[dtype])


def test_two_backward_passes_give_the_same_bits():
    sources = [torch.randn(4, 197, 768, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(9)]
    query = torch.randn(768, device=DEVICE, requires_grad=True)
    with backend("triton"):
        out = depth_attention(sources, query)
    upstream = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, [*sources, query], upstream, retain_graph=True) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.parametrize("attnres", MODELS.values(), ids=MODELS)
def test_a_model_on_the_gpu_equals_itself_in_float64_on_the_cpu(attnres):
    model = vit(attnres)
    images = torch.randn(2, 3, 32, 32)
    exact = copy.deepcopy(model).cpu().double()
    expected = exact(images.double())
    expected.square().sum().backward()
    with backend("triton"):
        found = model(images.to(DEVICE))
        found.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in exact.named_parameters() if parameter.grad is not None}
    ours = dict(model.named_parameters())
    # TF32 is off by default; layers and attention add roundings of their own
    assert_close([found.cpu(), *(ours[name].grad.cpu() for name in grads)], [expected, *grads.values()], 1e-3)


@pytest.mark.parametrize("attnres", MODELS.values(), ids=MODELS)
def test_a_compiled_model_equals_the_eager_one_without_graph_breaks(attnres):
    model = vit(attnres)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    results = []
    with backend("triton"):
        for call in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            out = call(images)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert_close(*results, 1e-3)


@pytest.mark.parametrize("attnres", [{"num_blocks": 8}, {"mode": "full"}], ids=["block", "full"])
def test_a_training_step_takes_little_more_memory_than_the_standard_residual(attnres):
    """Activations alone: 5 % is the limit for a whole step, with the optimiser's state (benchmarks/gpu.py)."""
    images = torch.randn(8, 3, 224, 224, device=DEVICE)
    peaks = []
    for options in (None, attnres):
        model = vit(options, img_size=224, embed_dim=384, depth=12, num_heads=6)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with backend("triton"):
                model(images).square().sum().backward()
            peaks_now = torch.cuda.max_memory_allocated() - before
            model.zero_grad(set_to_none=True)
        peaks.append(peaks_now)
        del model
    assert peaks[1] <= 1.1 * peaks[0]


def test_a_read_saves_three_numbers_per_source_and_token():
    sources = [torch.randn(8, 197, 768, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(9)]
    query = torch.randn(768, device=DEVICE, requires_grad=True)
    requested = "requested_bytes.all.current"  # not what the allocator makes of it
    before = torch.cuda.memory_stats()[requested]
    with backend("triton"):
        out = depth_attention(sources, query)
    kept = torch.cuda.memory_stats()[requested] - before - out.nbytes
    assert kept <= 3 * 4 * 9 * 8 * 197


@pytest.mark.parametrize("attnres", [{"num_blocks": 3}, {"mode": "full"}], ids=["block", "full"])
def test_a_cuda_graph_replays_a_forward_pass_on_new_inputs(attnres):
    """Full reads more sources than are pointers: the table of them is made inside the graph."""
    model = vit(attnres).eval()
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), backend("triton"):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles the kernels
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out = model(images)
        others = torch.randn_like(images)
        images.copy_(others)
        graph.replay()
        torch.testing.assert_close(out, model(others))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_read_runs_on_the_device_of_its_sources_not_the_current_one():
    torch.cuda.set_device(0)
    sources = [torch.randn(2, 7, 48, device="cuda:1", requires_grad=True) for _ in range(3)]
    query = torch.randn(48, device="cuda:1", requires_grad=True)
    results = []
    for read in (depth_attention, reference.depth_attention):
        with backend("triton"):
            out = read(sources, query)
        results.append([out, *torch.autograd.grad(out.sum(), [*sources, query])])
    assert results[0][0].device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_close(*results, TOLERANCES[torch.float32])


@pytest.mark.parametrize("attnres", [*MODELS.values(), {"query": "condition", "rank": 3}], ids=[*MODELS, "condition"])
def test_a_training_step_in_a_cuda_graph_equals_the_eager_one_and_never_waits(attnres):
    """`set_sync_debug_mode("error")` raises wherever the host would wait for the device."""
    model = vit(attnres)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    others = torch.randn_like(images)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        out = model(images)
        return [out, *torch.autograd.grad(out.square().sum(), parameters)]

    with backend("triton"):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles the kernels
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph):
            found = step()
        images.copy_(others)
        graph.replay()
        assert_close(found, step(), TOLERANCES[torch.float32])
