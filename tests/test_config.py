"""AttnResConfig: what it accepts, what it means, and that every wrong value is named before a model is touched."""

import dataclasses
import json
import re

import pytest

from attnres_vision import AttnResConfig

INVALID = {
    "mode": ({"mode": "blocks"}, "mode must be one of 'block', 'full', got 'blocks'"),
    "mode-none": ({"mode": None}, "mode must be one of 'block', 'full', got None"),
    "mode-list": ({"mode": ["full"]}, "mode must be one of 'block', 'full', got ['full']"),
    "query": (
        {"query": "dynamic"},
        "query must be one of 'static', 'token', 'block', 'condition', got 'dynamic'",
    ),
    "form": ({"form": "average"}, "form must be one of 'sum', 'mean', got 'average'"),
    "num_blocks-zero": ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, or None, got 0"),
    "num_blocks-float": ({"num_blocks": 4.0}, "num_blocks must be an integer of at least 1, or None, got 4.0"),
    "num_blocks-bool": ({"num_blocks": True}, "num_blocks must be an integer of at least 1, or None, got True"),
    "block_size-negative": ({"block_size": -1}, "block_size must be an integer of at least 1, or None, got -1"),
    "block_size-string": ({"block_size": "2"}, "block_size must be an integer of at least 1, or None, got '2'"),
    "both": ({"num_blocks": 4, "block_size": 2}, "num_blocks must be None when block_size is given, got 4"),
    "both-with-the-default-value": (
        {"num_blocks": 8, "block_size": 2},
        "num_blocks must be None when block_size is given, got 8",
    ),
    "full-num_blocks": ({"mode": "full", "num_blocks": 8}, "num_blocks must be None when mode is 'full', got 8"),
    "full-block_size": ({"mode": "full", "block_size": 2}, "block_size must be None or 1 when mode is 'full', got 2"),
    "rank-zero": ({"query": "token", "rank": 0}, "rank must be an integer of at least 1, or None, got 0"),
    "rank-static": ({"rank": 8}, "rank must be None when query is 'static', got 8"),
    "heads-zero": ({"heads": 0}, "heads must be an integer of at least 1, got 0"),
    "heads-none": ({"heads": None}, "heads must be an integer of at least 1, got None"),
    "scale-zero": ({"scale": 0}, "scale must be a finite number other than 0, got 0"),
    "scale-nan": ({"scale": float("nan")}, "scale must be a finite number other than 0, got nan"),
    "scale-string": ({"scale": "auto"}, "scale must be a finite number other than 0, got 'auto'"),
    "key_eps-zero": ({"key_eps": 0.0}, "key_eps must be a finite number above 0, got 0.0"),
    "key_eps-infinite": ({"key_eps": float("inf")}, "key_eps must be a finite number above 0, got inf"),
}


@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize(
    "make", [lambda fields: AttnResConfig(**fields), AttnResConfig.from_dict], ids=["init", "dict"]
)
def test_an_invalid_value_is_named_with_what_is_allowed(case: str, make) -> None:
    fields, message = INVALID[case]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(fields)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("blocks", "num_blocks"),
        ("block_sizes", "block_size"),
        ("head", "heads"),
        ("eps", "key_eps"),
        ("Query", "query"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(key: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown AttnResConfig field '{key}'; did you mean '{nearest}'"):
        AttnResConfig.from_dict({key: 1})


def test_a_key_that_resembles_none_lists_all_names() -> None:
    with pytest.raises(ValueError, match=r"unknown AttnResConfig field 'zzz' \(valid: mode, num_blocks, .*two_phase\)"):
        AttnResConfig.from_dict({"zzz": 1})


@pytest.mark.parametrize("value", ["full", ["mode"], 3])
def test_fields_must_be_a_mapping(value: object) -> None:
    with pytest.raises(ValueError, match="must be a mapping"):
        AttnResConfig.from_dict(value)  # type: ignore[arg-type]


def test_config_and_fields_together_are_an_error() -> None:
    with pytest.raises(ValueError, match="give either config or fields"):
        AttnResConfig.resolve(AttnResConfig(), heads=2)


CONFIGS = {
    "default": AttnResConfig(),
    "full": AttnResConfig(mode="full"),
    "full-block_size-1": AttnResConfig(mode="full", block_size=1),
    "block_size": AttnResConfig(block_size=3),
    "everything": AttnResConfig(num_blocks=5, query="token", rank=16, heads=2, scale=0.125, form="mean", key_eps=1e-5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_survives_json(name: str) -> None:
    """It travels in config.json of the hub: only plain JSON, and equal after the way there and back."""
    config = CONFIGS[name]
    written = json.dumps(config.to_dict())
    assert AttnResConfig.from_dict(json.loads(written)) == config
    assert hash(AttnResConfig.from_dict(json.loads(written))) == hash(config)
    assert {type(value) for value in config.to_dict().values()} <= {str, int, float, type(None)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_can_be_changed_with_dataclasses_replace(name: str) -> None:
    assert dataclasses.replace(CONFIGS[name], key_eps=1e-4).key_eps == 1e-4


def test_a_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttnResConfig().heads = 2  # type: ignore[misc]


def test_full_is_block_size_one() -> None:
    assert AttnResConfig(mode="full").block_size == 1
    assert AttnResConfig(mode="full").sublayers_per_block(24) == 1


@pytest.mark.parametrize(
    ("fields", "sublayers", "size"),
    [
        ({}, 24, 3),
        ({}, 8, 1),
        ({}, 7, 1),  # unset is 8 or, in a smaller model, one block for each sublayer
        ({}, 1, 1),
        ({"num_blocks": None}, 2, 1),
        ({"num_blocks": 8}, 16, 2),
        ({"num_blocks": 5}, 24, 5),  # 5, 5, 5, 5 and a short last block of 4
        ({"num_blocks": 1}, 24, 24),
        ({"num_blocks": 24}, 24, 1),
        ({"block_size": 7}, 24, 7),
    ],
)
def test_sublayers_per_block(fields: dict, sublayers: int, size: int) -> None:
    assert AttnResConfig(**fields).sublayers_per_block(sublayers) == size


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
def test_more_than_the_models_sublayers_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be between 1 and 24 for this model .24 sublayers., got 25"):
        AttnResConfig(**{field: 25}).sublayers_per_block(24)


@pytest.mark.parametrize(("sublayers", "num_blocks"), [(1, 1), (7, 7), (8, 8), (9, 8), (24, 8)])
def test_an_unset_num_blocks_is_settled_by_the_model_and_a_given_one_stays(sublayers: int, num_blocks: int) -> None:
    assert AttnResConfig().for_sublayers(sublayers) == AttnResConfig(num_blocks=num_blocks)
    for given in (AttnResConfig(num_blocks=1), AttnResConfig(block_size=1), AttnResConfig(mode="full")):
        assert given.for_sublayers(sublayers) == given
    with pytest.raises(ValueError, match="num_blocks must be between 1 and 7"):
        AttnResConfig(num_blocks=8).for_sublayers(7)
