"""The Triton kernels in training: gradients added up in place, two-phase reads, checkpointing, a whole model.

On a GPU, or in Triton's interpreter (tests/conftest.py). More of what autograd must not notice: test_collect.py, for
the eager kernels in float64.
"""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnres_vision
from attnres_vision.ops import Norm, backend, operator, reference, two_phase
from attnres_vision.ops.arguments import Inputs, Options
from attnres_vision.ops.collect import collect
from tests.sweeps import covering, exhaustive

SHAPE, WIDTH, READS = (2, 5, 48), 48, 3
QUERIES = {"static": (WIDTH,), "sample": (2, WIDTH), "token": SHAPE}


def leaves(
    device: str, query: str = "static", sources: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """Sources, and queries with scores of order one."""
    torch.manual_seed(0)
    values = [torch.randn(SHAPE).to(device, dtype).requires_grad_() for _ in range(sources)]
    queries = [(torch.randn(QUERIES[query]) * WIDTH**-0.5).to(device).requires_grad_() for _ in range(READS)]
    return values, queries


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def kernel(sources: list[Tensor], query: Tensor, **options) -> Tensor:
    return operator.depth_attention(sources, query, kernel="triton", **options)


def loss_of(reads: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Different upstream gradients, and a use of a source beside its readers."""
    torch.manual_seed(1)
    weights = [torch.randn(read.shape).to(read.device, read.dtype) for read in reads]
    return sum((read * weight).sum() for read, weight in zip(reads, weights, strict=True)) + sources[0].square().sum()


def expected(sources: list[Tensor], queries: list[Tensor], **options) -> list[Tensor]:
    values, others = exact(sources), exact(queries)
    loss = loss_of([reference.depth_attention(values, query, **options) for query in others], values)
    return list(torch.autograd.grad(loss, values + others))


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    for index, (value, target) in enumerate(zip(found, wanted, strict=True)):
        error, size = (value.double() - target).abs().max().item(), target.abs().max().item()
        # The query of a single source has a gradient of zero: what is left is rounding of terms of order one
        assert error <= tolerance * (size or 1.0), f"tensor {index}: off by {error:.1e} of {size:.1e}"


@covering(which={"all": (0, 1, 2), "blocks": (0, 1), "one": (0,), "the-last": (2,)}, heads=[1, 3], query=list(QUERIES))
def test_gradients_of_several_readers_are_added_in_place(which, heads, query, triton_device):
    sources, queries = leaves(triton_device, query)
    collected = [collect(source) if i in which else source for i, source in enumerate(sources)]
    loss = loss_of([kernel(collected, q, heads=heads) for q in queries], collected)
    found = torch.autograd.grad(loss, sources + queries)
    assert_close(list(found), expected(sources, queries, heads=heads))


def test_bf16_gradients_are_added_in_fp32(triton_device):
    """40 readers: a sum in bf16 would lose most of the late contributions."""
    torch.manual_seed(0)
    source = torch.randn(1, 2, WIDTH).bfloat16().to(triton_device).requires_grad_()
    other = torch.randn(1, 2, WIDTH).bfloat16().to(triton_device)
    queries = [(torch.randn(WIDTH) * WIDTH**-0.5).to(triton_device) for _ in range(40)]
    sources = [collect(source), other]
    found = torch.autograd.grad(sum(kernel(sources, q).sum().float() for q in queries), source)[0]
    wide = source.detach().double().requires_grad_()
    total = sum(reference.depth_attention([wide, other.double()], q.double()).sum() for q in queries)
    assert_close([found], list(torch.autograd.grad(total, wide)), 2**-8)


@pytest.mark.parametrize("with_sum", [False, True], ids=["", "add"])
def test_a_transposed_upstream_gradient(with_sum, triton_device):
    sources, queries = leaves(triton_device)
    double_sources, double_queries = exact(sources), exact(queries)
    add = torch.randn(SHAPE, device=triton_device) if with_sum else None

    def loss(reads: list[Tensor]) -> Tensor:
        return loss_of([read.transpose(1, 2).contiguous() for read in reads], sources)

    collected = [collect(source) for source in sources]
    reads = [kernel(collected, q, add=add) for q in queries]
    reads = [read[0] for read in reads] if with_sum else reads
    last = double_sources[-1] + add.double() if with_sum else double_sources[-1]
    wanted = [reference.depth_attention([*double_sources[:-1], last], q) for q in double_queries]
    found = torch.autograd.grad(loss(reads), sources[1:] + queries)
    assert_close(list(found), list(torch.autograd.grad(loss(wanted), double_sources[1:] + double_queries)))


def test_a_retained_graph_and_two_forward_passes(triton_device):
    sources, queries = leaves(triton_device)
    collected = [collect(source) for source in sources]
    first, second = (loss_of([kernel(collected, q) for q in queries], collected) for _ in range(2))
    wanted = expected(sources, queries)
    for loss in (first, first, second):
        assert_close(list(torch.autograd.grad(loss, sources + queries, retain_graph=True)), wanted)
    both = torch.autograd.grad(first + second, sources + queries)
    assert_close(list(both), [2 * gradient for gradient in wanted])


def test_a_backward_pass_for_the_queries_alone_leaves_nothing_behind(triton_device):
    sources, queries = leaves(triton_device)
    collected = [collect(source) for source in sources]
    loss = loss_of([kernel(collected, q) for q in queries], collected)
    torch.autograd.grad(loss, queries, retain_graph=True)
    assert_close(list(torch.autograd.grad(loss, sources + queries)), expected(sources, queries))


def test_hooks_on_a_source_see_the_whole_gradient(triton_device):
    sources, queries = leaves(triton_device)
    seen: list[Tensor] = []
    activation = sources[1] * 1.0
    activation.register_hook(seen.append)
    collected = [collect(sources[0]), collect(activation), collect(sources[2])]
    loss_of([kernel(collected, q) for q in queries], collected).backward()
    assert_close(seen, expected(sources, queries)[1:2])


def test_checkpointed_readers_give_the_same_bits(triton_device):
    sources, queries = leaves(triton_device)

    def gradients(use_checkpoint: bool) -> tuple[Tensor, ...]:
        collected = [collect(source) for source in sources]
        reads = [checkpoint(kernel, collected, q, use_reentrant=False) if use_checkpoint else kernel(collected, q)
                 for q in queries]  # fmt: skip
        return torch.autograd.grad(loss_of(reads, collected), sources + queries)

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


TWO_PHASE = {
    "one-block": (1, "static", torch.float32, 1e-5),
    "static": (4, "static", torch.float32, 1e-5),
    "sample": (4, "sample", torch.float32, 1e-5),
    "token": (4, "token", torch.float32, 1e-5),
    "n33": (33, "static", torch.float32, 1e-5),
    "bf16": (4, "static", torch.bfloat16, 2e-2),
    "bf16-sample": (9, "sample", torch.bfloat16, 2e-2),
}


@covering(name=list(TWO_PHASE), collected={"": False, "collected": True})
def test_two_phase_reads_equal_the_reference(name, collected, triton_device):
    """Blocks once for three readers, of which the later two merge newer sources, ending in a norm."""
    blocks, query, dtype, tolerance = TWO_PHASE[name]
    sources, queries = leaves(triton_device, query, blocks + READS - 1, dtype)
    finished, newer = sources[:blocks], sources[blocks:]
    if collected:
        finished = [collect(source) for source in finished]
    options = {"eps": 1e-6, "scale": 0.7, "form": "sum"}
    first, later = two_phase.attend_blocks(finished, queries, kernel="triton", **options)
    norm = Norm("layer", 1e-5)
    reads = [first, *(
        kernel(newer[: index + 1], q, norm=norm, earlier=found, **options)
        for index, (q, found) in enumerate(zip(queries[1:], later, strict=True))
    )]  # fmt: skip
    values, others = exact(sources), exact(queries)
    wanted = [reference.depth_attention(values[: blocks + index], q, **options) for index, q in enumerate(others)]
    wanted[1:] = [norm.apply(hidden) for hidden in wanted[1:]]
    assert_close(reads, wanted, tolerance)
    found = torch.autograd.grad(loss_of(reads, finished), sources + queries)
    assert_close(list(found), list(torch.autograd.grad(loss_of(wanted, values), values + others)), tolerance)


@pytest.mark.parametrize("norm", [exhaustive(""), "layer", exhaustive("rms")])
def test_opcheck(norm, triton_device):
    """What compilers are told about the operator's results and gradients is what the kernels return."""
    sources, queries = leaves(triton_device, "sample")
    modulation = {"norm_scale": queries[1], "norm_shift": queries[2]} if norm else {}
    small = Inputs(queries[0], add=torch.randn(SHAPE, device=triton_device, requires_grad=True), **modulation)
    options = Options("triton", norm, 1e-5, 1e-6, 0.5, 3.0, 3)
    torch.library.opcheck(operator.forward_op, (sources, *small, *options))
    out, partial, *saved = (result.detach() for result in operator.forward_op(sources, *small, *options))
    values = [*(source.detach() for source in sources[:-1]), partial]
    given = [None if t is None else t.detach() for name, t in small._asdict().items() if name != "add"]
    needs_grad = [True] * len(values) + [tensor is not None for tensor in given]
    torch.library.opcheck(operator.backward_op, (out, partial, None, values, *given, *saved, *options, needs_grad))


@pytest.mark.parametrize("query", [next(iter(QUERIES)), *map(exhaustive, list(QUERIES)[1:])])
def test_opcheck_of_two_phase_reads(query, triton_device):
    sources, queries = leaves(triton_device, query)
    tensors = [tensor.detach() for tensor in sources], [tensor.detach() for tensor in queries]
    torch.library.opcheck(two_phase.blocks_op, (*tensors, 1e-6, 1.0, 3.0, "triton"))


CONFIGS = {
    "full": {"mode": "full", "two_phase": False},
    "full-two-phase": {"mode": "full"},
    "blocks": {"block_size": 2, "two_phase": False},
    "blocks-two-phase": {"block_size": 3},
    "condition": {"block_size": 2, "query": "condition"},
    "token": {"block_size": 2, "query": "token", "rank": 3},
}


@covering(name=list(CONFIGS), checkpointing={"": False, "checkpointing": True})
def test_a_training_step_of_a_vit_equals_the_eager_one(name, checkpointing, triton_device):
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = attnres_vision.attach(timm.create_model("vit_tiny_patch16_224", **options), CONFIGS[name])
    for parameter_name, parameter in model.named_parameters():
        if ".depth." in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(triton_device).set_grad_checkpointing(checkpointing)
    images = torch.randn(2, 3, 16, 16, device=triton_device)
    steps = []
    for kernels, trained in (("triton", model), ("eager", copy.deepcopy(model))):
        with backend(kernels):
            out = trained(images)
            out.square().sum().backward()
        steps.append([out.detach(), *(parameter.grad for parameter in trained.parameters())])
    assert_close(steps[0][:1], steps[1][:1])
    largest = max(grad.abs().max().item() for grad in steps[1][1:])
    for found, wanted in zip(steps[0][1:], steps[1][1:], strict=True):
        # Some gradients are small differences of large ones
        assert (found - wanted).abs().max() <= 1e-5 * max(wanted.abs().max().item(), 0.01 * largest)


@pytest.mark.parametrize("mode", [torch.no_grad, exhaustive(torch.inference_mode)])
def test_a_look_at_the_stream_without_gradients_takes_none_away(mode, triton_device):
    """A sum that waits for the next kernel belongs to the pass that wrote it, not to the hook that asks for it."""
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5}
    model = attnres_vision.attach(timm.create_model("vit_tiny_patch16_224", **options), {"block_size": 4})
    model.to(triton_device)
    images = torch.randn(2, 3, 16, 16, device=triton_device)
    looks = [lambda stream: None, lambda stream: stream.total(), lambda stream: model.norm.depth(stream)]
    grads = []

    def look(block: torch.nn.Module, args: tuple, stream: attnres_vision.DepthStream) -> None:
        with mode():
            looks[len(grads)](stream)

    for block in model.blocks:
        block.register_forward_hook(look)
    for _ in looks:
        model.zero_grad()
        with backend("triton"):
            model(images).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for found in grads[1:]:
        largest = max(grad.abs().max() for grad in grads[0])
        assert all((a - b).abs().max() <= 1e-5 * largest for a, b in zip(found, grads[0], strict=True))
