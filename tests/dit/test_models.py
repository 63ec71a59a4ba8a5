"""dit.models: construction, configs, loading stock checkpoints, saving, errors."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import attnres_vision
import dit
from attnres_vision import AttnResConfig
from attnres_vision.attach.families import MODELS as LINES
from attnres_vision.attach.plan import _checked
from tests.dit.tiny import MODELS, inputs_for, randomise_queries, relative_error, stock_model

CONDITION = {"block_size": 2, "query": "condition", "rank": 2}
STOCK_CLASSES = sorted({class_name for class_name, _, _ in MODELS.values()})


def attnres_class(name: str) -> Any:
    return getattr(dit.models, f"AttnRes{MODELS[name][0]}")


@pytest.mark.parametrize("class_name", STOCK_CLASSES)
def test_there_is_a_class_for_every_host_class(class_name: str) -> None:
    cls, base = getattr(dit.models, f"AttnRes{class_name}"), getattr(diffusers, class_name)
    assert issubclass(cls, base) and cls.__module__ == "dit.models" and cls.__name__ == f"AttnRes{class_name}"
    assert cls.forward is base.forward
    ours = dict(inspect.signature(cls.__init__).parameters)
    assert ours.pop("attnres").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(inspect.signature(base.__init__).parameters)
    assert dit.models.ModelMixin is diffusers.ModelMixin


@pytest.mark.parametrize("name", MODELS)
def test_a_class_takes_its_base_class_arguments_and_attnres(name: str) -> None:
    model = attnres_class(name)(**MODELS[name][1], attnres=CONDITION)
    assert model.attnres_config == AttnResConfig(**CONDITION, condition=("timestep",))
    assert json.loads(model.to_json_string())["attnres"] == model.attnres_config.to_dict()
    assert dict(model.config)["attnres"] == model.attnres_config.to_dict()
    again = type(model).from_config(model.config)
    assert again.attnres_config == model.attnres_config and again.state_dict().keys() == model.state_dict().keys()
    stock = getattr(diffusers, MODELS[name][0])(**MODELS[name][1])
    assert type(model).from_config(stock.config, attnres={"mode": "full"}).attnres_config.mode == "full"
    public = {key for key in model.config if not key.startswith("_")}
    assert public == {key for key in stock.config if not key.startswith("_")} | {"attnres"}


def test_positional_arguments_are_the_base_class_ones() -> None:
    model = attnres_class("sd3")(8, 2, 4, 3, 8, 2, 8, 16, 8, 4, 8, attnres={"block_size": 2})
    assert model.config.sample_size == 8 and model.config.num_layers == 3 and len(model.transformer_blocks) == 3


# Loading stock checkpoints -------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"torch_dtype": torch.bfloat16},
    "device-map": {"device_map": "cpu"},
    "device-map-dict": {"device_map": {"": "cpu"}, "torch_dtype": torch.float16},
    "not-low-memory": {"low_cpu_mem_usage": False},
    "not-low-memory-bf16": {"low_cpu_mem_usage": False, "torch_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["sd35", "flux", "hunyuan-video", "cogvideox", "wan"])
def test_from_pretrained_of_a_stock_directory(name: str, way: str, sharded: bool, tmp_path: Path) -> None:
    stock = stock_model(name, torch.float32)
    stock.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    kwargs = WAYS[way]
    if name == "wan" and way.startswith("not-low"):
        pytest.skip("diffusers keeps Wan's norms in fp32, which needs low_cpu_mem_usage")
    model = attnres_class(name).from_pretrained(tmp_path, attnres=CONDITION, **kwargs)
    expected = type(stock).from_pretrained(tmp_path, **kwargs)
    assert type(model) is attnres_class(name) and not model.training
    depth = attnres_vision.attnres_state_dict(model)
    assert len(depth) > 10 and not any(parameter.is_meta for parameter in model.parameters())
    for key, value in depth.items():
        kept_in_fp32 = any(part in (model._keep_in_fp32_modules or []) for part in key.split("."))
        assert value.dtype == (torch.float32 if kept_in_fp32 else kwargs.get("torch_dtype", torch.float32)), key
        assert value.device == expected.device
        if key.endswith("query_down"):
            assert 0.5 < value.float().std() < 2 and torch.isfinite(value).all()
        else:
            assert not value.any()
    if "float16" not in str(kwargs.get("torch_dtype")):
        with torch.no_grad():
            got, wanted = (m(**inputs_for(name, torch.float32))[0] for m in (model, expected))
        assert relative_error(got, wanted) < 5e-6


def test_from_pretrained_says_nothing_of_the_depth_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are meant to be missing in a stock checkpoint."""
    stock_model("sd3", torch.float32).save_pretrained(tmp_path)
    diffusers.utils.logging.set_verbosity_warning()
    attnres_class("sd3").from_pretrained(tmp_path, attnres=CONDITION)
    assert "depth" not in caplog.text


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model = dit.convert(stock_model(name, torch.float32), {**CONDITION, "condition": ["timestep"]})
    randomise_queries(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == f"AttnRes{MODELS[name][0]}" and config["attnres"]["condition"] == ["timestep"]
    loaded = attnres_class(name).from_pretrained(tmp_path)
    assert loaded.attnres_config == model.attnres_config
    with torch.no_grad():
        inputs = inputs_for(name, torch.float32)
        assert torch.equal(loaded(**copy.deepcopy(inputs))[0], model(**inputs)[0])


@pytest.mark.parametrize("name", ["wan", "ltx", "sd35"])
def test_a_bf16_checkpoint_is_as_exact_as_with_the_stock_class(name: str, tmp_path: Path) -> None:
    """Wan keeps its norms in fp32, and their depth parameters with them."""
    stock_model(name, torch.float32).save_pretrained(tmp_path)
    base = getattr(diffusers, MODELS[name][0])
    with torch.no_grad():
        exact = base.from_pretrained(tmp_path)(**inputs_for(name, torch.float32))[0]
        errors = []
        for cls, extra in ((base, {}), (attnres_class(name), {"attnres": CONDITION})):
            model = cls.from_pretrained(tmp_path, torch_dtype=torch.bfloat16, **extra)
            output = model(**inputs_for(name, torch.bfloat16))[0]
            assert output.dtype == torch.bfloat16
            errors.append((output.float() - exact).norm() / exact.norm())
    assert errors[1] < 1.25 * errors[0] + 1e-3


def test_quantised_weights_leave_the_depth_parameters_alone(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    stock_model("sd35", torch.bfloat16).save_pretrained(tmp_path)
    config = diffusers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    options = {"quantization_config": config, "torch_dtype": torch.bfloat16}
    stock = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path, **options)
    model = attnres_class("sd35").from_pretrained(tmp_path, attnres=CONDITION, **options)
    assert type(model.transformer_blocks[0].ff.net[2].weight) is not nn.Parameter
    assert {value.dtype for value in attnres_vision.attnres_state_dict(model).values()} == {torch.bfloat16}
    with torch.no_grad():
        got, wanted = (each(**inputs_for("sd35", torch.bfloat16))[0].float() for each in (model, stock))
    assert (got - wanted).norm() < 2e-2 * wanted.norm()


def test_from_single_file_converts_what_the_base_class_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loading itself is diffusers' (and needs an original checkpoint of the model)."""
    seen = []

    def from_single_file(cls: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((cls.__name__, args, kwargs))
        return stock_model("sd3", torch.float32)

    monkeypatch.setattr(diffusers.SD3Transformer2DModel, "from_single_file", classmethod(from_single_file))
    model = attnres_class("sd3").from_single_file("sd3.safetensors", attnres=CONDITION, config="somewhere")
    assert seen == [("SD3Transformer2DModel", ("sd3.safetensors",), {"config": "somewhere"})]
    assert type(model) is attnres_class("sd3") and model.attnres_config.rank == 2


def test_a_static_checkpoint_into_a_condition_model_keeps_its_queries(tmp_path: Path) -> None:
    model = dit.convert(stock_model("sd3", torch.float32), {"block_size": 2})
    randomise_queries(model)
    model.save_pretrained(tmp_path)
    loaded = attnres_class("sd3").from_pretrained(tmp_path, attnres=CONDITION)
    key = "transformer_blocks.1.norm1.depth"
    assert torch.equal(loaded.state_dict()[f"{key}.query"], model.state_dict()[f"{key}.query"])
    assert not loaded.state_dict()[f"{key}.query_up"].any() and loaded.state_dict()[f"{key}.query_down"].any()
    with torch.no_grad():
        got, wanted = (m(**inputs_for("sd3", torch.float32))[0] for m in (loaded, model))
    assert relative_error(got, wanted) < 5e-6


def test_depth_parameters_alone_round_trip() -> None:
    model = dit.convert(stock_model("cogvideox"), CONDITION)
    randomise_queries(model)
    state = attnres_vision.attnres_state_dict(model)
    assert any(".depth_text." in key for key in state)
    other = dit.convert(stock_model("cogvideox"), CONDITION)
    attnres_vision.load_attnres_state_dict(other, state)
    with torch.no_grad():
        assert torch.equal(other(**inputs_for("cogvideox"))[0], model(**inputs_for("cogvideox"))[0])


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["sd3", "cogvideox", "flux"])
def test_copies_are_independent(name: str, copier: Any) -> None:
    model = dit.convert(
        stock_model(name), {"block_size": 2, "query": "condition", "condition": ["timestep", "other_stream"]}
    )
    randomise_queries(model)
    inputs = inputs_for(name)
    with torch.no_grad():
        expected = model(**inputs)[0]
        twin = copier(model)
        assert type(twin) is type(model)
        randomise_queries(model, seed=7)
        assert torch.equal(twin(**inputs)[0], expected)
        assert relative_error(model(**inputs)[0], expected) > 1e-3
        randomise_queries(twin, seed=7)
        assert torch.equal(twin(**inputs)[0], model(**inputs)[0])


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_model_outside_the_table_lists_what_is_supported() -> None:
    unknown = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, cross_attention_dim=16,
        caption_channels=8, sample_size=8, norm_num_groups=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="PixArtTransformer2DModel") as error:
        dit.convert(unknown)
    for class_name in STOCK_CLASSES:
        assert class_name in str(error.value)
    assert "VisionTransformer" not in str(error.value)
    assert "families.MODELS['diffusers.models.transformers.pixart" in str(error.value)
    assert type(unknown) is diffusers.PixArtTransformer2DModel


def test_a_line_adds_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error says: a line for the model class, and one for each block class."""
    from attnres_vision.attach.families import BLOCKS
    from attnres_vision.attach.families import MODELS as LINES
    from dit.families import DUAL, SINGLE, dit_family

    module = "diffusers.models.transformers.transformer_longcat_image.LongCatImage"
    monkeypatch.setitem(BLOCKS, f"{module}TransformerBlock", DUAL)
    monkeypatch.setitem(BLOCKS, f"{module}SingleTransformerBlock", SINGLE)
    line = dit_family("transformer_blocks", "single_transformer_blocks", timestep="time_embed.timestep_embedder")
    monkeypatch.setitem(LINES, f"{module}Transformer2DModel", line)
    _, config, inputs = MODELS["flux"]
    stock = diffusers.LongCatImageTransformer2DModel(**config).double().eval()
    given = {key: value for key, value in inputs(2, 4).items() if key != "pooled_projections"}
    with torch.no_grad():
        wanted = stock(**given).sample
        model = dit.convert(stock, CONDITION)
        assert type(model).__name__ == "AttnResLongCatImageTransformer2DModel"
        assert relative_error(model(**given).sample, wanted) < 1e-12
        randomise_queries(model)
        assert relative_error(pickle.loads(pickle.dumps(model))(**given).sample, wanted) > 1e-2


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "qwen-image",
            {"query": "condition", "condition": ["pooled_text"]},
            "'timestep', 'other_stream' for (AttnRes)?QwenImage",
        ),
        ("wan", {"query": "condition", "condition": ["other_stream"]}, "one or more of 'timestep' for (AttnRes)?Wan"),
        ("sd3", {"query": "condition", "condition": ["time"]}, "'pooled_text', 'other_stream'"),
        ("sd3", {"query": "condition", "condition": "timestep"}, "a sequence of different names"),
        ("sd3", {"query": "condition", "condition": ["timestep", "timestep"]}, "different names"),
        ("sd3", {"condition": ["timestep"]}, "None unless query is 'condition'"),
        ("sd3", {"num_blocks": 7}, "between 1 and 6 for this model"),
        ("flux", {"num_blocks": 8}, "between 1 and 7 for this model"),
        ("mochi", {"heads": 16}, "the width 12 of the text stream"),
        ("mochi", {"query": "token", "rank": 13}, "the width 12 of the text stream"),
    ],
)
def test_configs_that_do_not_fit(name: str, fields: dict[str, Any], message: str) -> None:
    stock = stock_model(name)
    fields = fields if "num_blocks" in fields else {"block_size": 2, **fields}
    with pytest.raises(ValueError, match=message):
        dit.convert(stock, fields)
    assert type(stock).__name__ == MODELS[name][0] and not attnres_vision.readers(stock)
    with pytest.raises(ValueError, match=message):
        attnres_class(name)(**MODELS[name][1], attnres=fields)


def test_the_default_condition_is_one_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the reader table need not name a timestep."""
    path = "diffusers.models.transformers.transformer_sd3.SD3Transformer2DModel"
    line = LINES[path]
    assert isinstance(line.condition, dict)
    pooled = {"pooled_text": line.condition["pooled_text"]}
    for condition, expected in ((line.condition, "timestep"), (pooled, "pooled_text"), ({}, "other_stream")):
        monkeypatch.setitem(LINES, path, dataclasses.replace(line, condition=condition))
        model = dit.convert(stock_model("sd3"), query="condition")
        assert model.attnres_config.condition == (expected,)
        assert model.config["attnres"] == model.attnres_config.to_dict()
        with torch.no_grad():
            wanted = stock_model("sd3")(**inputs_for("sd3"))[0]
            assert relative_error(model(**inputs_for("sd3"))[0], wanted) < 1e-12
            randomise_queries(model)
            assert relative_error(model(**inputs_for("sd3"))[0], wanted) > 1e-3
    monkeypatch.setitem(LINES, path, dataclasses.replace(line, condition={}, streams=line.streams[:1]))
    with pytest.raises(ValueError, match="got 'condition': the model has no condition"):
        _checked(stock_model("sd3"), LINES[path], AttnResConfig(query="condition"))


def test_other_errors() -> None:
    with pytest.raises(TypeError, match="model of diffusers"):
        dit.convert(nn.Linear(2, 2))
    model = dit.convert(stock_model("sd3"), {"block_size": 2})
    with pytest.raises(ValueError, match="has Attention Residuals already"):
        dit.convert(model)
    with pytest.raises(NotImplementedError, match=r"dit\.convert"):
        attnres_class("cogvideox").from_single_file("model.safetensors")
    with pytest.raises(TypeError, match="must be given a DepthStream"):
        block = model.transformer_blocks[1]
        block.norm2(torch.zeros(2, 16, 16, dtype=torch.float64))


def test_blocks_alone_have_no_condition() -> None:
    """A block that is run outside of the model cannot know the time; it must not run with a stale one."""
    model = dit.convert(stock_model("sd3"), {"block_size": 2, "query": "condition"})
    inputs = inputs_for("sd3")
    with torch.no_grad():
        model(**inputs)
        hidden = torch.zeros(2, 16, 16, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="Run the whole model"):
            model.transformer_blocks[0](hidden, hidden[:, :5], torch.zeros(2, 16, dtype=torch.float64))


def test_an_interrupted_forward_pass_leaves_no_condition_behind() -> None:
    model = dit.convert(stock_model("flux"), {"block_size": 2, "query": "condition"})
    randomise_queries(model)
    inputs, later = inputs_for("flux"), inputs_for("flux", seed=5)
    later["timestep"] = later["timestep"] * 0.1
    with torch.no_grad():
        expected = model(**later)[0]
        handle = model.context_embedder.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        assert torch.equal(model(**later)[0], expected)


def test_attach_works_on_diffusers_models() -> None:
    model = attnres_vision.attach(stock_model("sd3"), block_size=2)
    assert type(model) is attnres_class("sd3")
    assert list(attnres_vision.readers(model))[:3] == [
        "transformer_blocks.0.norm1 (image)",
        "transformer_blocks.0.norm2 (image)",
        "transformer_blocks.0.norm1_context (text)",
    ]
    assert list(attnres_vision.readers(model))[-1] == "norm_out (image)"


def test_a_subclass_of_an_attnres_class_stays_one_in_copies() -> None:
    model = Mine(**MODELS["sd3"][1])
    assert type(copy.deepcopy(model)) is Mine and type(pickle.loads(pickle.dumps(model))) is Mine


def test_a_foreign_class_of_the_same_name_does_not_take_a_name_in_dit_models() -> None:
    ours = dit.models.AttnResSD3Transformer2DModel
    same = type("SD3Transformer2DModel", (diffusers.SD3Transformer2DModel,), {"__module__": "my_package"})
    assert type(dit.convert(same(**MODELS["sd3"][1]))) is not ours
    assert dit.models.AttnResSD3Transformer2DModel is ours


class Mine(dit.models.AttnResSD3Transformer2DModel):
    """A user's."""
