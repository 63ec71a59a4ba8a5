"""LoRA with peft, over every class: adding, loading, saving, fusing, swapping and deleting leave depth alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnres_vision
from tests.dit.suite.hosts import NAMES, assert_depth_is, default_model, depth_values, every_class_exhaustively, output
from tests.dit.tiny import inputs_for, relative_error

pytest.importorskip("peft")
# diffusers gives EasyAnimate's class no adapters
with_adapters = pytest.mark.parametrize("name", [name for name in NAMES if name != "easyanimate"])


def lora_config(rank: int = 2, target: Any = "all-linear", **options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=target, **options)


def randomise(model: Any, seed: int, adapter: str = "default") -> None:
    """Adapters start at zero: give one numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and f".{adapter}." in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def lora_values(model: Any) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if "lora_" in key}


def test_a_class_without_adapters_has_none_here_either() -> None:
    model = default_model("easyanimate")
    assert not hasattr(model, "add_adapter") and not hasattr(type(model).__mro__[2], "add_adapter")


@with_adapters
def test_adapters_from_adding_to_deleting(name: str, tmp_path: Path) -> None:
    """One pass through everything: each step's output is that of the step it must equal."""
    model = default_model(name)
    depth, keys = depth_values(model), set(model.state_dict())
    plain = output(model, name)

    model.add_adapter(lora_config())
    adapted = [key for key, _ in model.named_parameters() if "lora_" in key]
    assert adapted and not any("depth" in key for key in adapted)
    assert_depth_is(model, depth)
    assert torch.equal(output(model, name), plain)
    randomise(model, 3)
    first = output(model, name)
    assert relative_error(first, plain) > 1e-3, "the adapter does nothing"

    model.save_lora_adapter(tmp_path)
    from safetensors.torch import load_file

    assert not any("depth" in key for key in load_file(tmp_path / "pytorch_lora_weights.safetensors"))
    model.disable_adapters()
    assert torch.equal(output(model, name), plain)
    model.enable_adapters()
    assert torch.equal(output(model, name), first)

    model.add_adapter(lora_config(rank=3), "second")
    randomise(model, 4, "second")
    model.set_adapter("second")
    second = output(model, name)
    assert relative_error(second, first) > 1e-3
    model.set_adapters(["default", "second"], [1.0, 0.0])
    assert relative_error(output(model, name), first) < 1e-5
    model.set_adapters(["default", "second"], [0.5, 0.5])
    assert relative_error(output(model, name), first) > 1e-4
    model.delete_adapters("second")
    model.set_adapters("default")
    assert relative_error(output(model, name), first) < 1e-5

    model.fuse_lora()
    assert_depth_is(model, depth)
    assert relative_error(output(model, name), first) < 1e-3  # the sum of weights is rounded
    model.unfuse_lora()
    assert relative_error(output(model, name), first) < 1e-3
    model.delete_adapters("default")
    assert relative_error(output(model, name), plain) < 1e-3
    model.unload_lora()
    assert set(model.state_dict()) == keys
    assert_depth_is(model, depth)

    model.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    assert relative_error(output(model, name), first) < 1e-3
    assert_depth_is(model, depth)


@every_class_exhaustively([name for name in NAMES if name != "easyanimate"])
def test_hot_swap(name: str, tmp_path: Path) -> None:
    """A second adapter, of a smaller rank, takes the place of the first in the same parameters."""
    model = default_model(name)
    depth, wanted = depth_values(model), []
    for index, rank in enumerate((3, 2)):
        each = default_model(name)
        each.add_adapter(lora_config(rank))
        randomise(each, index)
        each.save_lora_adapter(tmp_path / str(index))
        wanted.append(output(each, name))
    model.enable_lora_hotswap(target_rank=4)
    model.load_lora_adapter(tmp_path / "0", prefix=None, use_safetensors=True, adapter_name="default")
    assert relative_error(output(model, name), wanted[0]) < 1e-5
    kept = {key: value.data_ptr() for key, value in lora_values(model).items()}
    model.load_lora_adapter(tmp_path / "1", prefix=None, use_safetensors=True, adapter_name="default", hotswap=True)
    assert relative_error(output(model, name), wanted[1]) < 1e-5
    assert {key: value.data_ptr() for key, value in lora_values(model).items()} == kept
    model.load_lora_adapter(tmp_path / "0", prefix=None, use_safetensors=True, adapter_name="default", hotswap=True)
    assert relative_error(output(model, name), wanted[0]) < 1e-5
    assert_depth_is(model, depth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_a_hot_swapped_model_does_not_compile_again(name: str, tmp_path: Path) -> None:
    """What hot swapping is for. On the eager backend: Inductor adds nothing to this but time."""
    model = default_model(name)
    for index, rank in enumerate((3, 2)):
        each = default_model(name)
        each.add_adapter(lora_config(rank))
        randomise(each, index)
        each.save_lora_adapter(tmp_path / str(index))
    model.enable_lora_hotswap(target_rank=4)
    model.load_lora_adapter(tmp_path / "0", prefix=None, use_safetensors=True, adapter_name="default")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled_before = output(compiled, name)
    model.load_lora_adapter(tmp_path / "1", prefix=None, use_safetensors=True, adapter_name="default", hotswap=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = output(compiled, name)
    assert relative_error(found, output(model, name)) < 1e-5
    assert relative_error(found, compiled_before) > 1e-3


@every_class_exhaustively([name for name in NAMES if name != "easyanimate"])
def test_adapters_and_depth_train_together(name: str) -> None:
    """The recipe of docs/diffusers.md: LoRA and depth parameters get gradients, the base weights none."""
    model = default_model(name)
    model.requires_grad_(False)
    model.add_adapter(lora_config())
    randomise(model, 3)
    for reader in attnres_vision.readers(model).values():
        reader.requires_grad_(True)
    model.enable_gradient_checkpointing()
    model.train()
    model(**inputs_for(name, torch.float32))[0].pow(2).sum().backward()
    trained = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert all("lora_" in key or ".depth" in key for key in trained)
    assert any("lora_B" in key for key in trained)
    assert trained >= set(depth_values(model))


@pytest.mark.parametrize("name", ["flux"])
@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_kinds_of_lora(name: str, options: dict[str, Any]) -> None:
    model = default_model(name)
    depth, plain = depth_values(model), output(model, name)
    model.add_adapter(lora_config(**options))
    assert relative_error(output(model, name), plain) < 1e-4
    assert_depth_is(model, depth)


@every_class_exhaustively()
def test_peft_wraps_the_model_from_outside(name: str) -> None:
    """`peft.get_peft_model`, which needs no support of the class, and merges into a plain AttnRes model again."""
    from peft import get_peft_model

    model = default_model(name)
    depth = depth_values(model)
    wrapped = get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
    randomise(wrapped, 5)
    adapted = output(wrapped, name)
    assert not any("lora_" in key and "depth" in key for key in wrapped.state_dict())
    merged = wrapped.merge_and_unload()
    assert relative_error(output(merged, name), adapted) < 1e-3
    assert_depth_is(merged, depth)
