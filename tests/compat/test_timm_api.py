"""The rest of what timm's users do with a model: initialise, decay, freeze, reset, resize, checkpoint, average."""

import warnings
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from timm.layers import set_reentrant_ckpt
from timm.models import checkpoint_seq, group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3, freeze, unfreeze
from torch import nn

import attnres_vision
from tests.compat.models import DEPTH, MODELS, attached, converted, host_of, images, randomise

TOKEN = {"block_size": 3, "query": "token", "rank": 4}
CHECKPOINTING = [name for name in MODELS if name != "convit"]  # timm has none for ConViT


def depth_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".depth." in name}


@pytest.mark.parametrize("config", [{"block_size": 3}, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name: str, config: dict) -> None:
    """As timm's own test_model_backward asks, and DDP without find_unused_parameters."""
    model = attached(name, config).train()
    model(images()).square().sum().backward()
    assert depth_parameters(model)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    # CaiT's class token joins behind the blocks: all it reads but itself is zero, so a token query has nothing to add.
    dead = {n for n, p in depth_parameters(model).items() if not p.grad.any()}
    assert dead <= ({"norm.depth.query_down", "norm.depth.query_up"} if name == "cait" else set())


def test_queries_get_gradients_at_zero() -> None:
    model = converted("vit")[1].train()
    model(images()).square().sum().backward()
    assert all(p.grad.any() for p in depth_parameters(model).values())


# Initialisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if hasattr(MODELS[name][0], "init_weights") or "naf" in name])
def test_init_weights_after_the_meta_device(name: str) -> None:
    """`device="meta"`, `to_empty`, `init_weights()` is how large models are made; readers must start at zero."""
    make, kwargs = MODELS[name]
    with torch.device("meta"):
        stock, model = make(**kwargs), attnres_vision.attach(make(**kwargs), TOKEN)
    for each in (stock, model):
        each.to_empty(device="cpu")
        for parameter in each.parameters():
            nn.init.constant_(parameter, float("nan"))
        each.init_weights()
    uninitialised = {n for n, p in stock.named_parameters() if not p.isfinite().all()}  # timm's own gaps
    assert {n for n, p in model.named_parameters() if not p.isfinite().all()} == uninitialised
    for path, reader in attnres_vision.readers(model).items():
        for parameter, value in reader.named_parameters():
            assert value.any() == (parameter == "query_down"), (path, parameter)


def test_create_model_on_the_meta_device() -> None:
    model = timm.create_model("attnres_vit_tiny_patch16_224", img_size=32, device="meta", attnres={"num_blocks": 2})
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(p.any() for p in depth_parameters(model).values())
    assert model.eval()(images()).isfinite().all()


# Optimisers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_layer_decay_puts_depth_parameters_in_the_layer_of_their_block(name: str) -> None:
    model = attached(name, TOKEN)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
    scale = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert scale.keys() == set(names.values())
    found = depth_parameters(model)
    for depth in found:
        owner = depth.split(".depth.")[0]
        neighbours = {scale[n] for n in scale if n.startswith(f"{owner}.") and ".depth." not in n}
        block = owner.split("blocks.")[-1].split(".")[0]
        if not neighbours and "blocks." in owner:  # an Identity
            neighbours = {scale[n] for n in scale if f"blocks.{block}." in n and ".depth." not in n}
        assert not neighbours or scale[depth] in neighbours, depth
    inside = {scale[n] for n in found if n.removeprefix("encoder.").startswith("blocks.")}
    assert len(inside) >= DEPTH - 1  # they are spread over the layers, not lumped together


def test_group_parameters_keeps_queries_with_their_block() -> None:
    model = attached("vit")
    groups = group_parameters(model, model.group_matcher(), reverse=False)
    layer_of = {name: layer for layer, names in groups.items() for name in names}
    for index in range(DEPTH):
        assert layer_of[f"blocks.{index}.norm2.depth.query"] == layer_of[f"blocks.{index}.mlp.fc1.weight"]
    assert layer_of["norm.depth.query"] == layer_of["norm.weight"]


@pytest.mark.parametrize("config", [{"block_size": 3}, TOKEN, {"query": "token", "num_blocks": 2}], ids=str)
@pytest.mark.parametrize(
    "name", ["vit", "eva", "naflex", "beit", "mixer", "xcit", "deepseek-classifier", "qwen3-encoder"]
)
@pytest.mark.parametrize("layer_decay", [None, 0.7], ids=["flat", "layer_decay"])
def test_no_optimiser_decays_depth_parameters(name: str, config: dict, layer_decay: float | None) -> None:
    model = attached(name, config)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, layer_decay=layer_decay)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed
    assert [n for n, p in depth_parameters(model).items() if id(p) in decayed] == []
    listed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in listed if group["weight_decay"] for p in group["params"]}
    assert [n for n, p in depth_parameters(model).items() if id(p) in decayed] == []


@pytest.mark.parametrize("how", ["static", "token", "token-own_groups"])
def test_muon_leaves_depth_parameters_to_its_fallback(how: str) -> None:
    """Orthogonalised steps have the size of the learning rate in every direction: far too much for a query.

    timm's Muon takes matrices only, so static queries are safe; the matrices of input-dependent ones need timm's
    `fallback_no_weight_decay=True`, or `depth_param_groups`.
    """
    model = attached("vit", {"block_size": 3} if how == "static" else TOKEN)
    if how == "token-own_groups":
        optimizer = create_optimizer_v2(attnres_vision.depth_param_groups(model), "muon", lr=1e-3)
    else:
        optimizer = create_optimizer_v2(model, "muon", lr=1e-3, fallback_no_weight_decay=how == "token")
    before = {name: parameter.detach().clone() for name, parameter in depth_parameters(model).items()}
    model(images()).square().sum().backward()
    optimizer.step()
    assert "exp_avg" not in optimizer.state[model.blocks[0].attn.qkv.weight]
    for name, parameter in depth_parameters(model).items():
        assert "exp_avg" in optimizer.state[parameter], name
        assert not torch.equal(parameter, before[name])


def test_model_ema_averages_the_queries() -> None:
    model = attached("vit")
    ema = ModelEmaV3(model, decay=0.5)
    before = model(images())
    start = model.norm.depth.query.detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(ema.module(images()), before)  # a copy of its own
    ema.update(model)
    torch.testing.assert_close(ema.module.norm.depth.query, start + 0.5)


# Heads, sizes, modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if hasattr(MODELS[name][0], "reset_classifier")])
@torch.no_grad()
def test_reset_classifier_keeps_the_features(name: str) -> None:
    model = attached(name)
    features = model.forward_features(images())
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7)
    model.reset_classifier(0)
    pooled = model(images())
    assert pooled.shape[0] == 2 and pooled.ndim == 2
    torch.testing.assert_close(model.forward_features(images()), features)


@pytest.mark.parametrize("name", ["vit", "eva", "beit", "relpos"])
@torch.no_grad()
def test_set_input_size(name: str) -> None:
    stock, ours = converted(name)
    for model in (stock, ours):
        model.set_input_size(img_size=(48, 40))
    x = torch.randn(2, 3, 48, 40)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    model = attached(name)
    model.set_input_size(img_size=(48, 40))
    assert model.forward_intermediates(x, intermediates_only=True)[1].shape[-2:] == (6, 5)
    assert not torch.allclose(model(x), stock(x))


@pytest.mark.parametrize("name", ["vit", "eva"])
@torch.no_grad()
def test_dynamic_img_size(name: str) -> None:
    stock, ours = converted(name, dynamic_img_size=True)
    x = torch.randn(2, 3, 40, 56)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    taken = attached(name, dynamic_img_size=True).forward_intermediates(x, intermediates_only=True)
    assert taken[0].shape[-2:] == (5, 7)


@pytest.mark.parametrize("query", ["static", "token"])
@pytest.mark.parametrize("name", ["vit", "eva", "naflex"])
def test_patch_dropout(name: str, query: str) -> None:
    """MAE-style token dropping comes before the first block: the stream holds the tokens that are left."""
    stock, ours = converted(name, patch_drop_rate=0.5)
    for model in (stock, ours):
        model.train()
    torch.manual_seed(3)
    expected = stock(images())
    torch.manual_seed(3)
    torch.testing.assert_close(ours(images()), expected, rtol=1e-4, atol=1e-5)
    model = attached(name, {"block_size": 3, "query": query}, patch_drop_rate=0.5).train()
    model(images()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_train_and_eval_reach_the_readers() -> None:
    model = attached("vit")
    assert not any(reader.training for reader in attnres_vision.readers(model).values())  # attached in eval mode
    model.train()
    assert all(reader.training for reader in attnres_vision.readers(model).values())


def test_freeze_reaches_the_queries() -> None:
    model = attached("vit").train()
    freeze(model, ["blocks.0", "blocks.1"])
    model(images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(("blocks.0.", "blocks.1.")), name
    unfreeze(model, "blocks.0")
    assert model.blocks[0].norm2.depth.query.requires_grad


def test_only_the_queries_can_train() -> None:
    """A frozen pretrained model with trainable depth parameters: everything else stays without gradients."""
    model = attached("eva").train().requires_grad_(False)
    for reader in attnres_vision.readers(model).values():
        reader.requires_grad_(True)
    model(images()).square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(depth_parameters(model))


@torch.no_grad()
def test_data_config_is_that_of_the_base_model() -> None:
    ours = timm.create_model("attnres_vit_tiny_patch16_224")
    base = timm.create_model("vit_tiny_patch16_224")
    assert resolve_data_config(model=ours) == resolve_data_config(model=base)
    assert resolve_model_data_config(ours) == resolve_model_data_config(base)
    assert ours.num_features == base.num_features and ours.feature_info == base.feature_info


# Blocks in the user's own hands --------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_loop_over_the_blocks() -> None:
    model = attached("vit")
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images()))))
    y = x
    for block in model.blocks:
        y = block(y)
        assert y.shape == x.shape and y.total().shape == x.shape
    torch.testing.assert_close(model.norm(y), model.forward_features(images()))
    torch.testing.assert_close(model.norm(model.blocks(x)), model.forward_features(images()))


@torch.no_grad()
def test_normed_features_in_a_loop_do_not_disturb_it() -> None:
    """DINO-style: `norm` is called after several blocks."""
    model = attached("vit")
    x = model._pos_embed(model.patch_embed(images()))
    normed = []
    for block in model.blocks:
        x = block(x)
        normed.append(model.norm(x))
    torch.testing.assert_close(normed[-1], model.forward_features(images()))


@torch.no_grad()
def test_cutting_off_the_last_blocks_is_fine_and_cutting_off_the_first_is_an_error() -> None:
    model = attached("vit")
    x = model._pos_embed(model.patch_embed(images()))
    expected = model.norm(model.blocks[:2](x))
    with pytest.raises(TypeError, match=r"'blocks.2.norm1'.*DepthStream.*first block"):
        model.blocks[2:](x)
    model.blocks = model.blocks[:2]
    torch.testing.assert_close(model.forward_features(images()), expected)
    model.blocks = model.blocks[1:]
    with pytest.raises(TypeError, match=r"'blocks.1.norm1'.*DepthStream"):
        model(images())


# Gradient checkpointing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_set_grad_checkpointing_gives_the_same_gradients(name: str) -> None:
    plain, checkpointed = attached(name).train(), attached(name).train()
    checkpointed.set_grad_checkpointing()
    assert host_of(checkpointed).grad_checkpointing
    for model in (plain, checkpointed):
        torch.manual_seed(0)
        model(images()).square().sum().backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("skip_last", [False, True], ids=["all", "skip_last"])
def test_checkpoint_seq_equals_the_loop(every: int, skip_last: bool) -> None:
    model = attached("vit").train()
    x = model._pos_embed(model.patch_embed(images())).detach().requires_grad_()
    expected = torch.autograd.grad(model.norm(model.blocks(x)).square().sum(), [x, model.blocks[1].norm1.depth.query])
    loss = model.norm(checkpoint_seq(model.blocks, x, every=every, skip_last=skip_last)).square().sum()
    got = torch.autograd.grad(loss, [x, model.blocks[1].norm1.depth.query])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["vit", "mixer", "sam", "cait", "xcit"])  # torch refuses the others
def test_reentrant_checkpointing_is_an_error(name: str) -> None:
    """It sees no tensor in a stream: without the error, the gradients of all blocks would be silently lost."""
    model = attached(name).train()
    model.set_grad_checkpointing()
    set_reentrant_ckpt(True)
    try:
        with (
            warnings.catch_warnings(),
            pytest.raises(RuntimeError, match="use_reentrant=False"),
        ):
            warnings.simplefilter("ignore")
            model(images())
        with torch.no_grad():
            model(images())  # nothing to lose
    finally:
        set_reentrant_ckpt(False)


def test_blocks_without_gradients_behind_a_frozen_embedding() -> None:
    """The check for lost gradients must not refuse what a user means: the first blocks under no_grad."""
    model = attached("vit").train()
    with torch.no_grad():
        x = model.blocks[:2](model._pos_embed(model.patch_embed(images())))
    for block in model.blocks[2:]:
        x = block(x)
    model.norm(x).square().sum().backward()
    assert model.blocks[1].norm2.depth.query.grad is None and model.blocks[2].norm1.depth.query.grad.any()


def test_state_dicts_of_stock_and_ours_differ_by_the_depth_parameters() -> None:
    for name in MODELS:
        stock, ours = converted(name)
        extra = ours.state_dict().keys() - stock.state_dict().keys()
        assert extra == set(depth_parameters(ours)) and stock.state_dict().keys() <= ours.state_dict().keys()
        missing: Any = ours.load_state_dict(stock.state_dict(), strict=False)
        assert set(missing.missing_keys) == extra and not missing.unexpected_keys
    assert randomise(ours)
