"""DepthStream: it stands where a residual tensor stood, keeps block sums apart, and refuses what it does not know."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres_vision import DepthStream
from attnres_vision.stream.open_block import OpenBlock


def stream_of(*shape: int, blocks: int = 3, partial: bool = True) -> DepthStream:
    make = [torch.randn(*shape, dtype=torch.float64) for _ in range(blocks + 1)]
    return DepthStream(tuple(make[:blocks]), open_block=OpenBlock(make[-1]) if partial else None)


def assert_maps(result: DepthStream, stream: DepthStream, function) -> None:
    """Every source of `result` is the function of that source."""
    assert isinstance(result, DepthStream)
    assert len(result.sources()) == len(stream.sources())
    for got, source in zip(result.sources(), stream.sources(), strict=True):
        assert torch.equal(got, function(source))
    assert torch.allclose(result.total(), function(stream.total()))


# Writing -------------------------------------------------------------------------------------------------------------


def test_layers_of_a_block_are_summed_and_closing_it_starts_a_new_one() -> None:
    embedding, a, b, c = torch.randn(4, 2, 3, 5).unbind()
    stream = DepthStream((embedding,))
    assert stream.sources() == (embedding,)
    stream = stream + a
    assert [s is t for s, t in zip(stream.sources(), (embedding, a), strict=True)] == [True, True]
    stream = b + stream  # a tensor on the left
    stream.close_block()
    stream.close_block()  # recomputation closes again
    assert torch.equal(stream.sources()[1], a + b)
    stream = stream + c
    assert len(stream.sources()) == 3
    assert torch.equal(stream.sources()[1], a + b)
    assert torch.equal(stream.sources()[2], c)
    assert torch.equal(stream.total(), embedding + (a + b) + c)


def test_writing_does_not_change_the_stream_written_to() -> None:
    """A host keeps `shortcut = x`, and gradient checkpointing runs a block twice from the same input."""
    stream = stream_of(2, 3, 4)
    before = [source.clone() for source in stream.sources()]
    first, second = stream + 1.0 * torch.ones(2, 3, 4), stream + torch.ones(2, 3, 4)
    assert all(torch.equal(x, y) for x, y in zip(stream.sources(), before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first.sources(), second.sources(), strict=True))


@pytest.mark.parametrize("shape", [(1, 1, 4), (4,), (1, 3, 4)], ids=str)
def test_a_smaller_output_broadcasts_to_the_stream(shape: tuple[int, ...]) -> None:
    stream = DepthStream((torch.randn(2, 3, 4),))
    delta = torch.randn(shape)
    assert torch.equal((stream + delta).sources()[1], delta.broadcast_to(2, 3, 4))


def test_an_output_larger_than_the_stream_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        DepthStream((torch.randn(1, 3, 4),)) + torch.randn(2, 3, 4)


def test_bf16_outputs_accumulate_in_the_dtype_of_the_embedding() -> None:
    """256 outputs of 2**-9 after one of 1: bf16 sums would stay at 1, as 1 + 2**-9 rounds to 1."""
    stream = DepthStream((torch.zeros(1, 1, 2),)) + torch.ones(1, 1, 2, dtype=torch.bfloat16)
    for _ in range(256):
        stream = stream + torch.full((1, 1, 2), 2.0**-9, dtype=torch.bfloat16)
    assert stream.open_block.total.dtype == torch.float32
    assert torch.equal(stream.open_block.total, torch.full((1, 1, 2), 1.5))


def test_fp32_outputs_keep_their_precision_in_a_bf16_model() -> None:
    """LayerScale in fp32 after a bf16 layer gives fp32 outputs, which the stock stream would promote as well."""
    stream = DepthStream((torch.zeros(1, 1, 2, dtype=torch.bfloat16),)) + torch.ones(1, 1, 2)
    stream = stream + torch.full((1, 1, 2), 2.0**-9)
    assert torch.equal(stream.open_block.total, torch.full((1, 1, 2), 1 + 2.0**-9))


# What a host asks of its residual tensor -----------------------------------------------------------------------------


def test_metadata_is_that_of_the_residual_tensor() -> None:
    stream = stream_of(2, 3, 4)
    assert stream.shape == (2, 3, 4)
    assert stream.size() == (2, 3, 4)
    assert (stream.size(1), stream.size(-1), stream.ndim, stream.dim()) == (3, 4, 3, 3)
    assert (stream.dtype, stream.device) == (torch.float64, torch.device("cpu"))


MAPPED = {
    "slice": lambda x: x[:, 1:],
    "slice-of-steps": lambda x: x[:, ::2],
    "index": lambda x: x[:, 0],
    "mask": lambda x: x[torch.tensor([True, False])],
    "ellipsis": lambda x: x[..., 1:3, :],
    "reshape": lambda x: x.reshape(2, 2, 3, 4),
    "reshape-tuple": lambda x: x.reshape((2, 2, 3, 4)),
    "view": lambda x: x.view(12, 4),
    "torch.reshape": lambda x: torch.reshape(x, (2, 2, 3, 4)),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("name", MAPPED)
def test_tokenwise_operations_act_on_every_source(name: str) -> None:
    stream = stream_of(2, 6, 4)
    assert_maps(MAPPED[name](stream), stream, MAPPED[name])


@pytest.mark.parametrize("partial", [True, False], ids=["open", "closed"])
def test_permuted_channels_come_back_for_the_reader(partial: bool) -> None:
    """SAM hands its neck (B, D, H, W)."""
    stream = stream_of(2, 3, 5, 4, partial=partial)
    moved = stream.permute(0, 3, 1, 2)
    assert moved.shape == (2, 4, 3, 5)
    assert_maps(moved, stream, lambda x: x.permute(0, 3, 1, 2))
    assert_maps(moved.channels_last(), stream, lambda x: x)
    assert_maps(torch.permute(stream, (0, 3, 1, 2)).permute(0, 2, 3, 1), stream, lambda x: x)


def test_cat_of_the_halves_of_a_stream_is_that_stream() -> None:
    stream = stream_of(2, 6, 4)
    assert_maps(torch.cat([stream[:, :2], stream[:, 2:]], dim=1), stream, lambda x: x)


@pytest.mark.parametrize("partial", [True, False], ids=["open", "closed"])
def test_a_token_that_joins_late_is_an_embedding(partial: bool) -> None:
    stream, token = stream_of(2, 6, 4, partial=partial), torch.randn(2, 1, 4, dtype=torch.float64)
    joined = torch.cat((token, stream), dim=1)
    assert torch.equal(joined.total()[:, :1], token)
    assert torch.allclose(joined.total()[:, 1:], stream.total())
    assert torch.equal(joined.sources()[0][:, :1], token)
    assert not any(source[:, :1].any() for source in joined.sources()[1:])


def test_a_stream_is_a_pytree() -> None:
    stream = stream_of(2, 3, 4)
    stream.close_block()
    leaves, spec = pytree.tree_flatten(stream)
    assert len([leaf for leaf in leaves if isinstance(leaf, Tensor)]) == 4
    back = pytree.tree_unflatten(leaves, spec)
    assert back.is_closed
    assert_maps(back, stream, lambda x: x)
    assert_maps(copy.deepcopy(stream), stream, lambda x: x)


@pytest.mark.parametrize("leaf", [None, 0, "name"])
def test_a_pytree_of_a_stream_may_hold_anything(leaf: object) -> None:
    """torch's checkpoint maps each argument to None (2.9), functorch to dimensions."""
    mapped = pytree.tree_map(lambda _: leaf, stream_of(2, 3, 4))
    assert set(pytree.tree_leaves(mapped)) <= {leaf, None}


# What it refuses -----------------------------------------------------------------------------------------------------

REFUSED = {
    "mean": (lambda x: x.mean(), "mean"),
    "torch.mean": (lambda x: torch.mean(x, 1), "mean"),
    "times": (lambda x: x * 2, r"operator \*"),
    "times-on-the-right": (lambda x: 2 * x, r"operator \*"),
    "tensor-times": (lambda x: torch.ones(4, dtype=torch.float64) * x, r"operator \*"),
    "divided": (lambda x: x / 2, "operator /"),
    "minus": (lambda x: x - torch.ones(2, 3, 4, dtype=torch.float64), "operator -"),
    "tensor-minus": (lambda x: torch.ones(2, 3, 4, dtype=torch.float64) - x, "operator -"),
    "minus-stream": (lambda x: x - x, "operator -"),
    "negative": (lambda x: -x, "operator -"),
    "matmul": (lambda x: x @ torch.ones(4, 4, dtype=torch.float64), "operator @"),
    "tensor-matmul": (lambda x: torch.ones(2, 3, dtype=torch.float64) @ x, "operator @"),
    "power": (lambda x: x**2, r"operator \*\*"),
    "compare": (lambda x: x > 0, "operator >"),
    "linear": (lambda x: F.linear(x, torch.ones(4, 4, dtype=torch.float64)), "linear"),
    "conv": (lambda x: F.conv2d(x, torch.ones(1, 2, 1, 1)), "conv2d"),
    "layer-norm": (lambda x: F.layer_norm(x, (4,)), "layer_norm"),
    "gelu": (lambda x: F.gelu(x), "gelu"),
    "transpose": (lambda x: x.transpose(1, 2), "transpose"),
    "flatten": (lambda x: x.flatten(1), "flatten"),
    "cat-width": (lambda x: torch.cat([x, x], dim=-1), "torch.cat along its width"),
    "cat-width-positive": (lambda x: torch.cat([x, x], dim=2), "torch.cat along its width"),
    "stack": (lambda x: torch.stack([x, x]), "stack"),
    "slice-of-the-width": (lambda x: x[..., :2], "width"),
    "width-reshaped": (lambda x: x.reshape(2, 12), "width"),
    "width-chunked": (lambda x: x.view(2, 3, 2, 2), "width"),
    "in-place-times": (lambda x: operator.imul(x, 2), r"operator \*"),
    "in-place-mul": (lambda x: x.mul_(2), "mul_"),
    "in-place-add-method": (lambda x: x.add_(torch.ones(2, 3, 4)), "add_"),
    "add-a-number": (lambda x: x + 1, "float|int"),
    "add-alpha": (lambda x: torch.add(x, torch.ones(2, 3, 4), alpha=2), "add"),
    "add-a-stream": (lambda x: x + x, "DepthStream"),
    "assign": (lambda x: operator.setitem(x, 0, torch.zeros(3, 4)), r"\[...\] ="),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "detach": (lambda x: x.detach(), "detach"),
    "sum": (lambda x: x.sum(1), "sum"),
    "add-in-place-to-a-tensor": (lambda x: torch.ones(2, 3, 4, dtype=torch.float64).add_(x), "add_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_the_stream_does_not_know_is_an_error(name: str) -> None:
    """Each names the operation and the way out; none falls back to the plain residual sum."""
    apply, named = REFUSED[name]
    with pytest.raises((TypeError, AttributeError), match=named) as error:
        apply(stream_of(2, 3, 4))
    assert "reads the residual stream of an AttnRes model" in str(error.value)
    assert "stream.total()" in str(error.value)
