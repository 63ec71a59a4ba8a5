"""Depth attention as an operator: errors, memory, FLOPs, determinism, checkpointing, compilation and export."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attnres_vision.ops import Norm, backend, depth_attention, dispatch, operator, reference
from attnres_vision.ops.arguments import Inputs, Options


def inputs(n: int, shape: tuple[int, ...], query_shape: tuple[int, ...], **options) -> tuple[list[Tensor], Tensor]:
    """Random sources and a random non-zero query, all of which require gradients."""
    torch.manual_seed(n)
    sources = [torch.randn(shape, requires_grad=True, **options) for _ in range(n)]
    return sources, torch.randn(query_shape, requires_grad=True, **options)


V, Q = torch.zeros(2, 7, 12), torch.zeros(12)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        pytest.param(([], Q), {}, ValueError, "sources must hold at least one tensor", id="no-sources"),
        pytest.param((V, Q), {}, TypeError, r"sources must be a sequence of tensors.*unbind.*got a tensor", id="stack"),
        pytest.param(
            ([V, 1.0], Q), {}, TypeError, r"sources\[1\].*floating-point tensor, got float", id="not-a-tensor"
        ),
        pytest.param(
            ([V, V.int()], Q), {}, TypeError, r"sources\[1\].*got a tensor of torch.int32", id="integer-source"
        ),
        pytest.param(
            ([V, V[:1]], Q), {}, ValueError, r"one shape, got \(2, 7, 12\) and, at 1, \(1, 7, 12\)", id="shapes"
        ),
        pytest.param(([V.sum()], Q), {}, ValueError, r"sources must have shape \(\.\.\., D\)", id="scalars"),
        pytest.param(([V, V.to("meta")], Q), {}, ValueError, "one device, got cpu and, at 1, meta", id="source-device"),
        pytest.param(([V], None), {}, TypeError, "query must be a floating-point tensor, got NoneType", id="no-query"),
        pytest.param(([V], Q.long()), {}, TypeError, "query.*got a tensor of torch.int64", id="integer-query"),
        pytest.param(
            ([V], Q[:6]), {}, ValueError, r"\(12,\) or \(2, 12\) or \(2, 7, 12\).*got \(6,\)", id="query-width"
        ),
        pytest.param(([V], V[:1]), {}, ValueError, r"query must have shape.*got \(1, 7, 12\)", id="query-batch"),
        pytest.param(([V], Q.to("meta")), {}, ValueError, "device of the sources, cpu, got meta", id="query-device"),
        pytest.param(([V], Q), {"heads": 5}, ValueError, "positive divisor of the width D=12, got 5", id="heads"),
        pytest.param(([V], Q), {"heads": 0}, ValueError, "heads must be a positive divisor.*got 0", id="no-heads"),
        pytest.param(([V], Q), {"heads": 2.0}, TypeError, "heads must be an int, got float", id="fractional-heads"),
        pytest.param(([V], Q), {"form": "max"}, ValueError, "form must be 'sum' or 'mean', got 'max'", id="form"),
        pytest.param(([V], Q), {"eps": -1.0}, ValueError, "eps must be zero or positive, got -1.0", id="eps"),
        pytest.param(([V], Q), {"scale": "1"}, TypeError, "eps and scale must be numbers.*str", id="scale"),
    ],
)
def test_bad_input_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        depth_attention(*arguments, **options)


SMALL = {  # inputs of the operator beside sources and query, by their shapes
    "static": ((12,), {}, "", 2),
    "sample": ((2, 12), {}, "", 2),
    "token": ((2, 7, 12), {}, "", 2),
    "low-rank-and-layer-norm": (
        (12,),
        {"left": (2, 7, 4), "right": (12, 4), "norm_weight": (12,), "norm_bias": (12,)},
        "layer",
        2,
    ),
    "sum-and-rms-norm": ((12,), {"add": (2, 7, 12), "norm_weight": (12,)}, "rms", 2),
    "continued": ((12,), {"mixed": (2, 7, 12), "lse": (2, 7)}, "", 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_opcheck(name):
    query_shape, shapes, norm, heads = SMALL[name]
    sources, query = inputs(3, (2, 7, 12), query_shape)
    sources = sources[:1] if "mixed" in shapes else sources
    small = Inputs(query, **{key: torch.randn(shape, requires_grad=True) for key, shape in shapes.items()})
    options = Options("eager", norm, 1e-5, 1e-6, 0.5, 3.0, heads)
    torch.library.opcheck(operator.forward_op, (sources, *small, *options))
    out, partial, *saved = (result.detach() for result in operator.forward_op(sources, *small, *options))
    values = [source.detach() for source in sources]
    if small.add is not None:
        values[-1] = partial
    given = [None if t is None else t.detach() for field, t in small._asdict().items() if field != "add"]
    needs_grad = [True] * len(values) + [tensor is not None for tensor in given]
    grads = (torch.ones_like(out), partial if small.add is not None else None, None)
    torch.library.opcheck(operator.backward_op, (*grads, values, *given, *saved, *options, needs_grad))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_low_rank_query_and_layer_norm_equal_their_parts(heads, affine):
    """The operator's two options against the reference followed by PyTorch's own layer norm: values and gradients."""
    double = {"dtype": torch.float64, "requires_grad": True}
    sources, query = inputs(5, (2, 7, 12), (12,), dtype=torch.float64)
    left, right = torch.randn(2, 7, 4, **double), torch.randn(12, 4, **double)
    weight, bias = (torch.randn(12, **double), torch.randn(12, **double)) if affine else (None, None)
    arguments = [*sources, query, left, right, *([weight, bias] if affine else [])]
    out = operator.depth_attention(
        sources, query, heads=heads, low_rank=(left, right), norm=Norm("layer", 1e-5, weight, bias)
    )
    hidden = reference.depth_attention(sources, query + left @ right.T, heads=heads)
    expected = nn.functional.layer_norm(hidden, (12,), weight, bias, 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(out)
    for gradient, wanted in zip(
        torch.autograd.grad(out, arguments, upstream), torch.autograd.grad(expected, arguments, upstream), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def test_saved_memory_is_a_few_numbers_per_token():
    sources, query = inputs(9, (8, 197, 768), (768,))
    own = {tensor.data_ptr() for tensor in (*sources, query)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = depth_attention(sources, query)
    assert out.requires_grad
    assert sum(saved.values()) == 3 * 9 * 8 * 197 * 4  # weights, scores, 1/rms in fp32: 0.17 MB


def test_forward_and_backward_are_deterministic_bit_for_bit():
    sources, query = inputs(9, (8, 50, 96), (96,))
    runs = []
    for _ in range(2):
        out = depth_attention(sources, query)
        runs.append([out, *torch.autograd.grad(out.square().sum(), [*sources, query])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_outputs_and_gradients_share_no_memory():
    sources, query = inputs(3, (2, 7, 12), (12,))
    out, weights = depth_attention(sources, query, return_weights=True)
    tensors = [out, weights, *sources, query, *torch.autograd.grad(out.sum(), [*sources, query])]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_gradient_checkpointing_gives_the_same_gradients():
    sources, query = inputs(4, (2, 7, 12), (12,))
    plain = torch.autograd.grad(depth_attention(sources, query).square().sum(), [*sources, query])
    rerun = checkpoint(lambda q, *v: depth_attention(v, q), query, *sources, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(rerun.square().sum(), [*sources, query]), strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_raises_instead_of_being_wrong():
    sources, query = inputs(3, (2, 7, 12), (12,))
    grads = torch.autograd.grad(depth_attention(sources, query).square().sum(), sources, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grads[0].square().sum(), sources)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("trained", ["sources", "norm"])
def test_an_empty_batch_has_gradients_too(trained, batch):
    """As a process gets that ran out of data: every parameter needs its zero, or DDP waits for it forever."""
    sources, query = inputs(3, (batch, 7, 12), (12,))
    weight, bias = torch.ones(12, requires_grad=True), torch.zeros(12, requires_grad=True)
    if trained == "norm":
        sources, query = [source.detach() for source in sources], query.detach()
    out = operator.depth_attention(sources, query, norm=Norm("layer", 1e-6, weight, bias))
    out.square().sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert bool(weight.grad.any()) == (batch > 0)


@pytest.mark.parametrize(("query_shape", "heads"), [((384,), 1), ((8, 384), 6), ((8, 197, 384), 1)])
def test_flops_are_counted_on_the_meta_device(query_shape, heads):
    sources, query = inputs(5, (8, 197, 384), query_shape, device="meta")
    elements = 5 * 8 * 197 * 384
    with FlopCounterMode(display=False) as forward:
        out, weights = depth_attention(sources, query, heads=heads, return_weights=True)
    assert forward.get_total_flops() == 6 * elements
    assert out.shape == sources[0].shape and weights.shape == (5, 8, 197, heads)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 10 * elements
    assert sources[0].grad.is_meta and query.grad.shape == query.shape


@pytest.mark.parametrize(
    ("query_shape", "options"),
    [((24,), {}), ((2, 24), {"heads": 3, "form": "mean"}), ((2, 7, 24), {"scale": 0.5})],
    ids=["static", "sample-h3-mean", "token-scaled"],
)
def test_compiled_without_graph_breaks_forward_and_backward(query_shape, options):
    sources, query = inputs(4, (2, 7, 24), query_shape, dtype=torch.float64)

    def read(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return depth_attention(tensors[:-1], tensors[-1], return_weights=True, **options)

    runs = []
    for function in (torch.compile(read, fullgraph=True), read):
        out, weights = function(*sources, query)
        loss = out.square().sum() + weights.square().sum()
        runs.append([out, weights, *torch.autograd.grad(loss, [*sources, query])])
    for compiled, plain in zip(*runs, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-9, rtol=1e-10)


def test_exported_program_equals_the_module_and_holds_only_ordinary_operators():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(12))

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return depth_attention([first, second, first + second], self.query)

    reader, example = Reader(), (torch.randn(2, 7, 12), torch.randn(2, 7, 12))
    program = torch.export.export(reader, example, strict=False)
    torch.testing.assert_close(program.module()(*example), reader(*example))
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert calls and not any("attnres" in call for call in calls)


def test_reference_and_operator_agree_on_a_realistic_size():
    sources, query = inputs(12, (4, 197, 384), (384,))
    query = 0.05 * query.detach()
    expected = reference.depth_attention([s.double() for s in sources], query.double())
    torch.testing.assert_close(depth_attention(sources, query).double(), expected, atol=1e-4, rtol=1e-5)


def test_export_with_a_batch_that_may_equal_the_width():
    class Read(nn.Module):
        def forward(self, first: Tensor, second: Tensor, query: Tensor) -> Tensor:
            return depth_attention([first, second], query)

    example = torch.randn(3, 7, 12), torch.randn(3, 7, 12), torch.randn(3, 7, 12)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(Read(), example, dynamic_shapes=(batch, batch, batch), strict=False)
    sources, query = [torch.randn(12, 7, 12) for _ in range(2)], torch.randn(12, 7, 12)
    torch.testing.assert_close(program.module()(*sources, query), depth_attention(sources, query), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_the_result_has_the_dtype_of_the_sources_whatever_the_norm_has(name, triton_device):
    sources = [torch.randn(2, 3, 48, device=triton_device, dtype=torch.bfloat16) for _ in range(2)]
    scale = torch.randn(2, 48, device=triton_device)
    with backend(name):
        assert depth_attention(sources, scale[0], norm=Norm("layer", scale=scale)).dtype == torch.bfloat16


def test_a_float64_sum_is_not_for_the_kernels(triton_device):
    source, add = torch.randn(2, 3, 48, device=triton_device), torch.randn(2, 3, 48, device=triton_device).double()
    with backend("triton"), pytest.raises(ValueError, match=r"got torch\.float32, torch\.float64"):
        depth_attention([source], source[0, 0], add=add)


def test_a_folder_named_triton_is_no_triton(tmp_path, monkeypatch):
    (tmp_path / "triton").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert not dispatch._has_triton()


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    source, query = torch.randn(2, 3, 8), torch.randn(8)
    assert torch.equal(depth_attention([source], query), source)
    with backend("triton"), pytest.raises(ValueError, match="Triton is not installed"):
        depth_attention([source], query)
