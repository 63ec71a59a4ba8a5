"""record_depth_weights: the weights it reports are those that the model used."""

import contextlib

import pytest
import torch
from torch import Tensor

from attnres_vision import DepthAttention, DepthStream, readers, record_depth_weights
from tests.timm.tiny import attached_copy, images, randomise_depth, stock_model


def independent_weights(sources: tuple[Tensor, ...], query: Tensor, heads: int) -> Tensor:
    """(n, B, T, heads): softmax over the sources of each head's slice of q . v / rms(v)."""
    values = torch.stack(sources)
    keys = values / (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    products = (keys * query).split(values.shape[-1] // heads, dim=-1)
    scores = torch.stack([product.sum(-1) for product in products], dim=-1)
    return torch.exp(scores) / torch.exp(scores).sum(0)


def seen_sources(model: torch.nn.Module, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """What each reader was given in one forward pass."""
    seen: dict[str, tuple[Tensor, ...]] = {}
    with contextlib.ExitStack() as stack:
        for name, reader in readers(model).items():

            def hook(module: DepthAttention, args: tuple[DepthStream], name: str = name) -> None:
                seen[name] = args[0].channels_last().sources()

            handle = reader.register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        model(x)
    return seen


@pytest.mark.parametrize("heads", [1, 4], ids=["heads1", "heads4"])
@pytest.mark.parametrize("key", ["prenorm", "respost", "sam", "qwen3-classifier"])
def test_recorded_weights_equal_an_independent_softmax(key: str, heads: int) -> None:
    model = randomise_depth(attached_copy(stock_model(key, torch.float64), heads=heads))
    x = images(key, torch.float64)
    seen = seen_sources(model, x)
    with record_depth_weights(model, per_token=True) as record:
        model(x)
    means, per_head = record.mean(), record.mean(per_head=True)
    assert list(means) == [name for name, reader in readers(model).items() if reader.query is not None]
    for name, mean in means.items():
        expected = independent_weights(seen[name], readers(model)[name].query.detach(), heads)
        (token_weights,) = record.per_token[name]
        assert token_weights.shape == (*expected.shape[:-1], heads)
        assert torch.allclose(token_weights, expected, rtol=1e-10)
        assert torch.allclose(per_head[name], expected.flatten(1, -2).mean(1), rtol=1e-10)
        assert torch.allclose(mean, expected.flatten(1).mean(1), rtol=1e-10)
        assert torch.allclose(mean.sum(), torch.ones_like(mean.sum()))
        assert mean.std() > 1e-3  # random queries: not the uniform weights of the start


@pytest.mark.parametrize("config", [{}, {"query": "token", "rank": 3}, {"query": "condition"}], ids=str)
def test_weights_are_uniform_at_the_start(config: dict) -> None:
    model = attached_copy(stock_model("prenorm"), **config)
    with record_depth_weights(model) as record:
        model(images("prenorm"))
    for mean in record.mean().values():
        assert torch.allclose(mean, torch.full_like(mean, 1 / len(mean)))
    assert record.per_token == {}


def test_the_weights_explain_the_read() -> None:
    """n * sum_i a_i v_i with the recorded weights is what the reader hands to its norm."""
    model = randomise_depth(attached_copy(stock_model("prenorm", torch.float64), query="token"))
    x = images("prenorm", torch.float64)
    seen = seen_sources(model, x)
    reads: list[Tensor] = []
    handle = model.blocks[2].norm1.register_forward_pre_hook(lambda module, args: reads.append(args[0]))
    with record_depth_weights(model, per_token=True) as record:
        model(x)
    handle.remove()
    sources = seen["blocks.2.norm1"]
    weights = record.per_token["blocks.2.norm1"][0]
    explained = len(sources) * sum(a * v for a, v in zip(weights, sources, strict=True))
    assert torch.allclose(reads[0], explained, rtol=1e-10)


def test_several_forward_passes_are_averaged_by_their_tokens() -> None:
    model = randomise_depth(attached_copy(stock_model("prenorm", torch.float64).eval()))
    one, three = images("prenorm", torch.float64, batch=1), images("prenorm", torch.float64, batch=3)
    with record_depth_weights(model, per_token=True) as together:
        model(one)
        model(three)
    with record_depth_weights(model) as at_once:
        model(torch.cat([one, three]))
    for name, mean in together.mean().items():
        assert torch.allclose(mean, at_once.mean()[name])
        assert [weights.shape[1] for weights in together.per_token[name]] == [1, 3]


def test_sources_are_named() -> None:
    model = attached_copy(stock_model("prenorm"), block_size=3)
    with record_depth_weights(model) as record:
        model(images("prenorm"))
    names = record.source_names()
    assert names["blocks.0.norm2"] == ["embedding", "block 1 (open)"]
    assert names["blocks.1.norm1"] == ["embedding", "block 1 (open)"]
    assert names["blocks.1.norm2"] == ["embedding", "block 1"]  # opens block 2
    assert names["blocks.2.norm1"] == ["embedding", "block 1", "block 2 (open)"]
    assert names["norm"] == ["embedding", "block 1", "block 2", "block 3"]
    assert {name: len(mean) for name, mean in record.mean().items()} == {name: len(n) for name, n in names.items()}


def test_recording_changes_nothing_and_leaves_no_hook() -> None:
    model = randomise_depth(attached_copy(stock_model("prenorm")))
    x = images("prenorm")
    plain = model(x)
    with contextlib.suppress(KeyboardInterrupt), record_depth_weights(model) as record:
        recorded = model(x)
        recorded.sum().backward()
        raise KeyboardInterrupt  # the hooks go even so
    assert torch.equal(recorded, plain)
    assert not any(reader._forward_hooks for reader in readers(model).values())
    before = {name: mean.clone() for name, mean in record.mean().items()}
    model(images("prenorm"))
    assert all(torch.equal(mean, before[name]) for name, mean in record.mean().items())
    assert not any(mean.requires_grad for mean in before.values())
