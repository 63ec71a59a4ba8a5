"""Every implementation of depth attention computes the same values and gradients as the equations of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_vision.ops import decomposed, depth_attention, operator, reference

IMPLEMENTATIONS = {"eager": operator.depth_attention, "decomposed": decomposed.depth_attention}

# n, shape of a source, shape of the query, options
CASES = [
    pytest.param(1, (2, 7, 48), (48,), {}, id="n1-B2T7D48-static"),
    pytest.param(2, (2, 7, 48), (48,), {}, id="n2-B2T7D48-static"),
    pytest.param(9, (2, 7, 48), (48,), {}, id="n9-B2T7D48-static"),
    pytest.param(9, (2, 7, 48), (48,), {"form": "mean"}, id="n9-B2T7D48-static-mean"),
    pytest.param(25, (2, 7, 48), (48,), {"scale": 48**-0.5}, id="n25-B2T7D48-static-scaled"),
    pytest.param(5, (2, 7, 48), (48,), {"heads": 4}, id="n5-B2T7D48-static-h4"),
    pytest.param(5, (2, 7, 48), (48,), {"heads": 48}, id="n5-B2T7D48-static-h48"),
    pytest.param(5, (2, 7, 48), (48,), {"eps": 0.5}, id="n5-B2T7D48-static-large_eps"),
    pytest.param(5, (2, 7, 48), (2, 48), {}, id="n5-B2T7D48-sample"),
    pytest.param(
        5, (2, 7, 48), (2, 48), {"heads": 3, "form": "mean", "scale": 0.3}, id="n5-B2T7D48-sample-h3-mean-scaled"
    ),
    pytest.param(5, (2, 7, 48), (2, 7, 48), {}, id="n5-B2T7D48-token"),
    pytest.param(9, (2, 7, 48), (2, 7, 48), {"heads": 3, "form": "mean"}, id="n9-B2T7D48-token-h3-mean"),
    pytest.param(3, (2, 3, 4, 48), (48,), {}, id="n3-B2H3W4D48-static"),
    pytest.param(3, (2, 3, 4, 48), (2, 48), {}, id="n3-B2H3W4D48-sample"),
    pytest.param(3, (2, 3, 4, 48), (2, 3, 4, 48), {"heads": 2}, id="n3-B2H3W4D48-token-h2"),
    pytest.param(3, (1, 6, 48), (48,), {}, id="n3-B1T6D48-static"),
    pytest.param(3, (1, 6, 48), (1, 48), {"heads": 2}, id="n3-B1T6D48-sample-h2"),
    pytest.param(3, (1, 7, 48), (1, 48), {}, id="n3-B1T7D48-sample"),
    pytest.param(3, (1, 6, 48), (1, 6, 48), {}, id="n3-B1T6D48-token"),
    pytest.param(3, (6, 48), (48,), {}, id="n3-T6D48-static"),
    pytest.param(3, (6, 48), (6, 48), {}, id="n3-T6D48-token"),
    pytest.param(3, (48,), (48,), {}, id="n3-D48-static"),
]


def equations(
    sources: Sequence[Tensor], query: Tensor, eps: float = 1e-6, scale: float = 1.0, form: str = "sum", heads: int = 1
) -> tuple[Tensor, Tensor]:
    """Token by token and head by head, straight from the equations: shares no code with the library."""
    shape, width = sources[0].shape, sources[0].shape[-1]
    flat = [source.reshape(-1, width) for source in sources]
    num_tokens = flat[0].shape[0]
    if query.dim() == 1:
        queries = [query] * num_tokens
    elif query.shape == shape:
        queries = list(query.reshape(-1, width))
    else:
        queries = [query[token * shape[0] // num_tokens] for token in range(num_tokens)]
    out, all_weights = [], []
    for token in range(num_tokens):
        values = [rows[token] for rows in flat]
        keys = [value / torch.sqrt((value * value).sum() / width + eps) for value in values]
        slices, weights = [], []
        for head in torch.arange(width).chunk(heads):
            exps = [torch.exp(scale * torch.dot(queries[token][head], key[head])) for key in keys]
            a = [value / sum(exps) for value in exps]
            slices.append(sum(weight * value[head] for weight, value in zip(a, values, strict=True)))
            weights.append(torch.stack(a))
        out.append(torch.cat(slices) * (len(sources) if form == "sum" else 1))
        all_weights.append(torch.stack(weights, dim=-1))
    return torch.stack(out).view(shape), torch.stack(all_weights, dim=1).view(len(sources), *shape[:-1], heads)


def inputs(n: int, shape: tuple[int, ...], query_shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Random float64 sources of different sizes and a random non-zero query."""
    torch.manual_seed(n)
    sources = [((1 + i) * torch.randn(shape, dtype=torch.float64)).requires_grad_() for i in range(n)]
    return sources, (0.5 * torch.randn(query_shape, dtype=torch.float64)).requires_grad_()


def values_and_grads(read: Any, sources: list[Tensor], query: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """h, weights and the gradients of all sources and the query for a random upstream gradient of both."""
    out, weights = read(sources, query, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype) for t in (out, weights)]
    return [out, weights, *torch.autograd.grad([out, weights], [*sources, query], upstream)]


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape and a.dtype == e.dtype, index
        scale = max(1.0, e.abs().max().item())
        assert (a - e).abs().max().item() <= tolerance * scale, f"tensor {index}"


@pytest.mark.parametrize(("n", "shape", "query_shape", "options"), CASES)
def test_reference_follows_the_equations(n, shape, query_shape, options):
    sources, query = inputs(n, shape, query_shape)
    expected = values_and_grads(equations, sources, query, options)
    actual = values_and_grads(reference.depth_attention, sources, query, options | {"return_weights": True})
    assert_all_close(actual, expected, 1e-11)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n", "shape", "query_shape", "options"), CASES)
def test_implementation_equals_the_reference(name, n, shape, query_shape, options):
    sources, query = inputs(n, shape, query_shape)
    options = options | {"return_weights": True}
    expected = values_and_grads(reference.depth_attention, sources, query, options)
    assert_all_close(values_and_grads(IMPLEMENTATIONS[name], sources, query, options), expected, 1e-10)


@pytest.mark.parametrize("query_shape", [(6,), (2, 6), (2, 3, 6)], ids=["static", "sample", "token"])
@pytest.mark.parametrize("heads", [1, 2])
def test_gradcheck(query_shape, heads):
    sources, query = inputs(3, (2, 3, 6), query_shape)
    torch.autograd.gradcheck(
        lambda q, *v: depth_attention(v, q, heads=heads, return_weights=True), (query, *sources), fast_mode=False
    )


@pytest.mark.parametrize("output", [0, 1], ids=["h", "weights"])
def test_one_of_the_two_outputs_can_be_used_alone(output):
    sources, query = inputs(4, (2, 7, 12), (12,))
    grads = []
    for read in (operator.depth_attention, reference.depth_attention):
        used = read(sources, query, heads=2, return_weights=True)[output]
        grads.append(list(torch.autograd.grad(used.square().sum(), [*sources, query])))
    assert grads[0][0].abs().max() > 0
    assert_all_close(grads[0], grads[1], 1e-10)


def test_weights_sum_to_one_and_a_zero_query_gives_the_plain_sum():
    sources, query = inputs(6, (2, 7, 12), (12,))
    _, weights = depth_attention(sources, query, heads=3, return_weights=True)
    assert weights.shape == (6, 2, 7, 3)
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    assert weights.std(0).min() > 0
    torch.testing.assert_close(depth_attention(sources, torch.zeros_like(query)), sum(sources))


@pytest.mark.parametrize(
    "needed", [(True, False, True, False), (False, True, False, True), (False, False, False, True)]
)
def test_only_what_requires_grad_gets_one(needed):
    sources, query = inputs(3, (2, 7, 12), (12,))
    grads = []
    for read in (operator.depth_attention, reference.depth_attention):
        leaves = [t.detach().requires_grad_(flag) for t, flag in zip([*sources, query], needed, strict=True)]
        read(leaves[:-1], leaves[-1]).square().sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needed)
        grads.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    assert_all_close(grads[0], grads[1], 1e-10)


def test_no_grad_saves_nothing():
    sources, query = inputs(3, (2, 7, 12), (12,))
    with torch.no_grad():
        out = depth_attention(sources, query)
    assert out.grad_fn is None
    torch.testing.assert_close(out, reference.depth_attention(sources, query))


@pytest.mark.parametrize("view", ["tokens", "transposed", "expanded"])
@pytest.mark.parametrize("query_shape", [(12,), (2, 12)], ids=["static", "sample"])
def test_views_of_larger_tensors_are_sources_too(view, query_shape):
    torch.manual_seed(0)
    whole = [torch.randn(2, 10, 5, 12, dtype=torch.float64) for _ in range(3)]
    make = {
        "tokens": lambda w: w[:, 3:],
        "transposed": lambda w: w.transpose(1, 2),
        "expanded": lambda w: w[:, :1].expand(-1, 4, -1, -1),
    }[view]
    query = torch.randn(query_shape, dtype=torch.float64, requires_grad=True)
    grads = []
    for read in (operator.depth_attention, reference.depth_attention):
        leaves = [w.clone().requires_grad_() for w in whole]
        out = read([make(leaf) for leaf in leaves], query)
        grads.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, query])])
    assert_all_close(grads[0], grads[1], 1e-10)


def test_an_expanded_upstream_gradient():
    sources, query = inputs(3, (2, 7, 12), (12,))
    grads = [
        list(torch.autograd.grad(read(sources, query).sum(), [*sources, query]))
        for read in (operator.depth_attention, reference.depth_attention)
    ]
    assert_all_close(grads[0], grads[1], 1e-10)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("query_shape", [(64,), (2, 64), (2, 7, 64)], ids=["static", "sample", "token"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_mixed_dtypes_are_computed_in_fp32(name, query_shape, autocast):
    torch.manual_seed(0)
    sources = [torch.randn(2, 7, 64).to(torch.bfloat16 if i % 2 else torch.float32).requires_grad_() for i in range(4)]
    query = torch.randn(query_shape, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(2, 7, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, weights = IMPLEMENTATIONS[name](sources, query, return_weights=True)
        grads = torch.autograd.grad(out, [*sources, query], upstream)
    exact = [t.detach().double().requires_grad_() for t in (*sources, query)]
    expected, expected_weights = reference.depth_attention(exact[:-1], exact[-1], return_weights=True)
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    assert out.dtype == weights.dtype == torch.float32
    # fp32 rounding only: bf16 scores would be off by 1e-2
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(weights.double(), expected_weights, atol=2e-6, rtol=1e-5)
    for grad, exact_grad, leaf in zip(grads, expected_grads, [*sources, query], strict=True):
        assert grad.dtype == leaf.dtype
        rounding = torch.finfo(grad.dtype).eps if grad.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            grad.double(), exact_grad, atol=rounding * exact_grad.abs().max().item(), rtol=rounding
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_sources_give_a_half_precision_read(dtype):
    torch.manual_seed(0)
    sources = [torch.randn(2, 7, 64).to(dtype).requires_grad_() for _ in range(3)]
    out, weights = depth_attention(sources, torch.randn(64), return_weights=True)
    assert out.dtype == dtype and weights.dtype == torch.float32
    out.sum().backward()
    assert all(source.grad.dtype == dtype for source in sources)


def test_large_scores_do_not_overflow():
    sources = [torch.randn(2, 7, 64, requires_grad=True) for _ in range(3)]
    query = torch.full((64,), 1e4, requires_grad=True)
    out = depth_attention(sources, query)
    out.sum().backward()
    assert all(tensor.isfinite().all() for tensor in (out, query.grad, *[source.grad for source in sources]))
    assert math.isfinite(out.sum().item())
