"""The `attnres_<name>` models in timm's registry: which exist, what they build, and what weights they load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models import (
    Eva,
    NaFlexVit,
    VisionTransformer,
    get_arch_pretrained_cfgs,
    get_pretrained_cfg,
    load_pretrained,
    save_for_hf,
)
from torch import Tensor, nn

import attnres_vision
from attnres_vision.attach import hosts
from attnres_vision.attach.plan import reader_places
from attnres_vision.timm.attnres_models import MODULES, base_names
from tests.timm.tiny import MODELS, images, randomise, randomise_depth, stock_model

PREFIX = "attnres_"
TINY_DEIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=4)


def config_of(model: nn.Module) -> attnres_vision.AttnResConfig:
    return next(iter(attnres_vision.readers(model).values())).config


# Names ---------------------------------------------------------------------------------------------------------------


def test_every_model_of_the_families_is_listed() -> None:
    listed = timm.list_models("attnres_*")
    assert len(listed) >= 370
    assert sorted(listed) == sorted(PREFIX + name for name in base_names())
    assert set(listed) == set(timm.list_models(module="attnres_models"))
    assert not set(listed) & set(timm.list_models(module="vision_transformer"))


@pytest.mark.parametrize("module", MODULES)
def test_no_model_of_a_module_is_left_out(module: str) -> None:
    base = timm.list_models(module=module)
    assert base
    assert [name for name in base if not timm.is_model(PREFIX + name)] == []


def built(name: str) -> Any:
    """The model at its full size, on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(name)
    found = attnres_vision.readers(model)
    queries = [reader for reader in found.values() if reader.query is not None]
    assert len(queries) >= 2, name
    assert config_of(model) == attnres_vision.AttnResConfig(num_blocks=8), name
    assert model.pretrained_cfg["architecture"] == name
    return model


@pytest.mark.parametrize("module", MODULES)
def test_a_model_of_every_module_builds_at_its_full_size(module: str) -> None:
    built(PREFIX + timm.list_models(module=module)[0])


@pytest.mark.exhaustive
def test_every_listed_model_builds_and_has_its_readers() -> None:
    classes: Counter[str] = Counter()
    for name in timm.list_models("attnres_*"):
        model = built(name)
        for family in (VisionTransformer, Eva, NaFlexVit):
            classes[family.__name__] += isinstance(model, family)
    assert classes["VisionTransformer"] >= 206
    assert classes["Eva"] >= 65
    assert classes["NaFlexVit"] >= 14


def test_pretrained_tags_are_those_of_the_base_with_full_hub_ids() -> None:
    """timm completes a hub id of `timm/` with the model's own name, which would be ours."""
    for name in base_names():
        base, ours = get_arch_pretrained_cfgs(name), get_arch_pretrained_cfgs(PREFIX + name)
        assert set(ours) == {PREFIX + key for key in base}, name
        for key, cfg in base.items():
            assert ours[PREFIX + key].hf_hub_id == cfg.hf_hub_id, key
            assert ours[PREFIX + key].url == cfg.url, key
            assert ours[PREFIX + key].input_size == cfg.input_size, key
            assert not (cfg.hf_hub_id or "").endswith("timm/"), key


def test_the_default_tag_is_that_of_the_base() -> None:
    names = [name for name in base_names() if get_pretrained_cfg(name, allow_unregistered=False)]
    tags = {name: get_pretrained_cfg(name).tag for name in names}
    assert {name: get_pretrained_cfg(PREFIX + name).tag for name in names} == tags
    assert tags["vit_base_patch16_224"] == "augreg2_in21k_ft_in1k"


def test_list_pretrained_offers_the_base_tags() -> None:
    base = timm.list_pretrained("vit_tiny_patch16_224*")
    assert base
    assert timm.list_pretrained("attnres_vit_tiny_patch16_224*") == [PREFIX + name for name in base]


def test_timm_itself_is_unchanged() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **TINY_DEIT)
    assert type(model) is VisionTransformer
    assert attnres_vision.readers(model) == {}


def test_an_unimported_library_is_an_unknown_model() -> None:
    """What a user sees who forgot the import: timm's own error, and the import is all that was missing."""
    code = """
import timm
try:
    timm.create_model("attnres_vit_tiny_patch16_224")
except RuntimeError as error:
    print(error)
import attnres_vision
print(type(timm.create_model("attnres_vit_tiny_patch16_224", depth=4)).__name__)
"""
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["Unknown model (attnres_vit_tiny_patch16_224)", "AttnResVisionTransformer"]


# Arguments -----------------------------------------------------------------------------------------------------------


def test_attnres_fields_and_timm_arguments_reach_the_model() -> None:
    attnres = {"num_blocks": 3, "query": "token", "rank": 2, "heads": 4}
    model = timm.create_model("attnres_deit3_small_patch16_224", **TINY_DEIT, num_classes=5, attnres=attnres)
    assert model.attnres_config == attnres_vision.AttnResConfig(**attnres)
    assert model.num_classes == 5 and len(model.blocks) == 4
    assert model.norm.depth.query_down.shape == (2, 48)


def test_use_naflex_names_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"use_naflex must be False for attnres_vit_base_patch16_224, got True: use an "
    ):
        timm.create_model("attnres_vit_base_patch16_224", use_naflex=True)


def test_the_way_out_of_use_naflex_works() -> None:
    stock = timm.create_model("vit_base_patch16_224", use_naflex=True, **(TINY_DEIT | dict(num_classes=3)))
    assert isinstance(attnres_vision.attach(stock), NaFlexVit)


# Weights of the base model -------------------------------------------------------------------------------------------

NAMED = [key for key, tiny in MODELS.items() if isinstance(tiny.name, str)]


def overlay(file: Path, **fields: Any) -> dict[str, Any]:
    return {"pretrained": True, "pretrained_cfg_overlay": dict(file=str(file), custom_load=False, **fields)}


@pytest.mark.parametrize("key", NAMED)
def test_weights_of_the_base_load_strictly(key: str, tmp_path: Path) -> None:
    """Through the base's own checkpoint filter; all depth parameters stay zero."""
    stock = stock_model(key).eval()
    torch.save(stock.state_dict(), tmp_path / "stock.pth")
    attnres = {"query": "token", "num_blocks": 2}
    fields = {"num_classes": stock.num_classes}
    model = MODELS[key].create(PREFIX, attnres=attnres, **overlay(tmp_path / "stock.pth", **fields)).eval()
    depth = attnres_vision.attnres_state_dict(model)
    assert depth and not any(value.any() for value in depth.values())
    x = images(key)
    expected = stock(x)
    assert (model(x) - expected).abs().max() <= 5e-6 * expected.std()


ADAPTED = {
    "num_classes": {"num_classes": 3},
    "no-head": {"num_classes": 0},
    "in_chans": {"in_chans": 1},
    "img_size": {"img_size": 48},
    "all": {"num_classes": 3, "in_chans": 4, "img_size": 64},
}


@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.parametrize("key", ["deit3", "dinov3", "eva02", "beit"])
def test_weights_of_the_base_are_adapted_as_timm_does(key: str, case: str, tmp_path: Path) -> None:
    changed = ADAPTED[case]
    torch.save(stock_model(key).state_dict(), tmp_path / "stock.pth")
    loading = overlay(tmp_path / "stock.pth", num_classes=7, input_size=(3, 32, 32))
    stock = MODELS[key].create(**changed, **loading)
    model = MODELS[key].create(PREFIX, attnres={"mode": "full"}, **changed, **loading)
    new_head = changed.get("num_classes", 7) not in (0, 7)
    for name, value in stock.state_dict().items():
        if not (new_head and name.startswith("head")):
            assert torch.equal(model.state_dict()[name], value), name
    x = torch.randn(1, changed.get("in_chans", 3), *[changed.get("img_size", 32)] * 2)
    expected = stock.eval().forward_features(x)
    assert (model.eval().forward_features(x) - expected).abs().max() <= 5e-6 * expected.std()


def test_a_base_checkpoint_with_a_missing_key_fails(tmp_path: Path) -> None:
    state = stock_model("deit3").state_dict()
    del state["blocks.1.mlp.fc1.bias"]
    torch.save(state, tmp_path / "stock.pth")
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.1\.mlp\.fc1\.bias"):
        MODELS["deit3"].create(PREFIX, **overlay(tmp_path / "stock.pth", num_classes=7))


def npz_of(model: nn.Module) -> dict[str, np.ndarray]:
    """A ViT's weights as the official JAX checkpoints have them, which timm reads without a state dict."""
    out: dict[str, Tensor] = {
        "embedding/kernel": model.patch_embed.proj.weight.permute(2, 3, 1, 0),
        "embedding/bias": model.patch_embed.proj.bias,
        "cls": model.cls_token,
        "Transformer/posembed_input/pos_embedding": model.pos_embed,
        "Transformer/encoder_norm/scale": model.norm.weight,
        "Transformer/encoder_norm/bias": model.norm.bias,
        "head/kernel": model.head.weight.T,
        "head/bias": model.head.bias,
    }
    for index, block in enumerate(model.blocks):
        heads, dim = block.attn.num_heads, block.norm1.weight.shape[0]
        place = f"Transformer/encoderblock_{index}/"
        for name, module in (("LayerNorm_0", block.norm1), ("LayerNorm_2", block.norm2)):
            out[f"{place}{name}/scale"], out[f"{place}{name}/bias"] = module.weight, module.bias
        attention = f"{place}MultiHeadDotProductAttention_1/"
        parts = zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True)
        for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
            out[f"{attention}{name}/kernel"] = weight.T.reshape(dim, heads, -1)
            out[f"{attention}{name}/bias"] = bias.reshape(heads, -1)
        out[f"{attention}out/kernel"] = block.attn.proj.weight.T.reshape(heads, -1, dim)
        out[f"{attention}out/bias"] = block.attn.proj.bias
        for name, module in (("Dense_0", block.mlp.fc1), ("Dense_1", block.mlp.fc2)):
            out[f"{place}MlpBlock_3/{name}/kernel"] = module.weight.T
            out[f"{place}MlpBlock_3/{name}/bias"] = module.bias
    return {name: value.detach().numpy() for name, value in out.items()}


@pytest.mark.parametrize("way", ["create_model", "load_pretrained"])
def test_npz_weights_load(way: str, tmp_path: Path) -> None:
    stock = stock_model("prenorm").eval()
    file = tmp_path / "augreg.npz"
    np.savez(file, **npz_of(stock))
    if way == "create_model":
        loading = overlay(file, num_classes=7)
        loading["pretrained_cfg_overlay"]["custom_load"] = True
        model = MODELS["prenorm"].create(PREFIX, **loading).eval()
    else:
        model = MODELS["prenorm"].create(PREFIX).eval()
        model.load_pretrained(str(file))
    assert attnres_vision.attnres_state_dict(model)
    x = images("prenorm")
    expected = stock(x)
    assert (model(x) - expected).abs().max() <= 5e-6 * expected.std()


# Weights of an AttnRes model -----------------------------------------------------------------------------------------


def trained(key: str = "deit3", **attnres: Any) -> nn.Module:
    return randomise_depth(randomise(MODELS[key].create(PREFIX, attnres=attnres))).eval()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_an_attnres_checkpoint_loads(suffix: str, tmp_path: Path) -> None:
    model, file = trained(query="token", rank=3), tmp_path / f"attnres.{suffix}"
    if suffix == "pth":
        torch.save(model.state_dict(), file)
    else:
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), file)
    loaded = (
        MODELS["deit3"].create(PREFIX, attnres={"query": "token", "rank": 3}, **overlay(file, num_classes=7)).eval()
    )
    x = images("deit3")
    assert torch.equal(loaded(x), model(x))


def test_an_attnres_checkpoint_through_checkpoint_path(tmp_path: Path) -> None:
    model = trained(query="token")
    torch.save(model.state_dict(), tmp_path / "last.pth")
    loaded = MODELS["deit3"].create(PREFIX, attnres={"query": "token"}, checkpoint_path=str(tmp_path / "last.pth"))
    x = images("deit3")
    assert torch.equal(loaded.eval()(x), model(x))


def without(name: str):
    return lambda state: {key: value for key, value in state.items() if key != name}


BROKEN = {
    "some-depth-keys-missing": (without("blocks.2.norm1.depth.query"), r"Missing key.*blocks\.2\.norm1\.depth\.query"),
    "unknown-depth-key": (
        lambda state: state | {"blocks.9.norm1.depth.query": torch.zeros(48)},
        r"Unexpected key.*blocks\.9\.norm1\.depth\.query",
    ),
    "another-width": (
        lambda state: state | {"norm.depth.query": torch.zeros(64)},
        r"size mismatch for norm\.depth\.query",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_attnres_checkpoint_fails(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    torch.save(change(trained().state_dict()), tmp_path / "broken.pth")
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        MODELS["deit3"].create(PREFIX, **overlay(tmp_path / "broken.pth", num_classes=7))


def test_a_checkpoint_of_another_query_kind_fails(tmp_path: Path) -> None:
    torch.save(trained(query="token").state_dict(), tmp_path / "token.pth")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*depth\.query_proj"):
        MODELS["deit3"].create(PREFIX, **overlay(tmp_path / "token.pth", num_classes=7))


def test_load_pretrained_on_an_existing_model(tmp_path: Path) -> None:
    """timm.models.load_pretrained without our filter is strict about the depth parameters, and says so."""
    torch.save(stock_model("deit3").state_dict(), tmp_path / "stock.pth")
    model = MODELS["deit3"].create(PREFIX)
    cfg = dict(model.pretrained_cfg, file=str(tmp_path / "stock.pth"), num_classes=7)
    with pytest.raises(RuntimeError, match=r"Missing key.*depth\.query"):
        load_pretrained(model, pretrained_cfg=cfg, num_classes=7)
    load_pretrained(model, pretrained_cfg=cfg, num_classes=7, strict=False)


# The hub's format ----------------------------------------------------------------------------------------------------

SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("deit3", {}),
    "full": ("deit3", {"mode": "full", "scale": 0.25}),
    "token-rank3": ("dinov3", {"query": "token", "rank": 3, "block_size": 3}),
    "block-heads2-mean": ("eva02", {"query": "block", "heads": 2, "form": "mean", "num_blocks": 3}),
    "condition": ("beit", {"query": "condition", "key_eps": 1e-4}),
    "naflex": ("naflex", {"query": "token"}),
    "xcit": ("xcit", {"query": "token", "num_blocks": 5}),
    "sam": ("sam", {"query": "token", "rank": 2}),
    "qwen3-classifier": ("qwen3-classifier", {"query": "token", "rank": 2}),
    "qwen3-encoder": ("qwen3-encoder", {"query": "token", "rank": 2}),
    "deepseek-classifier": ("deepseek-classifier", {"query": "token", "rank": 2}),
}


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("case", SAVED)
def test_a_saved_model_comes_back_from_its_directory(case: str, safe: bool, tmp_path: Path) -> None:
    """Config and weights: nothing has to be said again."""
    key, attnres = SAVED[case]
    model = trained(key, **attnres)
    save_for_hf(model, tmp_path, safe_serialization=safe)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(loaded) is type(model)
    sublayers = 1 + max(place.index for _, host in hosts(model) for place in reader_places(host))
    assert config_of(loaded) == config_of(model) == attnres_vision.AttnResConfig(**attnres).for_sublayers(sublayers)
    x = images(key)
    assert torch.equal(loaded(x), model(x))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == PREFIX + MODELS[key].name
    written = attnres_vision.AttnResConfig.from_dict(config["model_args"]["attnres"])
    # A classifier around its encoder is a class of timm's, which writes the arguments as they were given
    assert (written if model is hosts(model)[0][1] else written.for_sublayers(sublayers)) == config_of(model)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "naflexvit_base_patch16_gap", "cait_xxs24_224"]
)
def test_a_model_with_fewer_sublayers_than_eight_needs_no_arguments(name: str, tmp_path: Path) -> None:
    """And the config that is saved says what was used."""
    small = {"num_classes": 3, "embed_dim": 24, "depth": 1, "num_heads": 2}
    model = randomise_depth(timm.create_model(PREFIX + name, **small).eval())
    assert config_of(model) == model.attnres_config == attnres_vision.AttnResConfig(num_blocks=2)
    save_for_hf(model, tmp_path, model_args=small)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["attnres"]["num_blocks"] == 2
    assert type(attnres_vision.attach(timm.create_model(name, **small))) is type(model)


def test_a_saved_default_is_an_explicit_number_when_it_is_loaded_with_fewer_layers(tmp_path: Path) -> None:
    """The saved model had those blocks; the way out is to choose again, as `attnres={}` does."""
    model = timm.create_model("attnres_deit3_small_patch16_224", **TINY_DEIT)
    save_for_hf(model, tmp_path, model_args=TINY_DEIT)
    config = json.loads((tmp_path / "config.json").read_text())["model_args"]["attnres"]
    assert config["num_blocks"] == 8
    with pytest.raises(ValueError, match=r"num_blocks must be between 1 and 2 for this model \(2 sublayers\), got 8"):
        timm.create_model(f"local-dir:{tmp_path}", depth=1)
    assert timm.create_model(f"local-dir:{tmp_path}", depth=1, attnres={}).attnres_config.num_blocks == 2


def test_a_saved_model_is_fine_tuned_with_another_head(tmp_path: Path) -> None:
    model = trained(query="token", rank=3)
    save_for_hf(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3).eval()
    x = images("deit3")
    assert loaded(x).shape == (2, 3)
    assert torch.equal(loaded.forward_features(x), model.forward_features(x))


def test_a_reloaded_model_can_be_saved_again(tmp_path: Path) -> None:
    model = trained(mode="full")
    save_for_hf(model, tmp_path / "first")
    save_for_hf(timm.create_model(f"local-dir:{tmp_path / 'first'}", pretrained=True), tmp_path / "second")
    x = images("deit3")
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path / 'second'}", pretrained=True).eval()(x), model(x))


# Features ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["deit3", "dinov3", "naflex", "beit", "relpos-postnorm", "sam", "xcit", "cait"])
def test_features_only_equals_the_stock_features_at_zero_queries(key: str, tmp_path: Path) -> None:
    stock = stock_model(key)
    torch.save(stock.state_dict(), tmp_path / "stock.pth")
    loading = overlay(tmp_path / "stock.pth", num_classes=7)
    kwargs: dict[str, Any] = dict(features_only=True, out_indices=(1, 2), **loading)
    expected = MODELS[key].create(**kwargs).eval()
    model = MODELS[key].create(PREFIX, attnres={"block_size": 3}, **kwargs).eval()
    assert model.feature_info.channels() == expected.feature_info.channels()
    x = images(key)
    for got, feature in zip(model(x), expected(x), strict=True):
        assert got.shape == feature.shape
        assert (got - feature).abs().max() <= 5e-6 * feature.std()
