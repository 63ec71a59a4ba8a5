"""Host code that changes tensors in place: right, or an error that says what to do; in every gradient mode."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres_vision.ops import backend
from attnres_vision.stream import DepthStream
from tests.compat.models import attached, images

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
modes = pytest.mark.parametrize("mode", MODES)


def patched(forward: Callable[[Any, Any], Any], config: dict | None = None) -> nn.Module:
    """A ViT whose second block runs `forward(block, x)`."""
    model = attached("vit", config)
    block = model.blocks[1]
    block.forward = lambda x, **kwargs: forward(block, x)
    return model


def attention(block: Any, x: Any) -> Tensor:
    return block.ls1(block.attn(block.norm1(x)))


def mlp(block: Any, x: Any) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))


def plain(block: Any, x: Any) -> Any:
    x = x + attention(block, x)
    return x + mlp(block, x)


def augmented(block: Any, x: Any) -> Any:
    x += attention(block, x)
    x += mlp(block, x)
    return x


def changed_before_it_is_added(block: Any, x: Any) -> Any:
    out = attention(block, x)
    out.mul_(0.5).mul_(2)
    x = x + out
    return x + mlp(block, x).relu_().neg_().neg_()


@modes
@pytest.mark.parametrize("checkpointing", [False, True])
def test_augmented_addition_is_an_addition(mode: str, checkpointing: bool) -> None:
    model, expected = patched(augmented), attached("vit")
    for each in (model, expected):
        each.train().set_grad_checkpointing(checkpointing)
    with MODES[mode]():
        results = [each(images()) for each in (model, expected)]
    assert torch.equal(*results)
    if mode == "grad":
        for result in results:
            result.square().sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@modes
def test_the_other_names_of_an_augmented_stream_are_not_used_on_the_quiet(mode: str) -> None:
    """With a tensor `shortcut` would have the attention's output too; a stream that lacks it would be wrong."""

    def forward(block: Any, x: Any) -> Any:
        shortcut = x
        x += attention(block, x)
        return shortcut + mlp(block, x)

    with MODES[mode](), pytest.raises(RuntimeError, match=r"stream \+= .* had made a new one"):
        patched(forward)(images())


def later(change: Callable[[Tensor], Any]) -> Callable[[Any, Any], Any]:
    def forward(block: Any, x: Any) -> Any:
        out = attention(block, x)
        x = x + out
        change(out)
        return x + mlp(block, x)

    return forward


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda out: out.detach().mul_(2),
    "index": lambda out: out.detach()[:, 0].zero_(),
    "relu": lambda out: nn.ReLU(inplace=True)(out.detach()),
    "dropout": lambda out: nn.Dropout(0.5, inplace=True)(out.detach()),
    "out=": lambda out: torch.add(out.detach(), 1, out=out.detach()),
}


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("config", [{"mode": "full"}, {"block_size": 2}], ids=["full", "block"])
def test_an_output_that_is_changed_after_it_was_added_is_an_error(change: str, config: dict, mode: str) -> None:
    """Also where autograd says nothing: its check comes too late for a change in front of the first read."""
    with MODES[mode](), pytest.raises(RuntimeError, match=r"source \d of the residual stream .* in-place .*clone\(\)"):
        patched(later(CHANGES[change]), config)(images())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("config", [{"mode": "full"}, {"block_size": 3}], ids=["full", "block"])
@torch.inference_mode()
def test_in_inference_mode_the_stream_holds_copies(change: str, config: dict) -> None:
    """PyTorch counts no changes there."""
    model, expected = (patched(f, config) for f in (later(CHANGES[change]), plain))
    assert torch.equal(model(images()), expected(images()))


@pytest.mark.parametrize("changed", [0, 1], ids=["sum", "newest"])
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_a_sum_that_waits_for_the_kernel_is_watched_too(mode: str, changed: int, triton_device: str) -> None:
    with MODES[mode](), backend("triton"):
        first, delta = (torch.randn(1, 2, 16, device=triton_device) for _ in range(2))
        stream = DepthStream((torch.zeros_like(first),)) + first + delta
        expected = first + delta
        assert (stream.open_block.pending is None) == (mode == "inference")
        (first, delta)[changed].mul_(2)
        if mode == "inference":
            assert torch.equal(stream.sources()[-1], expected)
            return
        with pytest.raises(RuntimeError, match=r"source 1 of the residual stream"):
            stream.sources()


def test_a_compiled_block_does_not_see_a_later_change() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        model, expected = patched(later(CHANGES["mul_"]), {"mode": "full"}), attached("vit", {"mode": "full"})
        got = torch.compile(model, backend="aot_eager")(images())
        torch.testing.assert_close(got, expected(images()), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@modes
def test_the_embedding_may_not_change_once_the_stream_has_begun(mode: str) -> None:
    model = attached("vit")
    with MODES[mode]():
        x = model._pos_embed(model.patch_embed(images()))
        expected = model.norm(model.blocks(x.clone()))
        stream = model.blocks[0](x)
        x.detach().mul_(2)
        if mode == "inference":
            assert torch.equal(model.norm(model.blocks[1:](stream)), expected)
            return
        with pytest.raises(RuntimeError, match=r"source 0 of the residual stream"):
            model.blocks[1:](stream)


@modes
def test_a_change_before_the_addition_is_nobodys_business(mode: str) -> None:
    def same(block: Any, x: Any) -> Any:
        x = x + attention(block, x)
        return x + mlp(block, x).relu()

    with MODES[mode]():
        got, expected = (patched(f)(images()) for f in (changed_before_it_is_added, same))
    torch.testing.assert_close(got, expected)


def test_an_input_buffer_can_be_used_again() -> None:
    """Changing what an earlier forward pass began with is no error, as with a CUDA graph's inputs."""
    model = attached("vit")
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images()))
        first = model.norm(model.blocks(x))
        second = model._pos_embed(model.patch_embed(images(seed=5)))
        x.copy_(second)
        assert torch.equal(model.norm(model.blocks(x)), model.norm(model.blocks(second)))
        assert not torch.equal(model.norm(model.blocks(x)), first)


def test_a_change_between_forward_and_recomputation_is_an_error() -> None:
    """A stream goes into a checkpoint past autograd's own check of what was saved."""
    model = attached("vit").train()
    x = model._pos_embed(model.patch_embed(images()))
    kept = x.detach()
    stream = model.blocks[0](x)
    loss = model.norm(checkpoint(model.blocks[1:], stream, use_reentrant=False)).square().sum()
    kept.mul_(2)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle"])
@pytest.mark.parametrize("grad", [False, True])
def test_copies_of_a_stream_in_the_middle_of_a_forward_pass(how: str, grad: bool) -> None:
    """Two-phase, and with changed tensors behind it: versions and what was read ahead belong to the original."""
    model = attached("vit", {"block_size": 3, "two_phase": True})
    copies = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
    with torch.set_grad_enabled(grad):
        x = model._pos_embed(model.patch_embed(images()))
        stream = model.blocks[:2](x.add_(0.0).add_(0.0))
        expected = model.norm(model.blocks[2:](stream))
        if grad and how == "deepcopy":
            with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):  # torch's own
                copy.deepcopy(stream)
            return
        twin = copies[how](stream)
        assert isinstance(twin, DepthStream) and twin.ahead is None
        got = model.norm(model.blocks[2:](twin))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if grad and how == "pickle":  # what is loaded are leaves, which collect nothing: their gradients arrive
        loaded = twin.sources()
        exact = [source.detach().requires_grad_() for source in loaded]
        found, wanted = (
            torch.autograd.grad(model.norm.depth(DepthStream(tuple(values))).square().sum(), list(values))
            for values in (loaded, exact)
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
