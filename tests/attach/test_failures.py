"""Loud failure: each error names the argument, module or operation, its value and the way out, and leaves no trace.

"No trace" is tested: after a failed `attach` the model has the class, the keys, the hooks and the outputs of before.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attnres_vision
from attnres_vision.attach import families
from tests.timm.tiny import attached_copy, images, randomise_depth, stock_model


def fingerprint(model: nn.Module) -> tuple:
    """Everything that attach changes."""
    modules = {
        name: (type(module), len(module._forward_pre_hooks), len(module._forward_hooks), set(vars(module)))
        for name, module in model.named_modules()
    }
    return modules, list(model.state_dict())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    before = copy.deepcopy(fingerprint(model))
    yield
    assert fingerprint(model) == before


# Configs that do not fit the model -----------------------------------------------------------------------------------

UNFITTING: dict[str, tuple[str, dict[str, Any], str]] = {
    "num_blocks": (
        "prenorm",
        {"num_blocks": 9},
        "num_blocks must be between 1 and 8 for this model (8 sublayers), got 9",
    ),
    "block_size": (
        "prenorm",
        {"block_size": 9},
        "block_size must be between 1 and 8 for this model (8 sublayers), got 9",
    ),
    "num_blocks-parallel": ("parallel-scaling", {"num_blocks": 5}, "num_blocks must be between 1 and 4"),
    "heads": ("prenorm", {"heads": 5}, "heads must divide the width 48 of this model, got 5"),
    "rank": (
        "prenorm",
        {"query": "token", "rank": 49},
        "rank must be between 1 and the width 48 of this model, got 49",
    ),
    "condition": (
        "naflex",
        {"query": "condition"},
        "query must be 'static', 'token' or 'block' for NaFlexVit, got 'condition': the model has no condition",
    ),
    "invalid": ("prenorm", {"heads": 0}, "heads must be an integer of at least 1, got 0"),
    "unknown": ("prenorm", {"blocks": 4}, "unknown AttnResConfig field 'blocks'; did you mean 'num_blocks'?"),
    "both": ("prenorm", {"num_blocks": 4, "block_size": 2}, "num_blocks must be None when block_size is given, got 4"),
}


@pytest.mark.parametrize("case", UNFITTING)
def test_a_config_that_does_not_fit_the_model(case: str) -> None:
    key, fields, message = UNFITTING[case]
    model = stock_model(key)
    with untouched(model), pytest.raises(ValueError, match="^" + re.escape(message)):
        attnres_vision.attach(model, **fields)


def test_a_config_of_the_wrong_type() -> None:
    model = stock_model("prenorm")
    with untouched(model), pytest.raises(ValueError, match="must be a mapping of names to values, got 'full'"):
        attnres_vision.attach(model, "full")  # type: ignore[arg-type]


def test_config_and_fields_together() -> None:
    model = stock_model("prenorm")
    with untouched(model), pytest.raises(ValueError, match=r"give either config or fields, got .* and \['heads'\]"):
        attnres_vision.attach(model, attnres_vision.AttnResConfig(), heads=2)


# Models and blocks without a reader table ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_a_model_class_without_a_reader_table(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with untouched(model), pytest.raises(ValueError) as error:
        attnres_vision.attach(model)
    message = str(error.value)
    assert f"no reader table for models of class {type(model).__module__}.{type(model).__name__}" in message
    assert "VisionTransformer" in message  # the known classes
    assert "attnres_vision.families.MODELS[" in message  # the way out


class SandwichBlock(nn.Module):
    """A user's block: a norm before and after each sublayer."""

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__()
        self.pre, self.layer, self.post = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post(self.layer(self.pre(x)))


def test_a_block_class_without_a_reader_table() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=3, block_fn=SandwichBlock)
    with untouched(model), pytest.raises(ValueError) as error:
        attnres_vision.attach(model)
    message = str(error.value)
    assert "no reader table for block 'blocks.0' of class tests.attach.test_failures.SandwichBlock" in message
    assert "attnres_vision.families.BLOCKS['tests.attach.test_failures.SandwichBlock'] = (" in message


def test_the_way_out_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in the table carries a user's own block."""
    monkeypatch.setitem(families.BLOCKS, "tests.attach.test_failures.SandwichBlock", ("pre",))
    kwargs = dict(img_size=32, embed_dim=48, depth=3, block_fn=SandwichBlock)
    stock = timm.create_model("vit_tiny_patch16_224", **kwargs).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.allclose(attached_copy(stock)(x), stock(x), rtol=1e-12)
    assert list(attnres_vision.readers(attached_copy(stock))) == [
        "blocks.0.pre",
        "blocks.1.pre",
        "blocks.2.pre",
        "norm",
    ]


def test_a_table_line_that_names_a_module_the_block_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.BLOCKS, "tests.attach.test_failures.SandwichBlock", ("pre", "norm2"))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=3, block_fn=SandwichBlock)
    with untouched(model), pytest.raises(ValueError, match=r"block 'blocks\.0' .*SandwichBlock has no module 'norm2'"):
        attnres_vision.attach(model, num_blocks=2)


def test_a_table_line_that_names_a_sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader would be run as one more layer of it."""
    monkeypatch.setitem(families.BLOCKS, "timm.models.vision_transformer.ParallelThingsBlock", ("attns.*", "ffns.*"))
    model = stock_model("parallel-things")
    with untouched(model), pytest.raises(ValueError, match=r"'blocks\.0\.attns\.0' is an nn\.Sequential"):
        attnres_vision.attach(model)


def test_a_module_that_already_has_a_depth() -> None:
    model = stock_model("prenorm")
    model.blocks[2].norm1.depth = 3
    with (
        untouched(model),
        pytest.raises(ValueError, match=r"module 'blocks\.2\.norm1' has an attribute 'depth' already"),
    ):
        attnres_vision.attach(model)


# A block that does something else with the stream --------------------------------------------------------------------


class OddBlock(nn.Module):
    """A block that does one unusual thing to its residual stream. `odd` is set by each test."""

    odd = staticmethod(lambda x: x)

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return type(self).odd(x) + self.layer(self.norm(x))


ODD = {
    "scaled": (lambda x: x * 0.5, r"operator \*"),
    "gated": (lambda x: torch.sigmoid(x), "sigmoid"),
    "pooled": (lambda x: x + x.mean(1, keepdim=True), r"\.mean"),
    "difference": (lambda x: x - torch.ones(48), "operator -"),
    "convolved": (lambda x: nn.functional.conv1d(x, torch.ones(5, 5, 1)), "conv1d"),
    "normalised": (lambda x: nn.functional.layer_norm(x, (48,)), "layer_norm"),
    "in-place": (lambda x: x.mul_(2), r"\.mul_"),
    "widened": (lambda x: torch.cat([x, x], -1), "torch.cat along its width"),
    "detached": (lambda x: x.detach(), r"\.detach"),
    "unknown-module": (nn.Linear(48, 48), "linear"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_block_with_an_operation_that_the_stream_does_not_know(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, named = ODD[case]
    monkeypatch.setitem(families.BLOCKS, "tests.attach.test_failures.OddBlock", ("norm",))
    monkeypatch.setattr(OddBlock, "odd", staticmethod(odd))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=3, block_fn=OddBlock)
    attnres_vision.attach(model, num_blocks=2)
    with pytest.raises((TypeError, AttributeError), match=named) as error:
        model(torch.randn(1, 3, 32, 32))
    assert "reads the residual stream of an AttnRes model" in str(error.value)
    assert "attnres_vision.families" in str(error.value)


@pytest.mark.parametrize("index", [1, 3])
def test_a_tensor_given_to_a_middle_block(index: int) -> None:
    """A loop over some of the blocks, or a framework that replaces the stream by a tensor, has lost the sources."""
    model = attached_copy(stock_model("prenorm"))
    with pytest.raises(
        TypeError, match=rf"'blocks\.{index}\.norm1' .* must be given a DepthStream, got Tensor"
    ) as error:
        model.blocks[index](torch.randn(1, 5, 48))
    assert "attnres_vision.detach" in str(error.value)


def test_a_first_block_that_is_skipped() -> None:
    model = attached_copy(stock_model("prenorm"))
    model.blocks = model.blocks[1:]
    with pytest.raises(TypeError, match=r"'blocks\.1\.norm1' .* must be given a DepthStream"):
        model(images("prenorm"))


# Attach and detach in the wrong order --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["attach", "create_model"])
def test_attaching_twice(make: str) -> None:
    if make == "attach":
        model = randomise_depth(attached_copy(stock_model("prenorm")))
    else:
        model = timm.create_model("attnres_vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=4)
    with untouched(model), pytest.raises(ValueError, match="has Attention Residuals already: detach it first"):
        attnres_vision.attach(model)


def test_attaching_a_model_that_contains_an_attached_one() -> None:
    wrapper = nn.Sequential(attached_copy(stock_model("prenorm")))
    with pytest.raises(ValueError, match="Attention Residuals already"):
        attnres_vision.attach(wrapper)


@pytest.mark.parametrize(
    "call",
    [attnres_vision.detach, lambda model: attnres_vision.record_depth_weights(model).__enter__()],
    ids=["detach", "record"],
)
def test_a_stock_model_where_an_attached_one_is_needed(call: Any) -> None:
    model = stock_model("prenorm")
    with (
        untouched(model),
        pytest.raises(ValueError, match=r"must be attached \(attnres_vision.attach\), got a plain Vis"),
    ):
        call(model)


def test_a_stock_model_has_no_readers_and_no_depth_parameters() -> None:
    assert attnres_vision.readers(stock_model("prenorm")) == {}
    assert attnres_vision.attnres_state_dict(stock_model("prenorm")) == {}


def test_a_model_without_blocks_says_so() -> None:
    with pytest.raises(ValueError, match="model must have at least one block, got a VisionTransformer with none"):
        attnres_vision.attach(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=0))


# Through timm --------------------------------------------------------------------------------------------------------


def test_create_model_with_a_config_object() -> None:
    """timm writes arguments to config.json, so only a mapping can be saved."""
    with pytest.raises(ValueError, match=r"attnres must be a mapping of AttnResConfig fields \(config.to_dict\(\)\)"):
        timm.create_model("attnres_vit_tiny_patch16_224", attnres=attnres_vision.AttnResConfig())


@pytest.mark.parametrize(
    ("attnres", "message"),
    [({"mod": "full"}, "did you mean 'mode'"), ({"num_blocks": 25}, "num_blocks must be between 1 and 24")],
    ids=["unknown", "too-many"],
)
def test_create_model_with_an_invalid_config(attnres: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timm.create_model("attnres_vit_tiny_patch16_224", attnres=attnres)


def test_torchscript_says_so_in_one_sentence() -> None:
    sentence = "AttnRes models do not support TorchScript: use torch.compile or torch.export"
    with pytest.raises(NotImplementedError, match="^" + re.escape(sentence) + "$"):
        torch.jit.script(attached_copy(stock_model("prenorm")))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["data-parallel", "compiled"])
def test_a_wrapped_model_says_to_attach_first(wrap):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=4, num_heads=2)
    with pytest.raises(ValueError, match=r"model must be the model itself, got a .*attach before you wrap"):
        attnres_vision.attach(wrap(model))


def test_a_line_that_names_no_module_for_the_condition_leaves_the_model_untouched(monkeypatch) -> None:
    stock = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=12, num_heads=2)
    family = dataclasses.replace(families.family_of(stock), condition={"timestep": families.ConditionSource("typo")})
    monkeypatch.setitem(families.MODELS, "timm.models.vision_transformer.VisionTransformer", family)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in stock.modules()]
    with pytest.raises(ValueError, match=r"condition 'timestep' of VisionTransformer .* module 'typo'"):
        attnres_vision.attach(stock, query="condition")
    assert hooks == [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in stock.modules()]
    assert not any("depth" in name for module in stock.modules() for name in vars(module))
