"""Two-phase reads: the same models, values and gradients as when every reader reads all its sources itself."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

import attnres_vision
from attnres_vision.ops import operator, reference, two_phase
from attnres_vision.ops.collect import collect

KINDS = {
    "static": {},
    "condition": {"query": "condition"},
    "condition-low-rank": {"query": "condition", "rank": 4},
    "block": {"query": "block"},
    "block-low-rank": {"query": "block", "rank": 4},
    "mean-form": {"form": "mean", "scale": 0.5},
    "uneven-blocks": {"block_size": 5},
}


def vit(**config) -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 6, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **options).double()
    config = {"block_size": 3, **config}
    model = attnres_vision.attach(model, config)
    for name, parameter in model.named_parameters():
        if ".depth." in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def step(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(images)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", KINDS)
def test_training_equals_one_phase(name, checkpointing):
    one, two = vit(two_phase=False, **KINDS[name]), vit(two_phase=True, **KINDS[name])
    if checkpointing:
        two.set_grad_checkpointing()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for found, expected in zip(step(two, images), step(one, images), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def count_passes(model: nn.Module, images: torch.Tensor, monkeypatch) -> int:
    passes = []
    attend = two_phase.blocks_op
    monkeypatch.setattr(two_phase, "blocks_op", lambda *args: passes.append(len(args[1])) or attend(*args))
    model(images)
    return passes


def test_finished_blocks_are_read_once_per_block(monkeypatch):
    """12 sublayers in blocks of 5: the first block has only the embedding, and its first reader is the identity."""
    model = vit(two_phase=True, block_size=5).eval()
    with torch.no_grad():
        assert count_passes(model, torch.randn(1, 3, 16, 16, dtype=torch.float64), monkeypatch) == [8]


@pytest.mark.parametrize("config", [{"query": "token"}, {"heads": 2}], ids=["token", "heads"])
def test_other_kinds_of_queries_are_left_alone(config, monkeypatch):
    model = vit(two_phase=True, **config).eval()
    assert count_passes(model, torch.randn(1, 3, 16, 16, dtype=torch.float64), monkeypatch) == []


def test_by_default_a_cpu_reads_in_one_phase(monkeypatch):
    model = vit().eval()
    with torch.no_grad():
        assert count_passes(model, torch.randn(1, 3, 16, 16, dtype=torch.float64), monkeypatch) == []


def test_copies_have_readers_of_their_own():
    model = vit(two_phase=True).eval()
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    expected = model(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".depth." in name:
                parameter.zero_()
    torch.testing.assert_close(twin(images), expected, rtol=0, atol=0)


def leave_out(model: nn.Module) -> None:
    model.blocks = nn.Sequential(*[block for i, block in enumerate(model.blocks) if i != 4])  # as skip-layer guidance


def replace(model: nn.Module) -> None:
    model.blocks[5] = copy.deepcopy(model.blocks[5])
    nn.init.normal_(model.blocks[5].norm1.depth.query)


@pytest.mark.parametrize("change", [leave_out, replace])
def test_readers_use_only_what_was_read_for_them(change):
    """Blocks of two layers: the first reader of a block is in layer 4, the third in layer 5."""
    one, two = (vit(two_phase=shared, block_size=4) for shared in (False, True))
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for model in (one, two):
        torch.manual_seed(1)
        change(model)
    for found, expected in zip(step(two, images), step(one, images), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_layers_without_gradients_read_nothing_for_those_with():
    """The first layers are frozen and run without gradients; the last one is in the middle of a block."""
    grads = []
    for shared in (False, True):
        model = vit(two_phase=shared, block_size=4).requires_grad_(False)
        model.blocks[-1].requires_grad_(True)
        with torch.no_grad():
            torch.manual_seed(1)
            x = model._pos_embed(model.patch_embed(torch.randn(2, 3, 16, 16, dtype=torch.float64)))
            for block in model.blocks[:-1]:
                x = block(x)
        model.norm(model.blocks[-1](x)).square().sum().backward()
        grads.append([parameter.grad for parameter in model.blocks[-1].parameters()])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_no_pass_for_a_cast_that_the_host_drops(monkeypatch):
    """`norm(x.to(...))`: the host adds to x, which would not know of the pass."""
    model = vit(two_phase=True).eval()
    reads = [module for block in model.blocks for module in (block.norm1, block.norm2)]
    for norm in reads:
        norm.register_forward_pre_hook(lambda norm, args: args[0].to(torch.float32), prepend=True)
        norm.register_forward_pre_hook(lambda norm, args: args[0].double())
    with torch.no_grad():
        assert count_passes(model, torch.randn(1, 3, 16, 16, dtype=torch.float64), monkeypatch) == []


def test_opcheck():
    torch.manual_seed(0)
    sources = [torch.randn(2, 5, 12, requires_grad=True) for _ in range(3)]
    queries = [torch.randn(12, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(two_phase.blocks_op, (sources, queries, 1e-6, 0.5, "eager"))


def test_a_merge_equals_one_read_of_all_sources():
    torch.manual_seed(0)
    blocks, partials, queries = (
        [torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True) for _ in range(n)] for n in (4, 2, 2)
    )
    queries = [query.detach()[0, 0].requires_grad_() for query in queries]
    ahead = two_phase.attend_blocks(blocks, queries, eps=1e-6, scale=0.5, kernel="eager")
    found = [
        operator.depth_attention([partial], query, scale=0.5, earlier=(*known, len(blocks)))
        for partial, query, known in zip(partials, queries, ahead, strict=True)
    ]
    expected = [
        reference.depth_attention([*blocks, partial], query, scale=0.5)
        for partial, query in zip(partials, queries, strict=True)
    ]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [*blocks, *partials, *queries]
    upstream = torch.randn(2, 12, 5, dtype=torch.float64).transpose(1, 2)
    torch.testing.assert_close(
        torch.autograd.grad(sum((h * upstream).sum() for h in found), inputs),
        torch.autograd.grad(sum((h * upstream).sum() for h in expected), inputs),
        rtol=1e-11,
        atol=1e-11,
    )


@pytest.mark.parametrize("used", ["result", "weights"])
def test_a_merge_whose_result_or_weights_alone_have_a_gradient(used):
    torch.manual_seed(0)
    *blocks, partial = sources = [torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query = torch.randn(12, dtype=torch.float64, requires_grad=True)
    (known,) = two_phase.attend_blocks(blocks, [query], eps=1e-6, scale=0.5, kernel="eager")
    merged = operator.depth_attention([partial], query, scale=0.5, earlier=(*known, 2), return_weights=True)
    out, weights = reference.depth_attention(sources, query, scale=0.5, return_weights=True)
    found, wanted = (merged[0], out) if used == "result" else (merged[1], weights[-1:])
    inputs = [*sources, query]
    grads = (torch.autograd.grad(value.square().sum(), inputs) for value in (found, wanted))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_a_second_derivative_raises_instead_of_being_wrong():
    sources = [collect(torch.randn(2, 5, 12, requires_grad=True)) for _ in range(2)]
    query = torch.randn(12, requires_grad=True)
    ((mean, _),) = two_phase.attend_blocks(sources, [query], eps=1e-6, scale=0.5, kernel="eager")
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(mean.sum(), query, create_graph=True)
