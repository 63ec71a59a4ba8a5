"""Depth parameters as a state of their own, and names that leave stock checkpoints loadable."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnres_vision import attnres_state_dict, load_attnres_state_dict, readers
from tests.timm.tiny import MODELS, attached_copy, images, randomise_depth, stock_model

CONFIGS = {"static": {}, "token": {"query": "token"}, "block-rank3": {"query": "block", "rank": 3}}


@pytest.mark.parametrize("key", MODELS)
def test_stock_keys_and_values_do_not_change(key: str) -> None:
    """attach only adds `<module>.depth.*`, so a stock checkpoint loads and nothing but depth keys is missing."""
    stock = stock_model(key)
    attached = attached_copy(stock, query="token", rank=3)
    before, after = stock.state_dict(), attached.state_dict()
    added = [name for name in after if name not in before]
    assert [name for name in after if name in before] == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert added and all(name.split(".")[-2] == "depth" for name in added)
    assert list(attnres_state_dict(attached)) == added
    assert next(iter(readers(attached))) + ".depth.query" not in added  # the first reader sees one source: no query


def test_a_stock_checkpoint_loads_into_an_attached_model() -> None:
    stock, other = stock_model("prenorm").eval(), stock_model("prenorm")
    attached = attached_copy(other).eval()
    result = attached.load_state_dict(stock.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert result.missing_keys == list(attnres_state_dict(attached))
    x = images("prenorm")
    assert torch.allclose(attached(x), stock(x), atol=1e-5)


def test_an_attached_checkpoint_loads_into_a_stock_model_only_knowingly() -> None:
    """Dropping the queries changes the function, so a strict load names them."""
    stock = stock_model("prenorm")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.0\.norm2\.depth\.query"):
        stock.load_state_dict(attached_copy(stock).state_dict())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("key", ["prenorm", "parallel-things", "qwen3-classifier", "sam"])
def test_depth_parameters_alone_carry_the_function(key: str, kind: str, tmp_path: Path) -> None:
    """Like a LoRA: stock weights from one file, depth parameters from another."""
    stock = stock_model(key).eval()
    trained = randomise_depth(attached_copy(stock, **CONFIGS[kind]))
    torch.save(attnres_state_dict(trained), tmp_path / "depth.pt")
    fresh = attached_copy(stock, **CONFIGS[kind])
    x = images(key)
    assert not torch.allclose(fresh(x), trained(x), atol=1e-2)
    load_attnres_state_dict(fresh, torch.load(tmp_path / "depth.pt", weights_only=True))
    assert torch.equal(fresh(x), trained(x))


def test_the_full_state_dict_carries_the_function() -> None:
    trained = randomise_depth(attached_copy(stock_model("prenorm").eval(), query="token", rank=3))
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    fresh = attached_copy(stock_model("prenorm").eval(), query="token", rank=3)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    x = images("prenorm")
    assert torch.equal(fresh(x), trained(x))


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("blocks.3.norm2", "blocks.7.norm2"): value for name, value in state.items()}


PROBLEMS = {
    "missing": (lambda state: dict(list(state.items())[1:]), "missing blocks.0.norm2.depth.query"),
    "unexpected": (lambda state: state | {"head.weight": torch.zeros(7, 48)}, "unexpected head.weight"),
    "renamed": (rename, "missing blocks.3.norm2.depth.query; unexpected blocks.7.norm2.depth.query"),
    "another-width": (
        lambda state: state | {"norm.depth.query": torch.zeros(64)},
        r"norm.depth.query is \(64,\), expected \(48,\)",
    ),
    "empty": (lambda state: {}, r"missing blocks.0.norm2.depth.query; .*; and 3 more"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_state_that_does_not_fit_is_named_and_nothing_is_loaded(case: str) -> None:
    change, message = PROBLEMS[case]
    attached = attached_copy(stock_model("prenorm"))
    state = change(attnres_state_dict(randomise_depth(copy.deepcopy(attached))))
    with pytest.raises(ValueError, match="exactly the depth parameters of this model: .*" + message):
        load_attnres_state_dict(attached, state)
    assert not any(value.any() for value in attnres_state_dict(attached).values())


def test_a_state_of_another_query_kind_does_not_fit() -> None:
    state = attnres_state_dict(attached_copy(stock_model("prenorm"), query="token"))
    with pytest.raises(ValueError, match=r"unexpected blocks\.0\.norm2\.depth\.query_proj"):
        load_attnres_state_dict(attached_copy(stock_model("prenorm")), state)


def test_loading_into_a_stock_model() -> None:
    state = attnres_state_dict(attached_copy(stock_model("prenorm")))
    with pytest.raises(ValueError, match=r"unexpected blocks\.0\.norm2\.depth\.query"):
        load_attnres_state_dict(stock_model("prenorm"), state)


# Readers -------------------------------------------------------------------------------------------------------------

DEPTH_ORDER = {
    "prenorm": ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "...", "blocks.3.norm2", "norm"],
    "respost": ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "...", "blocks.3.mlp", "norm"],
    "xcit": ["blocks.0.norm1", "blocks.0.norm3", "blocks.0.norm2", "...", "blocks.3.norm2", "cls_attn_blocks.0"],
    "cait": ["blocks.0.norm1", "...", "blocks.3.norm2", "blocks_token_only.0", "blocks_token_only.1", "norm"],
    "sam": ["blocks.0.norm1", "...", "neck.0"],
    "qwen3-classifier": ["encoder.blocks.0.norm1", "...", "encoder.blocks.3.norm2", "encoder.blocks.3"],
}


@pytest.mark.parametrize("key", DEPTH_ORDER)
def test_readers_come_in_depth_order_by_the_module_they_sit_on(key: str) -> None:
    expected = DEPTH_ORDER[key]
    names = list(readers(attached_copy(stock_model(key))))
    gap = expected.index("...")
    assert names[:gap] == expected[:gap]
    assert names[len(names) - len(expected) + gap + 1 :] == expected[gap + 1 :]


def test_a_reader_knows_its_name_and_where_blocks_begin() -> None:
    found = readers(attached_copy(stock_model("prenorm"), block_size=3))
    assert [reader.name for reader in found.values()] == list(found)
    opening = [name for name, reader in found.items() if reader.opens_block]
    assert opening == ["blocks.0.norm1", "blocks.1.norm2", "blocks.3.norm1", "norm"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_depth_parameters_have_the_dtype_device_and_mode_of_the_model(dtype: torch.dtype) -> None:
    stock = stock_model("prenorm", dtype).eval()
    attached = attached_copy(stock, query="token")
    assert {parameter.dtype for parameter in attnres_state_dict(attached).values()} == {dtype}
    assert not any(module.training for module in attached.modules())
