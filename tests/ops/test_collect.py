"""Source gradients that readers add up in place: the same gradients as autograd's, whatever is done with the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres_vision.ops import operator, reference
from attnres_vision.ops.collect import collect

SHAPE, WIDTH, READS = (2, 7, 12), 12, 4


def leaves(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    sources = [torch.randn(SHAPE, dtype=dtype, requires_grad=True) for _ in range(3)]
    return sources, [torch.randn(WIDTH, dtype=dtype, requires_grad=True) for _ in range(READS)]


def loss_of(read, sources: list[Tensor], queries: list[Tensor], **options) -> Tensor:
    """Several readers of the same sources, a use of a source beside them, and different upstream gradients."""
    torch.manual_seed(1)
    reads = [read(sources, query, **options) for query in queries]
    return sum((r * torch.randn_like(r)).sum() for r in reads) + sources[0].square().sum()


def expected(sources: list[Tensor], queries: list[Tensor], **options) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(reference.depth_attention, sources, queries, **options), sources + queries))


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3}, {"form": "mean", "scale": 0.3}],
    ids=["one-head", "three-heads", "mean"],
)
@pytest.mark.parametrize("query_shape", [(12,), (2, 12), (2, 7, 12)], ids=["static", "sample", "token"])
@pytest.mark.parametrize("collected_ones", [(0, 1, 2), (0, 1), (2,)], ids=["all", "all-but-the-last", "the-last"])
def test_gradients_equal_autograds(collected_ones, query_shape, options):
    sources, _ = leaves()
    queries = [torch.randn(query_shape, dtype=torch.float64, requires_grad=True) for _ in range(READS)]
    collected = [collect(source) if i in collected_ones else source for i, source in enumerate(sources)]
    assert [hasattr(source, "source_gradient") for source in collected] == [i in collected_ones for i in range(3)]
    found = torch.autograd.grad(loss_of(operator.depth_attention, collected, queries, **options), sources + queries)
    torch.testing.assert_close(list(found), expected(sources, queries, **options), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_transposed_upstream_gradient(heads):
    """As a dense head gives, which takes (B, D, T): the sum must not take on its strides and lose a term."""
    sources, queries = leaves()

    def loss(read, tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(1)
        maps = [read(tensors, query, heads=heads).transpose(1, 2).contiguous() for query in queries]
        return sum((m * torch.randn_like(m)).sum() for m in maps)

    found = torch.autograd.grad(loss(operator.depth_attention, [collect(s) for s in sources]), sources + queries)
    exact = torch.autograd.grad(loss(reference.depth_attention, sources), sources + queries)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_a_second_derivative_raises_instead_of_being_wrong():
    sources, queries = leaves()
    loss = loss_of(operator.depth_attention, [collect(source) for source in sources], queries)
    with pytest.raises(RuntimeError, match=r"no double backward.*torch\.func"):
        torch.autograd.grad(loss, sources, create_graph=True)


def test_a_retained_graph_can_be_walked_again():
    sources, queries = leaves()
    loss = loss_of(operator.depth_attention, [collect(source) for source in sources], queries)
    for _ in range(2):
        found = torch.autograd.grad(loss, sources + queries, retain_graph=True)
        torch.testing.assert_close(list(found), expected(sources, queries), rtol=1e-10, atol=1e-12)


def test_a_backward_pass_for_the_queries_alone_leaves_nothing_behind():
    """Readers run, the sources' own nodes do not: what was added up must not turn up in the next backward pass."""
    sources, queries = leaves()
    loss = loss_of(operator.depth_attention, [collect(source) for source in sources], queries)
    torch.autograd.grad(loss, queries, retain_graph=True)
    found = torch.autograd.grad(loss, sources + queries)
    torch.testing.assert_close(list(found), expected(sources, queries), rtol=1e-10, atol=1e-12)


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    sources, queries = leaves()
    failures = [True]

    def fail_once(gradient: Tensor) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("stopped in the middle")

    sources[0].register_hook(fail_once)
    loss = loss_of(operator.depth_attention, [collect(source) for source in sources], queries)
    with pytest.raises(RuntimeError, match="stopped in the middle"):
        torch.autograd.grad(loss, sources + queries, retain_graph=True)
    found = torch.autograd.grad(loss, sources + queries)
    torch.testing.assert_close(list(found), expected(sources, queries), rtol=1e-10, atol=1e-12)


def test_some_of_the_readers_some_of_the_sources():
    sources, queries = leaves()
    collected = [collect(source) for source in sources]
    reads = [operator.depth_attention(collected, query) for query in queries]
    plain = [reference.depth_attention(sources, query) for query in queries]
    for index in (1, 3):
        found = torch.autograd.grad(reads[index].sin().sum(), sources[1:], retain_graph=True)
        wanted = torch.autograd.grad(plain[index].sin().sum(), sources[1:], retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_checkpointed_readers_give_the_same_bits():
    sources, queries = leaves(torch.float32)

    def gradients(use_checkpoint: bool) -> list[Tensor]:
        collected = [collect(source) for source in sources]
        losses = []
        for _ in range(2):  # two forward passes before one backward pass
            reads = [
                checkpoint(operator.depth_attention, collected, query, use_reentrant=False)
                if use_checkpoint
                else operator.depth_attention(collected, query)
                for query in queries
            ]
            losses.append(sum(read.sin().sum() for read in reads))
        return list(torch.autograd.grad(sum(losses), sources + queries))

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_gradients_of_bf16_sources_are_added_in_fp32():
    """64 readers: a sum in bf16 would lose most of the late contributions."""
    torch.manual_seed(0)
    source = torch.randn(SHAPE).bfloat16().requires_grad_()
    other = torch.randn(SHAPE, requires_grad=True)
    queries = [torch.randn(WIDTH) for _ in range(64)]

    sources = [collect(source), other]
    wide = source.detach().double().requires_grad_()
    exact = torch.autograd.grad(sum(reference.depth_attention([wide, other], q).sum() for q in queries), wide)[0]
    found = torch.autograd.grad(sum(operator.depth_attention(sources, q).sum() for q in queries), source)[0]
    # half a unit in the last place of bf16, and fp32 rounding; a sum in bf16 is ten times further away
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))


def test_hooks_on_the_tensor_before_it_is_collected_see_the_whole_gradient():
    sources, queries = leaves()
    seen = []
    activation = sources[1] * 1.0
    activation.register_hook(seen.append)
    loss_of(
        operator.depth_attention, [collect(sources[0]), collect(activation), collect(sources[2])], queries
    ).backward()
    torch.testing.assert_close(seen, [expected(*leaves())[1]], rtol=1e-10, atol=1e-12)


def test_nothing_is_collected_without_gradients():
    source = torch.randn(SHAPE)
    assert collect(source) is source
    with torch.no_grad():
        assert collect(leaf := source.clone().requires_grad_()) is leaf
