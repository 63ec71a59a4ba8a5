"""What torch does with a model: checkpointing, copies, saves, autocast, half precision, functional calls, threads."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_vision
from tests.compat.models import MODELS, attached, converted, images, randomise, stock

CONFIGS: dict[str, dict[str, Any]] = {
    "block-static": {"block_size": 3},
    "full-static": {"mode": "full"},
    "block-token": {"block_size": 3, "query": "token", "rank": 4},
    "block-block": {"block_size": 3, "query": "block"},
    "block-condition": {"block_size": 3, "query": "condition", "heads": 2},
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def gradients(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    sum(losses).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# Gradient checkpointing ----------------------------------------------------------------------------------------------


@configs
@pytest.mark.parametrize("name", ["vit", "eva"])
def test_checkpointing_gives_bit_equal_gradients(name: str, config: dict) -> None:
    """Also with two forwards before one backward, and with drop path: no state is kept outside the stream."""
    model = attached(name, config, drop_path_rate=0.3).train()
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        losses = [model(images(4, seed=seed)).square().sum() for seed in (5, 6)]
        found.append(gradients(model, losses))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_two_forwards_before_one_backward_give_the_sum_of_the_gradients() -> None:
    model = attached("vit").double()
    x, y = images(seed=5).double(), images(seed=6).double()
    model.set_grad_checkpointing()
    both = gradients(model, [model(x).square().sum(), model(y).square().sum()])
    both = {key: value.clone() for key, value in both.items()}
    first = {key: value.clone() for key, value in gradients(model, [model(x).square().sum()]).items()}
    second = gradients(model, [model(y).square().sum()])
    for key, value in both.items():
        torch.testing.assert_close(value, first[key] + second[key], rtol=1e-9, atol=1e-11)


# Copies and saves ----------------------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy of a deepcopy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["vit", "eva", "sam", "cait", "xcit", "qwen3-classifier"])
def test_a_copy_is_independent_of_the_original(name: str, how: str) -> None:
    """The original is changed, then detached; a copy whose hooks pointed at it would change with it."""
    model = attached(name)
    expected = model(images())
    twin = COPIES[how](model)
    assert type(twin).__name__ == type(model).__name__ and twin.training == model.training
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(twin(images()), expected, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="not zero"):
        attnres_vision.detach(model)
    torch.testing.assert_close(twin(images()), expected, rtol=0, atol=0)

    theirs = attnres_vision.readers(twin)
    twin(images()).square().sum().backward()
    assert theirs and all(p.grad is not None for reader in theirs.values() for p in reader.parameters())
    with torch.no_grad():
        for reader in theirs.values():
            for parameter in reader.parameters():
                parameter.zero_()
    assert not torch.allclose(twin(images()), expected)  # the copy's readers are the ones that it uses
    attnres_vision.detach(twin)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_state_dict_round_trip(name: str) -> None:
    config = CONFIGS["block-token"]
    model = attached(name, config)
    fresh = attnres_vision.attach(stock(name), config)
    for parameter in fresh.parameters():
        parameter.zero_()
    assert not torch.allclose(fresh(images()), model(images()))
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(images()), model(images()))


def test_a_saved_state_dict_loads_with_weights_only() -> None:
    buffer = io.BytesIO()
    model = attached("vit")
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


# Precision -----------------------------------------------------------------------------------------------------------


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def bf16_error(model: nn.Module, x: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    return relative_error(mixed, model(x))


@configs
@pytest.mark.parametrize("name", ["vit", "eva"])
@torch.no_grad()
def test_autocast_loses_no_more_than_stock(name: str, config: dict) -> None:
    """The blocks run in bf16, the depth attention in fp32: its error is that of the blocks, as in the stock model."""
    x = images(8)
    plain = stock(name)
    allowed = bf16_error(plain, x)
    assert 1e-4 < allowed < 0.1
    at_zero = attnres_vision.attach(copy.deepcopy(plain), config)
    assert bf16_error(at_zero, x) < 1.5 * allowed
    # Random queries read sharper mixtures than a plain sum; the error stays of the order of bf16's.
    assert bf16_error(randomise(at_zero, 0.3), x) < 4 * allowed


@torch.no_grad()
def test_scores_and_sums_are_fp32_under_autocast() -> None:
    """Without it, keys lose the third digit: the reads would differ from an fp32 read of the same sources by 1e-2."""
    model = attached("vit", std=2.0)
    for reader in attnres_vision.readers(model).values():

        def check(reader: Any, args: tuple, output: Tensor) -> None:
            sources = args[0].sources()
            assert output.dtype == torch.float32
            if reader.query is None:
                return
            values = torch.stack([source.double() for source in sources])
            keys = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            weights = (keys @ reader.query.double()).softmax(0)
            expected = len(sources) * (weights.unsqueeze(-1) * values).sum(0)
            torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)

        reader.register_forward_hook(check)
    with torch.autocast("cpu", torch.bfloat16):
        model(images())
        seen: list[torch.dtype] = []
        model.blocks[1].mlp.register_forward_hook(lambda m, args, output: seen.append(output.dtype))
        model(images())
    assert seen == [torch.bfloat16]  # the block itself did run in bf16


def test_autocast_trains() -> None:
    model = attached("vit", CONFIGS["block-token"]).train()
    plain = gradients(model, [model(images()).square().sum()])
    plain = {key: value.clone() for key, value in plain.items()}
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(images()).square().sum()]
    mixed = gradients(model, losses)
    flat = [torch.cat([grads[key].flatten() for key in plain]) for grads in (mixed, plain)]
    assert relative_error(*flat) < 0.1
    assert all(value.dtype == torch.float32 for value in mixed.values())


@configs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_model(dtype: torch.dtype, config: dict) -> None:
    model = attached("vit", config, std=0.3)
    expected = model(images(8)).detach()
    error = relative_error(stock("vit").to(dtype)(images(8).to(dtype)), stock("vit")(images(8)))
    half = copy.deepcopy(model).to(dtype)
    got = half(images(8).to(dtype))
    assert got.dtype == dtype
    assert relative_error(got, expected) < 4 * error
    got.float().square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in half.parameters())


@torch.no_grad()
def test_attach_takes_the_dtype_of_the_model() -> None:
    model = attnres_vision.attach(stock("vit").to(torch.bfloat16), block_size=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["vit", "sam"])
@torch.no_grad()
def test_channels_last(name: str) -> None:
    model = attached(name)
    expected = model(images())
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images().to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)


# Gradient modes, functional calls, threads ---------------------------------------------------------------------------


@configs
def test_gradient_modes_do_not_change_the_output(config: dict) -> None:
    model = attached("vit", config)
    expected = model(images())
    with torch.no_grad():
        assert torch.equal(model(images()), expected)
    with torch.inference_mode():
        assert torch.equal(model(images()), expected)
    model.requires_grad_(False)
    assert torch.equal(model(images()), expected)


def test_functional_call_uses_the_parameters_that_it_is_given() -> None:
    model, other = attached("vit"), randomise(attached("vit"), 2.0)
    given = dict(other.named_parameters())
    got = torch.func.functional_call(model, given, (images(),))
    assert torch.equal(got, other(images())) and not torch.allclose(got, model(images()))
    got.square().sum().backward()
    assert other.norm.depth.query.grad.any() and model.norm.depth.query.grad is None


def test_input_gradients_equal_stock_at_zero() -> None:
    grads = []
    for model in converted("eva"):
        x = images().requires_grad_()
        model.train()(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_threads_do_not_share_state() -> None:
    model = attached("vit", CONFIGS["block-condition"])
    batches = [images(seed=seed) for seed in range(16)]
    expected = [model(batch) for batch in batches]

    def run(batch: Tensor) -> Tensor:
        with torch.no_grad():
            return model(batch)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(run, batches), expected, strict=True))


@torch.no_grad()
def test_jit_script_says_what_to_use_instead() -> None:
    for model in (attached("vit"), attached("qwen3-classifier"), nn.Sequential(attached("vit"))):
        with pytest.raises(NotImplementedError, match=r"^AttnRes models do not support TorchScript: use torch.compile"):
            torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@torch.no_grad()
def test_jit_trace_records_the_function() -> None:
    model = attached("vit")
    traced = torch.jit.trace(model, images())
    torch.testing.assert_close(traced(images(seed=9)), model(images(seed=9)))


@torch.no_grad()
def test_wrapping_modules_keep_working() -> None:
    """A model inside a user's module: attach finds nothing to do there, readers and saves go through."""
    model = attached("vit")
    wrapped = nn.Sequential(nn.Identity(), model)
    assert next(iter(attnres_vision.readers(wrapped))) == "1.blocks.0.norm1"
    twin = copy.deepcopy(wrapped)
    assert torch.equal(twin(images()), model(images()))
    state = attnres_vision.attnres_state_dict(wrapped)
    assert state and all(key.startswith("1.") for key in state)
