"""Phase one and its merges: the values and gradients of reads of all sources, whatever is done with the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres_vision.ops import Norm, operator, reference, two_phase
from attnres_vision.ops.collect import collect

BLOCKS, READERS, WIDTH = 3, 4, 12
SHAPE = (2, 5, WIDTH)
OPTIONS = {"eps": 1e-6, "scale": 0.7, "form": "sum"}


class Case:
    """A chain of readers, of which each is followed by a layer whose output is one more source, as in a Full model."""

    def __init__(self, kernel: str, dtype: torch.dtype = torch.float64, query: tuple[int, ...] = (WIDTH,)) -> None:
        torch.manual_seed(0)
        self.kernel, self.dtype = kernel, dtype
        self.blocks = [torch.randn(SHAPE, dtype=dtype, requires_grad=True) for _ in range(BLOCKS)]
        self.queries = [torch.randn(query, dtype=dtype).mul_(0.3).requires_grad_() for _ in range(READERS)]
        self.layers = [torch.randn(WIDTH, WIDTH, dtype=dtype).mul_(0.3).requires_grad_() for _ in range(READERS)]
        self.leaves = [*self.blocks, *self.queries, *self.layers]
        self.upstream = torch.randn(SHAPE, dtype=dtype)
        self.groups: list[two_phase.Group] = []

    def run(
        self, norm: Norm | None = None, use_checkpoint: bool = False, use: Callable[..., None] | None = None
    ) -> list[Tensor]:
        """What every reader reads; a source is collected from when a second reader reads it."""
        sources = [collect(block) for block in self.blocks]
        first, later = two_phase.attend_blocks(sources, self.queries, **OPTIONS, kernel=self.kernel)
        self.groups.append(later[0].group)
        reads = [first if norm is None else norm.apply(first)]
        newer: list[Tensor] = []
        for query, layer, earlier in zip(self.queries[1:], self.layers, later, strict=False):

            def read(last: Tensor, *rest: Tensor, query: Tensor = query, earlier=earlier) -> Tensor:
                return operator.depth_attention(
                    [*rest, last], query, norm=norm, earlier=earlier, kernel=self.kernel, **OPTIONS
                )

            newest = reads[-1] @ layer
            given = newest, *newer
            reads.append(checkpoint(read, *given, use_reentrant=False) if use_checkpoint else read(*given))
            newer.append(collect(newest))
            if use is not None:
                use(earlier)
        return reads

    def expected(self, norm: Norm | None = None) -> list[Tensor]:
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        blocks, queries, layers = leaves[:BLOCKS], leaves[BLOCKS : BLOCKS + READERS], leaves[BLOCKS + READERS :]
        sources, reads = list(blocks), []
        for query, layer in zip(queries, layers, strict=True):
            hidden = reference.depth_attention(sources, query, **OPTIONS)
            reads.append(hidden if norm is None else norm.apply(hidden))
            sources.append(reads[-1] @ layer)
        return self.gradients(reads, leaves) if reads else []

    def gradients(self, reads: list[Tensor], leaves: list[Tensor] | None = None, **options) -> list[Tensor]:
        loss = sum((i + 1) * (read * self.upstream.to(read)).sum() for i, read in enumerate(reads))
        leaves = self.leaves if leaves is None else leaves
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]

    def assert_close(self, found: list[Tensor], expected: list[Tensor]) -> None:
        largest = max(value.abs().max().item() for value in expected)
        tolerance = {torch.float64: 1e-11, torch.float32: 2e-5}[self.dtype] * largest
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=0, atol=tolerance)


@pytest.fixture(params=["eager", "triton"])
def case(request) -> Case:
    if request.param == "eager":
        return Case("eager")
    request.getfixturevalue("triton_device")
    if torch.cuda.is_available():
        pytest.skip("the cases are on the CPU")
    return Case("triton", torch.float32)


@pytest.mark.parametrize("norm", [None, Norm("layer", 1e-5), Norm("rms", 1e-5)], ids=["", "layer", "rms"])
def test_gradients_are_those_of_reads_of_all_sources(case, norm):
    case.assert_close(case.gradients(case.run(norm)), case.expected(norm))


@pytest.mark.parametrize("query", [(2, WIDTH), SHAPE], ids=["sample", "token"])
def test_other_queries(query):
    case = Case("eager", query=query)
    case.assert_close(case.gradients(case.run()), case.expected())


def test_checkpointed_readers(case):
    case.assert_close(case.gradients(case.run(use_checkpoint=True)), case.expected())


def test_a_retained_graph_can_be_walked_again(case):
    reads = case.run()
    for _ in range(2):
        case.assert_close(case.gradients(reads, retain_graph=True), case.expected())


def test_two_forward_passes_before_one_backward_pass(case):
    both = [a + b for a, b in zip(case.run(), case.run(), strict=True)]
    case.assert_close(case.gradients(both), [2 * grad for grad in case.expected()])


def test_a_backward_pass_for_some_inputs_leaves_nothing_behind(case):
    """The last query alone: phase one does not run, or only for that reader."""
    reads, expected = case.run(), case.expected()
    index = BLOCKS + READERS - 1
    found = case.gradients(reads, [case.leaves[index]], retain_graph=True)
    case.assert_close(found, expected[index : index + 1])
    found = case.gradients(reads, [case.leaves[-2]], retain_graph=True)
    case.assert_close(found, expected[-2:-1])
    case.assert_close(case.gradients(reads), expected)


@pytest.mark.parametrize("used", [[0], [2], [1, 3]], ids=str)
def test_readers_without_a_gradient(case, used):
    reads = case.run()
    blocks = [block.detach().double().requires_grad_() for block in case.blocks]
    queries = [query.detach().double().requires_grad_() for query in case.queries]
    layers = [layer.detach().double() for layer in case.layers]
    sources, wanted = list(blocks), []
    for query, layer in zip(queries, layers, strict=True):
        wanted.append(reference.depth_attention(sources, query, **OPTIONS))
        sources.append(wanted[-1] @ layer)
    found = case.gradients([reads[i] for i in used], [*case.blocks, *case.queries])
    case.assert_close(found, case.gradients([wanted[i] for i in used], [*blocks, *queries]))


def test_two_runs_give_the_same_bits(case):
    first, second = case.gradients(case.run()), case.gradients(case.run())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_backward_keeps_may_be_elsewhere(case):
    with torch.autograd.graph.save_on_cpu():
        reads = case.run()
    case.assert_close(case.gradients(reads), case.expected())


def test_nobody_keeps_the_means(case):
    """Neither the forward pass's nor backward's, when their readers have run."""
    means: list[int] = []
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    original = two_phase.blocks_op

    def spy(*args):
        results = original(*args)
        means.extend(mean.untyped_storage().data_ptr() for mean in results[1:READERS])
        return results

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patch.setattr(two_phase, "blocks_op", spy)
        reads = case.run(use=lambda earlier: kept.append(earlier.lse))  # its storage must not be reused either
    assert len(means) == READERS - 1
    (group,) = case.groups
    assert not group.means
    exchange = group.exchange
    case.gradients(reads)
    assert not exchange._handed._states
    rows = [tensor for tensor in kept if tensor.shape == SHAPE]
    distinct = {tensor.untyped_storage().data_ptr() for tensor in rows}
    # The blocks, what the first reader read and its layer keeps, and of each later layer its input and its output
    assert len(distinct) <= BLOCKS + 1 + 2 * (READERS - 1)


def test_a_group_dies_with_its_graph(case):
    """No cycle has to be collected first."""
    gc.collect()
    gc.disable()
    try:
        reads = case.run()
        group = weakref.ref(case.groups.pop())
        case.gradients(reads)
        del reads
        assert group() is None
    finally:
        gc.enable()


def test_a_second_read_of_the_same_mean(case):
    """A module that asks for the tensor and for its norm reads twice."""
    with torch.no_grad():
        first, (second, *_) = two_phase.attend_blocks(case.blocks, case.queries, **OPTIONS, kernel=case.kernel)
        torch.testing.assert_close(second.mean(), second.mean())
        torch.testing.assert_close(
            first, reference.depth_attention(case.blocks, case.queries[0], **OPTIONS), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("used", ["result", "weights"])
def test_a_merge_whose_result_or_weights_alone_have_a_gradient(used):
    torch.manual_seed(0)
    *blocks, partial = sources = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    _, (known,) = two_phase.attend_blocks(blocks, [query.detach(), query], **OPTIONS, kernel="eager")
    merged = operator.depth_attention([partial], query, earlier=known, return_weights=True, **OPTIONS)
    out, weights = reference.depth_attention(sources, query, return_weights=True, **OPTIONS)
    found, wanted = (merged[0], out) if used == "result" else (merged[1], weights[-1:])
    inputs = [*sources, query]
    grads = (torch.autograd.grad(value.square().sum(), inputs) for value in (found, wanted))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_a_second_derivative_raises_instead_of_being_wrong(case):
    with pytest.raises(RuntimeError, match="no double backward"):
        case.gradients(case.run(), create_graph=True)


def test_opcheck():
    torch.manual_seed(0)
    sources, queries = [torch.randn(SHAPE) for _ in range(3)], [torch.randn(WIDTH) for _ in range(2)]
    torch.library.opcheck(two_phase.blocks_op, (sources, queries, 1e-6, 0.5, 3.0, "eager"))
