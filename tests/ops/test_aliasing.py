"""Sources that share memory, a node of the graph or a gradient's place: values and gradients are the reference's.

A read must not care whether two of its sources are one tensor, nor what else a source is used for. Every case runs with
sources as they are and collected (collect.py), in eager mode and in Triton's interpreter, as single reads and as a
group of readers in two phases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_vision.ops import Norm, operator, reference, two_phase
from attnres_vision.ops.collect import collect

SHAPE, WIDTH = (2, 3, 12), 12
OPTIONS: dict[str, Any] = {"scale": 0.7, "form": "sum"}
# Of the largest entry: a few roundings of sums of some twenty numbers
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}

Collect = Callable[[Tensor], Tensor]
Reads = list[tuple[list[Tensor], Tensor, dict[str, Any]]]  # sources, query, options


def the_same_tensor_twice(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d = given(a), given(b)
    return [([c, c, d], q, {}), ([c, d, c], q.sin(), {}), ([d, c, c], q, {})]


def the_same_tensor_only(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c = given(a)
    return [([c, c, c, c], q, {}), ([c, c], q.sin(), {})]


def first_and_last(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d = given(a), given(b)
    return [([c, d, c], q, {}), ([c, d, d, c, d], q.sin(), {})]


def more_than_are_unrolled(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d = given(a), given(b)
    return [([c, d] * 5 + [d], q, {}), ([d] * 10 + [c], q.sin(), {})]


def collected_twice(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    """One tensor with two places for its gradient, and one that is collected again."""
    c, d = given(a), given(a)
    e = given(given(b))
    return [([c, d, e], q, {}), ([d, c, e, b], q.sin(), {})]


def overlapping_views(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    whole = torch.cat([a, b], 1)
    c, d, e = (given(whole[:, start : start + SHAPE[1]]) for start in (0, 1, 3))
    return [([c, d, e], q, {}), ([e, d], q.sin(), {})]


def disjoint_views(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    whole = torch.stack([a, b], -2)  # rows of the two alternate
    c, d = given(whole[..., 0, :]), given(whole[..., 1, :])
    return [([c, d], q, {}), ([d, c, d], q.sin(), {})]


def expanded_and_transposed(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c = given(a[:, :1].expand(SHAPE))  # all tokens share memory
    d = given(a[:1].expand(SHAPE))
    e = given(b.transpose(1, 2).contiguous().transpose(1, 2))  # rows with holes
    f = given(torch.cat([b, a], -1)[..., ::2])
    return [([c, d, e, f], q, {}), ([e, c, f], q.sin(), {}), ([f, e, d], q, {})]


def the_query_of_a_source(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    """Per sample, per token, and the source itself."""
    c, d = given(a), given(b)
    return [([c, d], c.mean(1) + q, {}), ([d, c], 0.3 * c.sin(), {}), ([c, d, b], c, {}), ([c, d], d[:, 0], {})]


def add_is_a_source(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d = given(a), given(b)
    return [([c, d], q, {"add": d}), ([c, d], q.sin(), {"add": c}), ([c, c], q, {"add": c}), ([d], q, {"add": d})]


def no_gradient_in_between(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d, fixed = given(a), given(b), given(a.detach() + 1)
    return [([c, fixed, d], q, {}), ([fixed, c, fixed, d], q.sin(), {}), ([c, d, fixed], q, {}), ([fixed, d], q, {})]


def no_gradient_in_a_table(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d, fixed = given(a), given(b), given(a.detach() + 1)
    return [([c, fixed, d] * 4 + [fixed], q, {}), ([fixed, *[c, d] * 5], q.sin(), {})]


def readers_with_different_queries(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    """One query for all samples, one for each, one per token, two heads: the terms of a source are of all kinds."""
    c, d = given(a), given(b)
    samples, tokens = (
        torch.stack([q, q.sin()]),
        torch.stack([q * (i - 2) for i in range(SHAPE[0] * SHAPE[1])]).view(SHAPE),
    )
    return [([c, d], q, {}), ([c, d], samples, {}), ([d, c], tokens, {}), ([c, d], q, {"heads": 3}),
            ([c, d], samples, {"heads": 2})]  # fmt: skip


def a_norm_behind(a: Tensor, b: Tensor, q: Tensor, given: Collect) -> Reads:
    c, d = given(a), given(b)
    return [([c, c, d], q, {"norm": Norm("layer", 1e-5, q, q)}), ([c, d], q.sin(), {"norm": Norm("rms", 1e-5)})]


CASES = [
    the_same_tensor_twice, the_same_tensor_only, first_and_last, more_than_are_unrolled, collected_twice,
    overlapping_views, disjoint_views, expanded_and_transposed, the_query_of_a_source, add_is_a_source,
    no_gradient_in_between, no_gradient_in_a_table, readers_with_different_queries, a_norm_behind,
]  # fmt: skip


def plain_read(sources: list[Tensor], query: Tensor, *, add: Tensor | None = None, norm: Norm | None = None, **options):
    """The reference, with the sum and the norm of a read."""
    if add is not None:
        sources = [*sources[:-1], sources[-1] + add]
    out = reference.depth_attention(sources, query, **OPTIONS, **options)
    out = out if norm is None else norm.apply(out)
    return (out, sources[-1]) if add is not None else out


def results_of(case: Callable[..., Reads], leaves: list[Tensor], given: Collect, kernel: str | None) -> list[Tensor]:
    outs: list[Tensor] = []
    for sources, query, options in case(*leaves, given):
        if kernel is None:
            found = plain_read(sources, query, **options)
        else:
            found = operator.depth_attention(sources, query, kernel=kernel, **OPTIONS, **options)
        outs += found if isinstance(found, tuple) else (found,)
    return outs


def group_of(case: Callable[..., Reads], leaves: list[Tensor], given: Collect, kernel: str | None) -> list[Tensor]:
    """The first read's sources and its query are a group of three readers'; each later one has read one more source."""
    sources, query, _ = case(*leaves, given)[0]
    queries = [query, 0.5 * query.cos(), query.sin()]
    # A source that a later reader has again, or none: whether phase one adds to gradients differs
    newer = [given(sources[0] * 0.5), given(sources[0].sin()) if sources[0] is sources[-1] else sources[-1]]
    extra = [[], newer[:1], newer]
    if kernel is None:
        extra, queries = [*extra, []], [*queries, queries[1]]
        return [reference.depth_attention([*sources, *e], q, **OPTIONS) for e, q in zip(extra, queries, strict=True)]
    first, later = two_phase.attend_blocks(sources, queries, eps=1e-6, kernel=kernel, **OPTIONS)
    merges = zip(extra[1:], queries[1:], later, strict=True)
    merged = [operator.depth_attention(e, q, earlier=earlier, kernel=kernel, **OPTIONS) for e, q, earlier in merges]
    again = operator.depth_attention(sources, queries[1], kernel=kernel, **OPTIONS)
    return [first, *merged, again]


def gradients(outs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    loss = sum((out * torch.randn(out.shape, dtype=torch.float64).to(out)).sum() for out in outs)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def leaves_of(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    values = [torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)]
    values.append(0.4 * torch.randn(WIDTH, dtype=torch.float64))
    return [value.to(dtype).requires_grad_() for value in values]


@pytest.fixture(params=["eager", "triton"])
def kernel(request: pytest.FixtureRequest) -> str:
    if request.param == "triton" and request.getfixturevalue("triton_device") != "cpu":
        pytest.skip("the cases are on the CPU")
    return request.param


def products() -> list[Any]:
    """Cases by runs; those that take Triton's interpreter more than a second are for exhaustive runs."""
    found = []
    for case, run, is_collected, kernel in itertools.product(
        CASES, (results_of, group_of), (True, False), ("eager", "triton")
    ):
        names = case.__name__, "two-phase" if run is group_of else "reads", "collected" * is_collected, kernel
        in_group = case in (the_same_tensor_twice, first_and_last, no_gradient_in_between, the_query_of_a_source)
        is_quick = kernel == "eager" or (is_collected and (run is results_of or in_group))
        marks = () if is_quick else (pytest.mark.exhaustive,)
        found.append(pytest.param(case, run, is_collected, kernel, id="-".join(filter(None, names)), marks=marks))
    return found


@pytest.mark.parametrize(("case", "run", "is_collected", "kernel"), products())
def test_values_and_gradients_are_the_references(case, run, is_collected, kernel, request):
    given = collect if is_collected else lambda t: t
    if kernel == "triton" and request.getfixturevalue("triton_device") != "cpu":
        pytest.skip("the cases are on the CPU")
    dtype = torch.float64 if kernel == "eager" else torch.float32
    leaves = leaves_of(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, wanted = run(case, leaves, given, kernel), run(case, exact, lambda t: t, None)
    assert len(found) == len(wanted)
    assert_close([*found, *gradients(found, leaves)], [*wanted, *gradients(wanted, exact)], TOLERANCES[dtype])


def assert_close(found: list[Tensor | None], wanted: list[Tensor | None], tolerance: float) -> None:
    for index, (value, target) in enumerate(zip(found, wanted, strict=True)):
        if target is None:
            assert value is None or not value.any()
            continue
        error = (value.detach().double() - target.detach()).abs().max().item()
        size = target.detach().abs().max().item()
        assert error <= tolerance * size, f"{index}: off by {error:.1e} of {size:.1e}"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_readers_of_other_precision(order):
    """An fp32 source whose readers compute in fp32 and, with an fp64 source beside it, in fp64, in any order."""
    a, _, q = leaves_of(torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in (a, q)]
    wide, half = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.bfloat16)

    def outs(read, c: Tensor, q: Tensor) -> list[Tensor]:
        reads = [lambda: read([c, c.sin()], q), lambda: read([c, wide], q), lambda: read([c, half], q)]
        return [reads[i]() for i in order]

    found = outs(operator.depth_attention, collect(a), q)
    wanted = outs(reference.depth_attention, *exact)
    assert_close(gradients(found, [a, q]), gradients(wanted, exact), TOLERANCES[torch.float32])


@pytest.mark.parametrize("kernels", [("eager", "triton"), ("triton", "eager")], ids="-".join)
def test_readers_by_different_kernels(kernels, triton_device):
    """As where a read has more heads than the kernels can."""
    if triton_device != "cpu":
        pytest.skip("the case is on the CPU")
    leaves = leaves_of(torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    sources = [collect(leaf) for leaf in leaves[:2]]
    found = [operator.depth_attention(sources, leaves[2] * i, kernel=k) for i, k in enumerate(kernels * 2)]
    wanted = [reference.depth_attention(exact[:2], exact[2] * i) for i in range(4)]
    assert_close(gradients(found, leaves), gradients(wanted, exact), TOLERANCES[torch.float32])


@pytest.mark.parametrize("shape", [(WIDTH,), (2, WIDTH)], ids=["static", "sample"])
def test_an_optimiser_that_steps_in_backward(shape, kernel):
    """It changes a query as soon as that has its gradient, before the sources' gradients are complete."""
    dtype = torch.float64 if kernel == "eager" else torch.float32
    a, b, _ = leaves_of(dtype)
    queries = [(0.4 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_() for _ in range(3)]
    exact = [leaf.detach().clone().double().requires_grad_() for leaf in (a, b, *queries)]

    def step(query: Tensor) -> None:
        query.data.add_(1.0)

    for query in queries:
        query.register_post_accumulate_grad_hook(step)
    sources = [collect(a), collect(b)]
    found = [operator.depth_attention(sources, query, kernel=kernel) for query in queries]
    wanted = [reference.depth_attention(exact[:2], query) for query in exact[2:]]
    torch.autograd.backward([out.sin().sum() for out in found])
    expected = torch.autograd.grad(sum(out.sin().sum() for out in wanted), exact)
    assert_close([t.grad for t in (a, b, *queries)], list(expected), 10 * TOLERANCES[dtype])


def test_a_backward_pass_inside_of_another(kernel):
    """A hook that asks for a gradient of its own, through the same sources, while theirs are being added up."""
    dtype = torch.float64 if kernel == "eager" else torch.float32
    leaves = leaves_of(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def run(read, leaves: list[Tensor], given: Collect) -> tuple[list[Tensor], list[Tensor]]:
        sources, inner = [given(leaf) for leaf in leaves[:2]], []
        first = read(sources, leaves[2])
        side = read(sources, leaves[2].sin()).sin().sum()
        middle = leaves[2] * 2
        middle.register_hook(lambda _: inner.extend(torch.autograd.grad(side, leaves, retain_graph=True)))
        second = read(sources, middle)  # its backward comes first, then the hook, then the first one's
        return gradients([first, second], leaves), inner

    found = run(lambda s, q: operator.depth_attention(s, q, kernel=kernel), leaves, collect)
    wanted = run(reference.depth_attention, exact, lambda t: t)
    assert len(wanted[1]) == 3
    assert_close([*found[0], *found[1]], [*wanted[0], *wanted[1]], TOLERANCES[dtype])


def test_gradients_of_weights_may_have_any_strides():
    """That of `weights` comes transposed or expanded from what uses them."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 2, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query = (0.4 * torch.randn(WIDTH, dtype=torch.float64)).requires_grad_()
    factor = torch.randn(3, 2, 2, 3, 2, dtype=torch.float64)
    results = []
    for read in (operator.depth_attention, reference.depth_attention):
        out, weights = read(sources, query, heads=2, return_weights=True)
        loss = (weights.transpose(2, 3) * factor).sum() + out.sin().sum()
        results.append([*torch.autograd.grad(loss, [*sources, query], retain_graph=True),
                        *torch.autograd.grad(weights.sum() + weights[0].sum(), [*sources, query])])  # fmt: skip
    assert_close(*results, 1e-11)
