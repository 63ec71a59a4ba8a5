"""Two-phase reads of models: values and gradients as when every reader reads all its sources itself."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.utils import _pytree as pytree

import attnres_vision
from attnres_vision.ops import two_phase
from attnres_vision.stream import two_phase as two_phase_module

KINDS = {
    "full": {"mode": "full"},
    "full-condition": {"mode": "full", "query": "condition"},
    "full-mean-form": {"mode": "full", "form": "mean", "scale": 0.5},
    "blocks-of-two": {"block_size": 2},
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
    config = config if "mode" in config else {"block_size": 3, **config}
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


@pytest.mark.parametrize(
    "config", [{"block_size": 4}, {"mode": "full"}, {"query": "block"}], ids=["4", "full", "block"]
)
@pytest.mark.parametrize("change", [leave_out, replace])
def test_readers_use_only_what_was_read_for_them(change, config):
    """Blocks of two layers: the first reader of a block is in layer 4, the third in layer 5."""
    one, two = (vit(two_phase=shared, **config) for shared in (False, True))
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


def test_a_cast_that_the_host_drops_knows_what_was_read(monkeypatch):
    """`norm(x.to(...))`: the host reads the cast and adds to x."""
    results = []
    for shared in (False, True):
        model = vit(two_phase=shared).eval()
        for norm in (norm for block in model.blocks for norm in (block.norm1, block.norm2)):
            norm.register_forward_pre_hook(lambda norm, args: args[0].to(torch.float32), prepend=True)
            norm.register_forward_pre_hook(lambda norm, args: args[0].double())
        images = torch.linspace(-1, 1, 3 * 16 * 16, dtype=torch.float64).view(1, 3, 16, 16)
        with torch.no_grad():
            results.append(model(images))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert count_passes(model, images, monkeypatch) == [6, 4]


def test_no_pass_for_other_sources_than_those_the_host_goes_on_with(monkeypatch):
    model = vit(two_phase=True).eval()
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    streams = []
    opened = model.blocks[1].norm2
    opened.register_forward_pre_hook(lambda norm, args: streams.append(args[0]), prepend=True)
    with torch.no_grad():
        model(images)
        moved = streams[0].permute(0, 2, 1)
        reader = opened.depth
        assert two_phase_module.can_begin(reader.group, streams[0])
        expected = reader(streams[0])
        monkeypatch.setattr(two_phase_module, "read_ahead", None)  # nobody would find what it leaves there
        torch.testing.assert_close(reader(moved), expected.permute(0, 2, 1), rtol=1e-12, atol=1e-12)


def test_pruned_readers_leave_their_group(monkeypatch):
    """Four layers stay, and the final reader: its group began in the last of them."""
    model = vit(mode="full", two_phase=True).eval()
    model.prune_intermediate_layers([3])
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        assert count_passes(model, images, monkeypatch) == [7]  # of readers 1 to 7; then only the final one is left


def test_intermediate_features_are_those_of_one_phase():
    """The final norm is called between the blocks, with a reader that the last group has read for once."""
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found, expected = (
        vit(mode="full", two_phase=shared).forward_intermediates(images, norm=True) for shared in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [{"mode": "full"}, {"block_size": 3}], ids=["full", "block"])
def test_training_keeps_no_more_hidden_states_than_one_phase(config):
    """The means are not among what backward keeps. A group's first norm keeps its input: that read is not lazy."""

    def kept(model: nn.Module) -> int:
        shape, seen, alive = (2, 5, 48), set(), []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape == shape:
                seen.add(tensor.untyped_storage().data_ptr())
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
        assert out.requires_grad
        return len(seen)

    groups = sum(bool(module.group) for module in vit(**config).modules() if hasattr(module, "group"))
    assert groups == 2
    assert kept(vit(two_phase=True, **config)) <= kept(vit(two_phase=False, **config)) + groups


def test_a_reader_that_is_called_out_of_turn_changes_nothing():
    """A probe in an open block: its sum is not what later readers will find."""
    results = []
    for probed in (False, True):
        model = vit(two_phase=True, block_size=4)
        if probed:
            reader = model.blocks[2].norm1.depth

            def probe(norm: nn.Module, args: tuple, reader: nn.Module = reader) -> None:
                reader(args[0])

            model.blocks[3].norm2.register_forward_pre_hook(probe, prepend=True)
        results.append(step(model, torch.linspace(-1, 1, 768, dtype=torch.float64).view(1, 3, 16, 16)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_function_mapped_over_the_tensors_of_a_stream_reaches_all_that_is_read():
    """As DDP, FSDP and users do with pytrees: here the samples are put in another order between two layers."""
    results = []
    for shared in (False, True):
        model = vit(mode="full", two_phase=shared)
        model.blocks[2].register_forward_hook(
            lambda block, args, out: pytree.tree_map_only(torch.Tensor, lambda t: t.flip(0), out)
        )
        torch.manual_seed(1)
        results.append(step(model, torch.randn(2, 3, 16, 16, dtype=torch.float64)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_checkpointing_keeps_nothing_alive_after_a_forward_pass_without_backward():
    """A group begins at the first norm of a checkpointed layer: its stream must not hold the graph it is in."""
    model = vit(two_phase=True, block_size=4)
    model.set_grad_checkpointing()
    kept: list[weakref.ref] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: kept.append(weakref.ref(out)))
    out = model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    assert out.requires_grad and len(kept) == 6
    del out
    gc.collect()
    assert [reference() for reference in kept] == [None] * 6
