"""The examples of README.md and docs/diffusers.md run, on tiny pipelines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import attnres_vision
import dit
from tests.dit.pipelines import make

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/diffusers.md"])
def test_the_fine_tuning_example_trains_depth_parameters_and_lora(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    code = next(block for block in blocks if "add_adapter" in block)
    assert "num_blocks" in code and "torch_dtype=torch.bfloat16" in code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diffusers.StableDiffusion3Pipeline, "from_pretrained", lambda *_, **__: make("sd3")[0])
    names: dict[str, Any] = {}
    exec(re.sub(r"(num_blocks\W+)8", r"\g<1>3", code), names)  # the tiny model has 6 sublayers
    transformer, optimizer = names["transformer"], names["optimizer"]
    trained = {key for key, value in transformer.named_parameters() if value.requires_grad}
    assert trained == {key for key, _ in transformer.named_parameters() if "lora_" in key or ".depth." in key}
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    assert {id(value) for value in transformer.parameters() if value.requires_grad} == held
    state = torch.load(tmp_path / "depth.pt")
    attnres_vision.load_attnres_state_dict(dit.convert(make("sd3")[0].transformer, transformer.attnres_config), state)


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
