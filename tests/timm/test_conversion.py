"""A converted model computes the original's function while its queries are zero: outputs and gradients, eval and train.

Tolerances: every read of a sum-form reader with zero queries is n * mean, which differs from the stock running sum by
rounding only. In float64 that is far below 1e-12 after these few layers, whatever reads the stream; models with float32
steps of their own get 1e-6. In float32 it is 5e-6 of the logits' standard deviation.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import attnres_vision
from tests.timm.tiny import (
    MODELS,
    attached_copy,
    images,
    randomise_depth,
    regularise,
    stock_model,
)

MODES = {"block": {"block_size": 3}, "full": {"mode": "full"}}


def run(model: nn.Module, x: Tensor | dict, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a model and the gradients of its stock parameters, for one fixed random loss."""
    model.zero_grad()
    torch.manual_seed(seed)  # drop path and dropout draw the same numbers in both models
    out = model(x)
    out = torch.cat(out, 1) if isinstance(out, tuple) else out
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    (out * weights).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if ".depth." not in n and p.grad is not None}


def assert_same(stock: nn.Module, attached: nn.Module, x: Tensor | dict, tolerance: float) -> None:
    """Outputs within `tolerance` of their standard deviation, gradients within `tolerance` of their norm."""
    expected, expected_grads = run(stock, x)
    got, got_grads = run(attached, x)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.std()
    assert got_grads.keys() == expected_grads.keys()
    total = torch.stack([grad.norm() for grad in expected_grads.values()]).norm()
    for name, grad in expected_grads.items():
        # the floor is for gradients that are a small rest of large numbers (biases of keys: exactly zero in theory)
        assert (got_grads[name] - grad).norm() <= tolerance * max(grad.norm(), 0.01 * total), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", MODELS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_converted_model_equals_the_original_in_float64(key: str, mode: str, training: bool) -> None:
    stock = regularise(stock_model(key, torch.float64, drop_path_rate=0.3)).train(training)
    attached = attached_copy(stock, **MODES[mode])
    x = images(key, torch.float64)
    if training:  # dropout really is on
        assert not torch.equal(run(stock, x, seed=0)[0], run(stock, x, seed=1)[0])
    assert_same(stock, attached, x, 1e-6 if MODELS[key].fp32_inside else 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", MODELS)
def test_converted_model_equals_the_original_in_float32(key: str, mode: str) -> None:
    """In float32 the gradient is compared as one vector: single entries have lost digits in the stock model already."""
    stock = stock_model(key).eval()
    attached = attached_copy(stock, **MODES[mode])
    x = images(key)
    (expected, expected_grads), (got, got_grads) = run(stock, x), run(attached, x)
    assert (got - expected).abs().max() <= 5e-6 * expected.std()
    error = torch.cat([(got_grads[name] - grad).flatten() for name, grad in expected_grads.items()]).norm()
    assert error <= 5e-6 * torch.cat([grad.flatten() for grad in expected_grads.values()]).norm()


KINDS = {
    "token": {"query": "token"},
    "token-rank3": {"query": "token", "rank": 3},
    "block-rank3-heads2": {"query": "block", "rank": 3, "heads": 2},
    "condition": {"query": "condition"},
    "condition-rank3-full": {"query": "condition", "rank": 3, "mode": "full"},
    "static-scaled-heads4": {"heads": 4, "scale": 48**-0.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["deit3", "dinov3", "respost"])
def test_every_query_kind_starts_as_the_original(key: str, kind: str) -> None:
    stock = stock_model(key, torch.float64)
    assert_same(stock, attached_copy(stock, **KINDS[kind]), images(key, torch.float64), 1e-12)


@pytest.mark.parametrize("key", ["prenorm", "dinov3", "naflex"])
def test_converted_model_equals_the_original_with_patch_dropout(key: str) -> None:
    stock = stock_model(key, torch.float64, patch_drop_rate=0.5).train()
    assert_same(stock, attached_copy(stock), images(key, torch.float64), 1e-12)


@pytest.mark.parametrize("key", ["naflex", "naflex-eva"])
@pytest.mark.parametrize("mode", MODES)
def test_naflex_with_patches_of_variable_size_and_padding(key: str, mode: str) -> None:
    """NaFlex's own input: patches with coordinates, of which each sample has a different number."""
    stock = stock_model(key, torch.float64).eval()
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 8:] = False
    batch = {
        "patches": torch.randn(2, 12, 8 * 8 * 3, dtype=torch.float64),
        "patch_coord": torch.stack([rows.flatten(), columns.flatten()], -1).expand(2, -1, -1).clone(),
        "patch_valid": valid,
    }
    attached = attached_copy(stock, **MODES[mode])
    assert_same(stock, attached, batch, 1e-12)
    randomise_depth(attached)  # padding must not leak into the valid tokens through depth attention either
    before = attached(batch)
    batch["patches"][1, 8:] = 7.0
    assert torch.allclose(attached(batch), before, rtol=1e-12)


@pytest.mark.parametrize("key", MODELS)
def test_zero_is_the_only_value_at_which_the_models_agree(key: str) -> None:
    """The tests above can fail: with random queries every family computes something else."""
    stock = stock_model(key).eval()
    attached = randomise_depth(attached_copy(stock))
    x = images(key)
    expected, got = stock(x), attached(x)
    assert (got - expected).std() > 1e-2 * expected.std()
    assert got.isfinite().all()


@pytest.mark.parametrize("key", MODELS)
def test_every_depth_parameter_receives_a_gradient(key: str) -> None:
    """DDP needs them all in every step; and a zero gradient would be a query that nothing depends on."""
    attached = randomise_depth(attached_copy(stock_model(key), query="token", rank=3))
    run(attached, images(key))
    named = {name: parameter for name, parameter in attached.named_parameters() if ".depth." in name}
    assert len(named) >= 3 * 4
    assert [name for name, parameter in named.items() if parameter.grad is None] == []
    unused = {name for name, parameter in named.items() if not parameter.grad.any()}
    # CaiT's class token, all that its head reads, joins behind the blocks: it has a single source other than zero
    assert unused == ({"norm.depth.query_down", "norm.depth.query_up"} if key == "cait" else set())


# The mean form -------------------------------------------------------------------------------------------------------


def test_the_mean_form_is_the_original_only_up_to_the_norms_epsilon() -> None:
    """The paper's formula divides the stream by n: pre-norm readers undo that, except for their epsilon."""
    stock = stock_model("prenorm", torch.float64).eval()
    x = images("prenorm", torch.float64)
    expected = stock(x)
    difference = (attached_copy(stock, mode="full", form="mean")(x) - expected).abs().max() / expected.std()
    assert 1e-9 < difference < 1e-3


# Back to the stock model ---------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("key", MODELS)
def test_detach_gives_exactly_the_stock_model_back(key: str) -> None:
    stock = stock_model(key).eval()
    model = copy.deepcopy(stock)
    assert attnres_vision.attach(model, num_blocks=3) is model
    assert hooks(model) > hooks(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to warn of at zero queries
        assert attnres_vision.detach(model) is model
    assert type(model) is type(stock)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    assert hooks(model) == hooks(stock)
    assert not hasattr(model, "attnres_config")
    x = images(key)
    torch.testing.assert_close(model(x), stock(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "config", [{"query": "static"}, {"query": "token"}, {"query": "block", "rank": 3}], ids=["static", "token", "block"]
)
def test_detach_warns_when_the_function_changes(config: dict) -> None:
    model = randomise_depth(attached_copy(stock_model("prenorm"), **config))
    with pytest.warns(UserWarning, match="queries are not zero"):
        attnres_vision.detach(model)


def test_detach_warns_of_the_mean_form_at_zero_queries() -> None:
    with pytest.warns(UserWarning, match="form is 'mean'"):
        attnres_vision.detach(attached_copy(stock_model("prenorm"), form="mean"))


def test_attach_after_detach_with_another_config() -> None:
    stock = stock_model("prenorm", torch.float64)
    model = attnres_vision.detach(attached_copy(stock, mode="full"))
    attnres_vision.attach(model, num_blocks=2, query="token")
    assert_same(stock, model, images("prenorm", torch.float64), 1e-12)
