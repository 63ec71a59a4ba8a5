"""What diffusers' blocks do to a residual stream: slice and join it, cast it, clip it."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres_vision import AttnResConfig, DepthAttention, DepthStream
from attnres_vision.stream.open_block import OpenBlock

B, T, D = 2, 6, 4


def stream_of(sources: int = 3, dtype: torch.dtype = torch.float64, tokens: int = T, seed: int = 0) -> DepthStream:
    generator = torch.Generator().manual_seed(seed)
    blocks = tuple(torch.randn(B, tokens, D, dtype=torch.float64, generator=generator) for _ in range(sources))
    return DepthStream(tuple(block.to(dtype) for block in blocks[:-1]), OpenBlock(blocks[-1].to(dtype)))


def delta(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 9) -> Tensor:
    return torch.randn(B, tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Slices --------------------------------------------------------------------------------------------------------------

CUTS: dict[str, Callable] = {
    "flux": lambda x: [x[:, :2], x[:, 2:]],
    "hunyuan-video": lambda x: [x[:, :-2, :], x[:, -2:, :]],
    "ellipsis": lambda x: [x[:, :2, ...], x[:, 2:, ...]],
    "chunk": lambda x: x.chunk(4, dim=1),
    "split": lambda x: torch.split(x, 4, dim=1),
    "split-sizes": lambda x: x.split([1, 3, 2], dim=-2),
    "three": lambda x: [x[:, :1], x[:, 1:4], x[:, 4:]],
}


@pytest.mark.parametrize("cut", CUTS)
def test_joining_all_slices_gives_the_stream_itself(cut: str) -> None:
    stream = stream_of()
    for piece, expected in zip(CUTS[cut](stream), CUTS[cut](stream.sources()[1]), strict=True):
        assert torch.equal(piece.sources()[1], expected)
    assert torch.cat(CUTS[cut](stream), dim=1) is stream


def test_a_slice_of_a_slice_joins_twice() -> None:
    stream = stream_of()
    left, right = stream[:, :4], stream[:, 4:]
    assert torch.cat([torch.cat([left[:, :1], left[:, 1:]], 1), right], 1) is stream


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("written", ["both", "one", "twice"])
def test_writes_to_slices_become_one_write_to_the_stream(written: str, closed: bool) -> None:
    """HunyuanVideo's token replacement writes to both halves, a ControlNet to the image tokens only."""
    stream = stream_of()
    if closed:
        stream.close_block()
    left, right = stream[:, :2], stream[:, 2:]
    a, b = delta(2), delta(4)
    whole = torch.cat([a if written != "one" else torch.zeros_like(a), b], 1)
    left, right = left if written == "one" else left + a, right + b
    if written == "twice":
        left, whole = left + a, torch.cat([2 * a, b], 1)
    joined, expected = torch.cat([left, right], 1), stream + whole
    assert len(joined.sources()) == len(expected.sources())
    for got, wanted in zip(joined.sources(), expected.sources(), strict=True):
        assert torch.equal(got, wanted)
    for kept, source in zip(joined.blocks, stream.sources() if closed else stream.blocks, strict=True):
        assert kept is source  # no copies


def test_slices_that_do_not_make_up_the_stream_are_joined_source_by_source() -> None:
    stream = stream_of()
    for parts in (
        [stream[:, 2:], stream[:, :2]],  # another order
        [stream[:, :2], stream[:, 3:]],  # a token is missing
        [stream[:, :2], stream_of(seed=1)[:, 2:]],  # another stream's
        [stream[:, :3], stream[:, 2:]],  # a token twice
    ):
        joined = torch.cat(parts, dim=1)
        for got, *rows in zip(joined.sources(), *(part.sources() for part in parts), strict=True):
            assert torch.equal(got, torch.cat(rows, 1))


def test_a_slice_that_was_read_into_a_new_block_keeps_its_boundary() -> None:
    """A reader closes the block of one slice; its write then starts a block that the whole stream does not have."""
    stream = stream_of()
    left, right = stream[:, :2], stream[:, 2:]
    left.close_block()
    right.close_block()
    joined = torch.cat([left + delta(2), right + delta(4)], dim=1)
    assert len(joined.sources()) == len(stream.sources()) + 1
    assert torch.equal(joined.open_block.total, torch.cat([delta(2), delta(4)], 1))


def test_assigning_what_was_added_to_a_slice_writes_to_the_stream() -> None:
    """Chroma adds ControlNet residuals this way."""
    stream = stream_of()
    expected = stream.write(torch.cat([torch.zeros(B, 2, D, dtype=torch.float64), delta(4)], 1))
    stream[:, 2:, ...] = stream[:, 2:, ...] + delta(4)
    assert all(map(torch.equal, stream.sources(), expected.sources()))
    with pytest.raises(TypeError, match=r"\[...\] ="):
        stream[:, 2:] = delta(4)
    with pytest.raises(TypeError, match=r"\[...\] ="):
        stream[:, 1:5] = stream[:, 2:] + delta(4)


def test_slices_survive_pytrees_and_pickle() -> None:
    """FSDP and checkpoints rebuild the tensors of what a block returns."""
    stream = stream_of()
    parts = (stream[:, :2] + delta(2), stream[:, 2:])
    for left, right in (
        pytree.tree_map(lambda leaf: leaf if leaf is None else leaf.clone(), parts),
        pickle.loads(pickle.dumps(parts)),
    ):
        joined = torch.cat([left, right], dim=1)
        padded = torch.cat([delta(2), torch.zeros(B, 4, D, dtype=torch.float64)], 1)
        assert all(map(torch.equal, joined.sources(), (stream + padded).sources()))


# Casts ---------------------------------------------------------------------------------------------------------------


def reader() -> DepthAttention:
    made = DepthAttention(D, AttnResConfig(), opens_block=True)
    torch.nn.init.normal_(made.query)
    return made


def test_a_cast_keeps_the_finished_sources() -> None:
    """Wan casts its stream to fp32 and back at every read; copies of all sources would cost more than the reads."""
    stream = stream_of(dtype=torch.bfloat16)
    raised = stream.float()
    assert raised.dtype == torch.float32 and raised.sources()[0] is stream.sources()[0]
    assert reader()(raised).dtype == torch.float32
    written = raised + delta(T, torch.float32)
    assert torch.equal(written.open_block.total, stream.open_block.total.float() + delta(T, torch.float32))
    lowered = written.type_as(stream)
    assert lowered.dtype == torch.bfloat16 == lowered.open_block.total.dtype and lowered.blocks[0] is stream.blocks[0]
    assert raised.total().dtype == torch.float32


def test_a_reader_that_ends_the_block_of_a_cast_ends_that_of_the_stream() -> None:
    """Wan: `norm(x.float())` reads a cast, and `x = (x.float() + v).type_as(x)` writes to another one."""
    plain = stream_of(dtype=torch.bfloat16)
    for stream in (plain, stream_of(dtype=torch.bfloat16).float().type_as(plain)):
        stream.float().close_block()
        written = (stream.float() + delta(T, torch.float32)).type_as(stream)
        assert len(written.sources()) == len((stream + delta(T, torch.bfloat16)).sources()) == 4
        assert written.open_block is not stream.open_block  # which a later write to the stream itself finds as it was


def test_a_tensor_takes_the_dtype_of_a_stream() -> None:
    stream = stream_of(dtype=torch.bfloat16)
    assert delta(T).type_as(stream).dtype == torch.bfloat16
    assert delta(T).type_as(stream.float()).dtype == torch.float32
    assert stream.to(delta(T)).dtype == torch.float64
    assert stream.float().to(torch.bfloat16).dtype == torch.bfloat16 and stream.to(torch.bfloat16) is stream
    assert stream.to("cpu") is stream and stream.to(stream.device, torch.bfloat16) is stream
    assert stream.type_as(stream_of(dtype=torch.bfloat16, seed=1)) is stream


def test_moving_to_a_device_moves_the_conditions() -> None:
    stream = DepthStream((torch.zeros(B, T, D),), condition=torch.zeros(B, 3), other=torch.zeros(B, 2))
    moved = stream.to("meta", non_blocking=True)
    assert moved.device.type == moved.condition.device.type == moved.other.device.type == "meta"


# Clips ---------------------------------------------------------------------------------------------------------------


def test_reads_of_a_clipped_stream_are_finite_in_fp16() -> None:
    """Hosts clip an fp16 stream. The sum of finite sources can overflow, so the reads are clipped too."""
    large = torch.full((B, T, D), 60000.0).half()
    stream = DepthStream((large, large), OpenBlock(torch.full((B, T, D), float("inf")).half()))
    clipped = stream.clip(-65504, 65504)
    assert clipped.open_block.total.max() == 65504
    assert torch.isfinite(reader()(clipped)).all() and reader()(clipped).max() == 65504
    assert torch.isfinite(clipped.total()).all()
    assert not torch.isfinite(stream.total()).all()


def test_clipping_within_the_bounds_changes_nothing() -> None:
    stream = stream_of(dtype=torch.float16)
    depth = reader()
    clipped = stream.clip(-65504, 65504)
    assert torch.equal(depth(clipped), depth(stream)) and torch.equal(clipped.total(), stream.total())
    assert (clipped + delta(T, torch.float16)).host_view.bounds == (-65504, 65504)


def test_clips_of_a_clipped_stream_keep_the_tighter_bound() -> None:
    stream = stream_of(dtype=torch.float16).clip(-1, 1).clip(-5, 0.5)
    assert stream.host_view.bounds == (-1, 0.5)


@pytest.mark.parametrize("change", ["reshape", "cast"])
def test_a_reader_of_a_reshaped_or_cast_stream_ends_the_block_of_the_stream(change: str) -> None:
    """`x + f(norm(x.reshape(...)))`: the host goes on with the stream, and only its derivative was read."""
    stream = stream_of(dtype=torch.bfloat16)
    if change == "cast":  # the sum is fp32, and the stream is cast back to the dtype of its sources
        stream = stream.float() + delta(T, torch.float32)
        stream.to(torch.bfloat16).close_block()
    else:
        stream.reshape(B, T // 2, 2, D).close_block()
    assert stream.is_closed
    assert len((stream + delta(T)).sources()) == len(stream.sources()) + 1


def test_a_stream_whose_tensors_are_replaced_field_by_field() -> None:
    """FSDP2's mixed precision casts inputs by rebuilding every dataclass from its fields."""
    from torch.distributed.utils import _apply_to_tensors

    embedding = torch.randn(B, T, D)
    embedding.add_(1)  # changed before the stream began
    stream = DepthStream((embedding,)) + delta(T, torch.float32)
    stream.close_block()
    stream = stream + delta(T, torch.float32)
    cast = _apply_to_tensors(lambda tensor: tensor.to(torch.bfloat16), stream)
    assert [source.dtype for source in cast.sources()] == [torch.bfloat16] * 3
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(cast.sources(), stream.sources(), strict=True))
