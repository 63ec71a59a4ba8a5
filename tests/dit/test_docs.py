"""The examples of README.md and of docs/ run as they are written, on small checkpoints in the hub's place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import timm
import torch
from torch import nn

import attnres_vision
import dit
from attnres_vision import families
from attnres_vision.ops import reference
from tests.dit.pipelines import make
from tests.dit.tiny import MODELS

ROOT = Path(__file__).parents[2]


DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


class I3d(nn.Module):
    """What a TorchScript file of features takes and gives."""

    def forward(self, clips: torch.Tensor, rescale: bool, resize: bool, return_features: bool) -> torch.Tensor:
        return clips.mean((3, 4)).flatten(1)


def given(document: str, folder: Path) -> dict[str, Any]:
    """What a document's text says is there, and the files that it names."""
    torch.manual_seed(0)
    if document == "README.md":
        sources = {name: torch.randn(2, 5, 8) for name in ("v0", "v1", "v2", "partial", "delta")}
        return {**sources, "query": torch.randn(8), "layer_norm": nn.LayerNorm(8)}
    if document == "docs/video.md":
        pytest.importorskip("torchmetrics")
        torch.jit.script(I3d()).save(folder / "i3d_torchscript.pt")
        return {"folder": folder, "real": torch.rand(4, 3, 8, 24, 24) * 2 - 1}
    return {}


@pytest.fixture
def tables() -> Iterator[None]:
    """The tables of model families, to which the documents add."""
    before = [(table, dict(table)) for table in (families.BLOCKS, families.MODELS)]
    yield
    for table, known in before:
        table.clear()
        table.update(known)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small local checkpoints in the hub's place: what it would download is the one thing that is replaced."""
    pipe = make("sd3")[0]
    # as many layers as it takes for the documents' eight blocks
    pipe.transformer = diffusers.SD3Transformer2DModel(**{**MODELS["sd35"][1], "num_layers": 4})
    pipe.save_pretrained(tmp_path / "hub")
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", lambda *_, **__: str(tmp_path / "hub"))

    def weights(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return timm.create_model("vit_small_patch16_224").state_dict()

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", weights)


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if blocks(document)])
def test_every_example_of_a_document_runs_as_it_is_written(
    document: str, hub: None, tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the text, each going on where the one before ended."""
    monkeypatch.chdir(tmp_path)
    names = given(document, tmp_path)
    for number, code in enumerate(blocks(document), start=1):
        exec(compile(code, f"{document}, block {number}", "exec"), names)
        if "add_adapter" in code:
            check_fine_tuning(names, tmp_path)
    if document == "README.md":
        sources = [names[name] for name in ("v0", "v1", "v2")]
        expected = reference.depth_attention(sources, names["query"], heads=4, form="mean", return_weights=True)
        torch.testing.assert_close((names["h"], names["weights"]), expected)
        assert names["y"].shape == names["partial"].shape


def check_fine_tuning(names: dict[str, Any], folder: Path) -> None:
    """What trains are the depth parameters and the adapters; the file holds the former."""
    transformer, optimizer = names["transformer"], names["optimizer"]
    assert transformer.dtype == torch.bfloat16
    trained = {key for key, value in transformer.named_parameters() if value.requires_grad}
    assert trained == {key for key, _ in transformer.named_parameters() if "lora_" in key or ".depth." in key}
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    assert {id(value) for value in transformer.parameters() if value.requires_grad} == held
    state = torch.load(folder / "depth.pt")
    stock = diffusers.SD3Transformer2DModel.from_pretrained(folder / "hub" / "transformer")
    attnres_vision.load_attnres_state_dict(dit.convert(stock, transformer.attnres_config), state)


def test_the_file_of_the_readme_has_a_few_hundred_kilobytes() -> None:
    """Stable Diffusion 3.5 medium, in bf16."""
    with torch.device("meta"):
        stock = diffusers.SD3Transformer2DModel(
            num_layers=24, attention_head_dim=64, num_attention_heads=24, caption_projection_dim=1536,
            dual_attention_layers=tuple(range(13)), qk_norm="rms_norm", pos_embed_max_size=384,
        )  # fmt: skip
    model: nn.Module = dit.convert(stock.to(torch.bfloat16), {"num_blocks": 8})
    size = sum(value.numel() * value.element_size() for value in attnres_vision.attnres_state_dict(model).values())
    assert 200_000 < size < 400_000
