"""timm's feature APIs on AttnRes models: forward_intermediates, features_only, pruning.

At zero queries everything equals stock timm. With random queries an intermediate (`norm=False`) is what the next
reader reads, which a hook on that reader shows, and the last one equals forward_features.
"""

import copy
import inspect
from typing import Any

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import attnres_vision
from attnres_vision.attach.host import AttnResHost
from tests.compat.models import DEPTH, MODELS, WIDTH, attached, converted, host_of, images, randomise

INDICES = [None, 2, [1, 3], [3, 0], [0, -1], [2, 2], (1,)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": True},
    {"stop_early": True},
    {"output_fmt": "NLC"},
    {"intermediates_only": True, "stop_early": True},
    {"return_prefix_tokens": True},
    {"return_prefix_tokens": True, "output_fmt": "NLC", "norm": True, "intermediates_only": True},
    {"output_dict": True},
    {"output_dict": True, "return_prefix_tokens": True, "intermediates_only": True},
]
# Which reader reads the finished stream; "norm" where nothing else is said.
FINAL = {
    "sam": "neck.0",
    "cait": "blocks_token_only.0",
    "xcit": "cls_attn_blocks.0",
    "deepseek-classifier": "encoder.norm",
    "qwen3-encoder": "blocks.3",
    "qwen3-classifier": "encoder.blocks.3",
}


def options_of(model: nn.Module, name: str) -> list[dict[str, Any]]:
    """Those of OPTIONS that timm's forward_intermediates of this model has."""
    method = next(
        vars(cls)["forward_intermediates"]
        for cls in type(model).__mro__
        if "forward_intermediates" in vars(cls) and not issubclass(cls, AttnResHost)
    )
    known = inspect.signature(method).parameters.keys()
    only_nchw = name in ("sam",)
    return [o for o in OPTIONS if o.keys() <= known and not (only_nchw and o.get("output_fmt") == "NLC")]


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def positions(indices: Any) -> list[int]:
    """The blocks that `indices` means, as timm documents it: None all, an int the last n, else these."""
    if indices is None:
        return list(range(DEPTH))
    return list(range(DEPTH - indices, DEPTH)) if isinstance(indices, int) else sorted({i % DEPTH for i in indices})


def reads_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What every reader hands to its module in a forward pass, by path: caught by hooks on the readers."""
    caught: dict[str, Tensor] = {}
    handles = [
        reader.register_forward_hook(lambda _, args, output, path=path: caught.update({path: output}))
        for path, reader in attnres_vision.readers(model).items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return caught


def next_reads(model: nn.Module, name: str, x: Tensor) -> list[Tensor]:
    """For every block what the reader after it reads."""
    reads = reads_of(model, x)
    prefix = "encoder." if hasattr(model, "encoder") else ""
    heads = [f"{prefix}blocks.{index}." for index in range(1, DEPTH)]
    firsts = [next(path for path in attnres_vision.readers(model) if path.startswith(head)) for head in heads]
    return [reads[path] for path in [*firsts, FINAL.get(name, "norm")]]


def as_map(read: Tensor, like: Tensor) -> Tensor:
    """A read, (B, prefix + H * W, D) or (B, H, W, D) or (B, D, H, W), as the NCHW map of its patches."""
    if read.ndim == 3:
        return read[:, -like.shape[2] * like.shape[3] :].transpose(1, 2).reshape(like.shape)
    return read if read.shape[1] == WIDTH else read.permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_at_zero_queries_every_option_gives_what_stock_gives(name: str) -> None:
    model, ours = converted(name)
    x = images()
    for options in options_of(ours, name):
        for indices in INDICES:
            expected = model.forward_intermediates(x, indices, **options)
            got = ours.forward_intermediates(x, indices, **options)
            assert pytree.tree_structure(got) == pytree.tree_structure(expected), (indices, options)
            for a, b in zip(tensors(got), tensors(expected), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{indices} {options}")


@pytest.mark.parametrize("config", [{"block_size": 3}, {"mode": "full"}], ids=["block", "full"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_intermediate_is_what_the_next_reader_reads(name: str, config: dict) -> None:
    model = attached(name, config)
    x = images()
    final, taken = model.forward_intermediates(x, norm=False)
    for got, read in zip(taken, next_reads(model, name, x), strict=True):
        assert type(got) is Tensor and got.shape == (2, WIDTH, 4, 4)
        torch.testing.assert_close(got, as_map(read, got), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, model.forward_features(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_option_disturbs_the_stream(name: str) -> None:
    """Each option set gives the same maps, and the same final features, as any other (short of `norm`)."""
    model = attached(name)
    x = images()
    features = model.forward_features(x)
    maps = {norm: model.forward_intermediates(x, norm=norm, intermediates_only=True) for norm in (False, True)}
    for options in options_of(model, name):
        for indices in INDICES:
            result = model.forward_intermediates(x, indices, **options)
            if options.get("output_dict"):
                final, taken = result.get("image_features"), result["image_intermediates"]
            else:
                final, taken = (None, result) if options.get("intermediates_only") else result
            if final is not None and not options.get("stop_early"):
                torch.testing.assert_close(final, features, rtol=1e-5, atol=1e-6)
            for position, got in zip(positions(indices), taken, strict=True):
                want = maps[options.get("norm", False)][position]
                want = want.flatten(2).transpose(1, 2) if options.get("output_fmt") == "NLC" else want
                got = got[0] if isinstance(got, tuple) else got
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_prefix_tokens_are_those_that_the_next_reader_reads() -> None:
    model = attached("vit")  # a class token and two registers
    read = reads_of(model, images())["blocks.2.norm1"]
    patches, prefix = model.forward_intermediates(images(), [1], return_prefix_tokens=True)[1][0]
    torch.testing.assert_close(prefix, read[:, :3])
    torch.testing.assert_close(patches.flatten(2).transpose(1, 2), read[:, 3:])


@pytest.mark.parametrize("query", ["static", "token", "block", "condition"])
@torch.no_grad()
def test_intermediates_of_every_query_kind(query: str) -> None:
    rank = {} if query == "static" else {"rank": 4}
    model = attached("eva", {"block_size": 3, "query": query, **rank}, std=1.0)
    final, taken = model.forward_intermediates(images(), norm=False)
    for got, read in zip(taken, next_reads(model, "eva", images()), strict=True):
        torch.testing.assert_close(got, as_map(read, got))
    torch.testing.assert_close(final, model.forward_features(images()))


@torch.no_grad()
def test_get_intermediate_layers_equals_forward_intermediates() -> None:
    model = attached("vit")
    taken = model.forward_intermediates(images(), [1, 3], output_fmt="NLC", return_prefix_tokens=True)[1]
    layers = model.get_intermediate_layers(images(), [1, 3], return_prefix_tokens=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors(taken), tensors(layers), strict=True))
    maps = model.get_intermediate_layers(images(), 2, reshape=True, norm=True)
    normed = model.forward_intermediates(images(), 2, norm=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(maps, normed, strict=True))


@torch.no_grad()
def test_an_attention_mask_reaches_the_blocks() -> None:
    model = attached("vit")
    mask = torch.zeros(19, 19)
    mask[:, 10:] = float("-inf")
    final, taken = model.forward_intermediates(images(), attn_mask=mask)
    torch.testing.assert_close(final, model.forward_features(images(), attn_mask=mask))
    assert not torch.allclose(final, model.forward_features(images()))
    causal = model.forward_intermediates(images(), is_causal=True, intermediates_only=True)
    assert not torch.allclose(causal[0], taken[0])


@torch.no_grad()
def test_xcit_norm_reads_with_the_reader_of_the_class_attention() -> None:
    """Its norm gets the stream from forward_intermediates(norm=True) only: it has no parameters of its own."""
    model = attached("xcit")
    raw, normed = (
        model.forward_intermediates(images(), [3], norm=norm, intermediates_only=True)[0] for norm in (False, True)
    )
    torch.testing.assert_close(normed, model.norm(raw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    assert "norm" not in attnres_vision.readers(model)
    twin = copy.deepcopy(model)
    model.cls_attn_blocks[0].depth.query.add_(1.0)
    assert torch.equal(twin.forward_intermediates(images(), [3], norm=True)[1][0], normed)
    twin.cls_attn_blocks[0].depth.query.zero_()
    assert not torch.allclose(twin.forward_intermediates(images(), [3], norm=True)[1][0], normed)
    attnres_vision.detach(attnres_vision.attach(attnres_vision.detach(randomise(twin, 0.0))))
    assert not hasattr(twin.norm, "depth") and not twin.norm._forward_pre_hooks


# Pruning and features_only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prune_norm", [False, True], ids=["keep_norm", "prune_norm"])
@pytest.mark.parametrize("indices", [[0, 2], [1], 1], ids=["to_block_2", "to_block_1", "all"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_pruned_model_gives_the_features_of_the_full_one(name: str, indices: Any, prune_norm: bool) -> None:
    model = attached(name)
    expected = model.forward_intermediates(images(), indices, intermediates_only=True)
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers(indices, prune_norm=prune_norm)
    kept = positions(indices)
    assert len(host_of(pruned).blocks) == kept[-1] + 1
    for model in (pruned, copy.deepcopy(pruned)):
        features, taken = model.forward_intermediates(images(), kept)
        for got, want in zip(taken, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.forward_features(images()), features)
        assert type(features) is Tensor and features.isfinite().all()


@pytest.mark.parametrize("name", ["vit", "eva", "beit", "relpos", "mixer", "qwen3-encoder"])
def test_a_pruned_model_trains_all_its_parameters(name: str) -> None:
    model = attached(name).train()
    model.prune_intermediate_layers([1], prune_norm=True)
    model.forward_features(images()).square().sum().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None and "fc_norm" not in n and "head" not in n]
    assert unused == []


@pytest.mark.parametrize("name", ["vit", "beit", "mixer", "sam", "qwen3-encoder", "cait", "xcit"])
@torch.no_grad()
def test_at_zero_queries_a_pruned_model_is_the_pruned_stock_model(name: str) -> None:
    pair = converted(name)
    for model in pair:
        model.prune_intermediate_layers([0, 2], prune_norm=True)
    expected, got = (model.forward_features(images()) for model in pair)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


SMALL = {
    "attnres_vit_tiny_patch16_224": {"img_size": 32},
    "attnres_eva02_tiny_patch14_224": {"img_size": 28},
    "attnres_naflexvit_base_patch16_gap": {"embed_dim": 48, "num_heads": 3},
    "attnres_beit_base_patch16_224": {"img_size": 32, "embed_dim": 48, "num_heads": 3},
    "attnres_mixer_s32_224": {"img_size": 64},
}


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_features_only_equals_the_full_model(name: str) -> None:
    """`create_model(features_only=True)` cuts off the blocks behind the last index; its features stay the same."""
    kwargs = {"attnres": {"num_blocks": 3}, **SMALL[name]}
    full = randomise(timm.create_model(name, **kwargs).eval())
    depth = len(full.blocks)
    extractor = timm.create_model(name, features_only=True, out_indices=[1, -4], **kwargs).eval()
    assert len(extractor.model.blocks) == depth - 3
    state = full.state_dict()
    # The norm was cut off; the reader that stands in its place is that of the next block.
    state["norm.depth.query"] = state[f"blocks.{depth - 3}.norm1.depth.query"]
    extractor.model.load_state_dict({key: state[key] for key in extractor.model.state_dict()})
    size = kwargs.get("img_size", 32)
    got = extractor(images(size=size))
    expected = full.forward_intermediates(images(size=size), [1, depth - 4], intermediates_only=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert extractor.feature_info.channels() == [full.embed_dim] * 2
    assert [size // reduction for reduction in extractor.feature_info.reduction()] == [t.shape[-1] for t in got]
    assert extractor.feature_info.module_name() == ["blocks.1", f"blocks.{depth - 4}"]


@pytest.mark.parametrize("norm", [False, True], ids=["raw", "normed"])
@pytest.mark.parametrize("name", ["vit", "eva", "beit", "mixer", "qwen3-encoder"])
@torch.no_grad()
def test_feature_getter_equals_the_full_model(name: str, norm: bool) -> None:
    model = attached(name)
    expected = model.forward_intermediates(images(), [0, 2], norm=norm, intermediates_only=True)
    getter = FeatureGetterNet(copy.deepcopy(model), out_indices=[0, 2], norm=norm)
    for a, b in zip(getter(images()), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_feature_extraction_by_hooks_and_fx_fails_loudly() -> None:
    """What a block returns is a stream: whoever computes with it gets an error that says what to do."""
    kwargs = {"img_size": 32, "features_only": True, "out_indices": [1, 3]}
    hooked = timm.create_model("attnres_vit_tiny_patch16_224", feature_cls="hook", **kwargs).eval()
    with pytest.raises(TypeError, match=r"stream.total\(\)"):
        torch.stack(hooked(images()))
    with pytest.raises(TypeError, match="must be given a DepthStream"):
        timm.create_model("attnres_vit_tiny_patch16_224", feature_cls="fx", **kwargs)
