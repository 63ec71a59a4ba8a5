"""What users of other AttnRes code found broken: each works here, with queries that are not zero, or says why not."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from timm.models import named_apply
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnres_vision
from attnres_vision.ops import backend, depth_attention, reference
from tests.compat.models import attached, images, randomise

TOKEN = {"block_size": 3, "query": "token", "rank": 4}
KINDS: dict[str, dict[str, Any]] = {
    "static": {"block_size": 3},
    "token": TOKEN,
    "block": {"block_size": 3, "query": "block"},
    "condition": {"block_size": 3, "query": "condition", "rank": 4},
}


# Re-initialisation by frameworks -----------------------------------------------------------


def fsdp(model: nn.Module) -> None:
    """What FSDP does after `to_empty`: every module with parameters of its own resets them."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)) and hasattr(module, "reset_parameters"):
            module.reset_parameters()


def transformers(model: nn.Module) -> None:
    """The usual `_init_weights` of transformers, which only knows torch's modules, over all modules."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    model.apply(init)


def by_name(model: nn.Module) -> None:
    """timm's `named_apply`, calling `init_weights` where a module has one, as its models do."""

    def init(module: nn.Module, name: str) -> None:
        if name and hasattr(module, "init_weights"):
            module.init_weights()

    named_apply(init, model)


@pytest.mark.parametrize("how", [fsdp, transformers, by_name, VisionTransformer.init_weights])
def test_reinitialised_readers_are_the_standard_residual(how: Any) -> None:
    """Zero queries are the start, not a defect: what must not stay zero is the factor that gives them a gradient."""
    model = attached("vit", TOKEN).train()
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            nn.init.constant_(parameter, float("nan"))
    how(model)
    found = {n: p for n, p in model.named_parameters() if ".depth." in n}
    assert found and all(p.any() == n.endswith("query_down") and p.isfinite().all() for n, p in found.items())
    # queries then train: the first step moves every one of them, the second the inner factors too
    optimizer = torch.optim.SGD(found.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    assert all(p.any() and p.grad.any() for n, p in found.items())


# Many sources ------------------------------------------------------------------------------------------------


def test_full_on_48_blocks_equals_a_loop() -> None:
    """97 sources. The loop is written from the paper's equations, without the stream."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=8, depth=48, num_heads=1, num_classes=3)
    model = randomise(attnres_vision.attach(vit.double(), mode="full"))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = model(x)
    grads = torch.autograd.grad(found.square().sum(), list(model.parameters()))

    sources = [model._pos_embed(model.patch_embed(x))]

    def read(norm: nn.Module) -> Tensor:
        query = norm.depth.query
        h = sources[0] if query is None else reference.depth_attention(sources, query)
        return nn.functional.layer_norm(h, (8,), norm.weight, norm.bias, norm.eps)

    for block in model.blocks:
        sources.append(block.attn(read(block.norm1)))
        sources.append(block.mlp(read(block.norm2)))
    assert len(sources) == 97
    expected = model.forward_head(read(model.norm))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9 * (1 + float(theirs.abs().max())))


@pytest.mark.parametrize("chosen", ["eager", "auto"])
def test_300_sources_equal_the_reference(chosen: str) -> None:
    sources = [torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(300)]
    query = torch.randn(8, dtype=torch.float64, requires_grad=True)
    results = []
    for read in (depth_attention, reference.depth_attention):
        with backend(chosen):
            out = read(sources, query)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*sources, query])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_300_sources_are_too_many_for_the_kernels(triton_device: str) -> None:
    sources = [torch.randn(1, 2, 16, device=triton_device) for _ in range(300)]
    with backend("triton"), pytest.raises(ValueError, match=r"at most .*257 sources.* got .*300"):
        depth_attention(sources, torch.randn(16, device=triton_device))


# Checkpointing by others -----------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(images()).square().sum().backward()
    return {n.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for n, p in model.named_parameters()}


def wrapped(model: nn.Module) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, preserve_rng_state=False),
        check_fn=lambda module: any(module is block for block in model.blocks),
    )


def selective(model: nn.Module) -> None:
    """Matrix products and our reads are kept, the rest is computed again."""
    kept = {torch.ops.aten.addmm.default, torch.ops.attnres_vision.depth_attention.default}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    by_hand(model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def by_hand(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


@pytest.mark.parametrize("config", [*KINDS.values(), {"mode": "full", "two_phase": True}], ids=[*KINDS, "two_phase"])
@pytest.mark.parametrize("how", [wrapped, by_hand, selective])
def test_checkpoints_around_blocks_give_the_same_gradients(how: Any, config: dict) -> None:
    model = attached("vit", config).train()
    expected = gradients(model)
    how(model)
    found = gradients(model)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-5 * (1 + float(wanted.abs().max())))


# Blocks by hand, as masked-token code calls them -----------------------------------------------------------


class MaskedAutoencoder(nn.Module):
    """Visible tokens through an encoder's blocks, all tokens through a decoder made of another model's blocks."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.mask_token = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.encoder.patch_embed(x) + self.encoder.pos_embed
        x = torch.gather(x, 1, kept[..., None].expand(-1, -1, 32))
        for block in self.encoder.blocks:
            x = block(x)
        x = self.encoder.norm(x)
        full = self.mask_token.expand(2, 16, 32).scatter(1, kept[..., None].expand(-1, -1, 32), x)
        return self.decoder.norm(self.decoder.blocks(full))


def test_a_masked_autoencoder_made_of_blocks_trains() -> None:
    make = functools.partial(VisionTransformer, img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)
    options = {"class_token": False, "global_pool": "avg", "fc_norm": False, "num_classes": 0}
    model = MaskedAutoencoder(*(randomise(attnres_vision.attach(make(**options), mode="full")) for _ in range(2)))
    kept = torch.stack([torch.randperm(16)[:5] for _ in range(2)])
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            for part in (model.encoder, model.decoder):
                by_hand(part)
        model.zero_grad()
        model(images(), kept).square().sum().backward()
        results.append([p.grad.clone() for n, p in model.named_parameters() if ".depth." in n])
    assert len(results[0]) == 12 and all(grad.any() for grad in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# No host synchronisation -----------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Fails where a GPU would make the host wait: values on the host, sizes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "allclose")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        assert name.split(".")[0] not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [*KINDS.values(), {"mode": "full", "two_phase": True}], ids=[*KINDS, "two_phase"])
def test_forward_and_backward_never_wait_for_the_device(config: dict) -> None:
    """On a CPU by name of the operator; on the meta device, where no value exists, by construction."""
    model = attached("vit", config).train()
    with NoSync():
        model(images()).square().sum().backward()
    meta = copy.deepcopy(model).to("meta")
    meta(images().to("meta")).square().sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in meta.parameters())


def test_the_watch_for_synchronisation_sees_one() -> None:
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).item()


# Second derivatives, export -----------------------------------------------------------


@pytest.mark.parametrize("config", [*KINDS.values(), {"mode": "full", "two_phase": True}], ids=[*KINDS, "two_phase"])
def test_create_graph_is_an_error(config: dict) -> None:
    model = attached("vit", config)
    with pytest.raises(RuntimeError, match=r"no double backward \(create_graph=True\).*torch.func.grad"):
        torch.autograd.grad(model(images()).square().sum(), list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_export_of_either_kind(strict: bool) -> None:
    model = attached("vit", depth=2)
    program = torch.export.export(model, (images(),), strict=strict)
    other = images(seed=7)
    torch.testing.assert_close(program.module()(other), model(other), rtol=1e-4, atol=1e-5)


# Features under a decoder -----------------------------------------------------------


@pytest.mark.parametrize("size", [{"img_size": 48}, {"dynamic_img_size": True}], ids=str)
def test_a_segmentation_decoder_on_features_of_another_size(size: dict) -> None:
    """Encoder by `features_only`, a decoder whose first layer works in place, as segmentation libraries have it."""
    import timm

    sizes = {"img_size": 32} | size
    model = timm.create_model(
        "attnres_vit_tiny_patch16_224", features_only=True, out_indices=[1, 4, 7], attnres={"num_blocks": 4}, **sizes
    )
    randomise(model.train())
    heads = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(192, 4, 1)) for _ in range(3))
    features = model(images(size=48))
    clean = [feature.detach().clone() for feature in model(images(size=48))]
    assert [feature.shape for feature in features] == [(2, 192, 3, 3)] * 3
    out = sum(head(feature) for head, feature in zip(heads, features, strict=True))
    torch.testing.assert_close(out, sum(head(feature) for head, feature in zip(heads, clean, strict=True)))
    out.square().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".depth." in n)


@torch.no_grad()
def test_onnx_says_what_is_missing() -> None:
    """With onnxscript it is the exported program; without it torch's own error names the package."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="onnxscript"):
            torch.onnx.export(attached("vit", depth=2), (images(),), dynamo=True)
    else:
        assert torch.onnx.export(attached("vit", depth=2), (images(),), dynamo=True) is not None
