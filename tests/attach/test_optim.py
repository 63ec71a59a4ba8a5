"""depth_param_groups: the queries' step size and weight decay, with timm's groups and with torch's optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import nn

from attnres_vision import depth_param_groups
from tests.timm.tiny import attached_copy, images, stock_model


@pytest.fixture
def model() -> nn.Module:
    return attached_copy(stock_model("prenorm"), query="token", rank=3)


def by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each trainable parameter the one group that holds it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in found, "a parameter in two groups is stepped twice"
            found[names[id(parameter)]] = group
    assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found


def test_layer_decay_and_query_lr_scale_multiply(model: nn.Module) -> None:
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    plain = by_name(model, groups)
    split = by_name(model, depth_param_groups(model, groups, query_lr_scale=0.1))
    for name, group in split.items():
        assert group["lr_scale"] == pytest.approx(plain[name]["lr_scale"] * (0.1 if ".depth." in name else 1.0))
        assert group["weight_decay"] == (0.0 if ".depth." in name else plain[name]["weight_decay"])
    scale = {name: group["lr_scale"] for name, group in split.items()}
    # a query decays with the norm it is on
    assert scale["blocks.1.norm1.depth.query"] == pytest.approx(0.1 * scale["blocks.1.norm1.weight"])
    assert scale["blocks.2.norm1.depth.query_up"] == pytest.approx(2 * scale["blocks.1.norm1.depth.query_up"])
    assert scale["norm.depth.query"] == pytest.approx(0.1 * scale["norm.weight"])


def test_no_depth_parameter_is_decayed_even_where_the_groups_forget_it(model: nn.Module) -> None:
    """timm decays matrices, such as query_down, unless they are in no_weight_decay."""
    groups = param_groups_weight_decay(model, weight_decay=0.05)
    assert by_name(model, groups)["norm.depth.query_down"]["weight_decay"] == 0.05
    split = by_name(model, depth_param_groups(model, groups))
    assert {group["weight_decay"] for name, group in split.items() if ".depth." in name} == {0.0}
    assert split["blocks.0.attn.qkv.weight"]["weight_decay"] == 0.05


def test_the_model_tells_timm_not_to_decay_depth_parameters(model: nn.Module) -> None:
    groups = param_groups_weight_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    found = by_name(model, groups)
    assert {group["weight_decay"] for name, group in found.items() if ".depth." in name} == {0.0}
    assert found["pos_embed"]["weight_decay"] == 0.0  # timm's own list still holds


def test_default_groups_with_torch_adamw(model: nn.Module) -> None:
    """One Adam step moves every parameter with a gradient by its learning rate."""
    groups = depth_param_groups(model, query_lr_scale=0.1, lr=1e-3)
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-4])
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(images("prenorm")).square().sum().backward()
    optimizer.step()
    for name in ("norm.depth.query", "blocks.2.norm1.depth.query", "blocks.1.mlp.fc1.bias"):
        step = (dict(model.named_parameters())[name] - before[name]).abs().median()
        assert step.item() == pytest.approx(1e-4 if ".depth." in name else 1e-3, rel=1e-2), name


def test_lr_with_layer_decay_for_torch_optimisers(model: nn.Module) -> None:
    """torch's optimisers do not know lr_scale: with `lr` each group has the product as its own learning rate."""
    groups = param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
    found = by_name(model, depth_param_groups(model, groups, query_lr_scale=0.1, lr=2.0))
    assert found["head.weight"]["lr"] == 2.0
    for norm, expected in (("norm", 1.0), ("blocks.3.norm1", 1.0), ("blocks.2.norm2", 0.5)):
        assert found[f"{norm}.weight"]["lr"] == pytest.approx(expected)
        assert found[f"{norm}.depth.query"]["lr"] == pytest.approx(0.1 * expected)


def test_groups_with_learning_rates_of_their_own(model: nn.Module) -> None:
    head = set(model.head.parameters())
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter not in head], "lr": 1e-4},
        {"params": list(head), "lr": 1e-2},
    ]
    found = by_name(model, depth_param_groups(model, groups, query_lr_scale=0.5, lr=1e-3))
    assert found["head.weight"]["lr"] == 1e-2
    assert found["blocks.0.norm1.weight"]["lr"] == 1e-4
    assert found["norm.depth.query"]["lr"] == pytest.approx(5e-5)


def test_timm_scheduler_keeps_the_factors(model: nn.Module) -> None:
    groups = depth_param_groups(
        model,
        param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()),
        query_lr_scale=0.1,
    )
    optimizer = create_optimizer_v2(groups, opt="adamw", lr=1.0)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=0.0)
    for epoch in (1, 5):
        scheduler.step(epoch)
        found = by_name(model, optimizer.param_groups)
        assert found["head.weight"]["lr"] > 0
        for norm in ("norm", "blocks.3.norm1"):
            assert found[f"{norm}.depth.query"]["lr"] == pytest.approx(0.1 * found[f"{norm}.weight"]["lr"])


@pytest.mark.parametrize("groups", ["default", "layer_decay"])
def test_frozen_parameters_stay_out(model: nn.Module, groups: str) -> None:
    """Fine-tuning the queries alone, and freezing them alone (the control of a comparison)."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".depth." in name)
    given = None if groups == "default" else param_groups_layer_decay(model)
    assert all(".depth." in name for name in by_name(model, depth_param_groups(model, given, query_lr_scale=0.1)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".depth." not in name)
    given = None if groups == "default" else param_groups_layer_decay(model)
    assert all(".depth." not in name for name in by_name(model, depth_param_groups(model, given)))


def test_a_stock_models_groups_come_back_as_they_are() -> None:
    stock = stock_model("prenorm")
    groups = param_groups_layer_decay(stock)
    assert depth_param_groups(stock, groups, query_lr_scale=0.1) == groups


def test_the_given_groups_are_not_changed(model: nn.Module) -> None:
    groups = param_groups_layer_decay(model)
    before = [{**group, "params": list(group["params"])} for group in groups]
    depth_param_groups(model, groups, query_lr_scale=0.1, lr=1e-3)
    assert groups == before


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_query_lr_scale_must_be_positive(model: nn.Module, value: float) -> None:
    with pytest.raises(ValueError, match=f"query_lr_scale must be above 0, got {value}"):
        depth_param_groups(model, query_lr_scale=value)


def test_groups_that_forget_depth_parameters(model: nn.Module) -> None:
    """Built before attach, they would leave the queries at zero for the whole training."""
    groups = [{"params": [parameter for name, parameter in model.named_parameters() if "norm2.depth" not in name]}]
    with pytest.raises(ValueError, match=r"every trainable depth parameter, missing: blocks\.0\.norm2\.depth\.query, "):
        depth_param_groups(model, groups)
