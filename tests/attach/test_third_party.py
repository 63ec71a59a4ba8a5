"""A package that nobody here has heard of brings its model family along, by an entry point (CONTRIBUTING.md)."""

import copy
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
import torch

import attnres_vision

MODELS = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.before_mixing, self.mixing = nn.LayerNorm(dim), nn.Linear(dim, dim)
            self.before_mlp, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, dim), nn.GELU())

        def forward(self, x):
            x = x + self.mixing(self.before_mixing(x).mean(1, keepdim=True)).expand(x.shape)
            return x + self.mlp(self.before_mlp(x))

    class MadeUpViT(nn.Module):
        def __init__(self, dim=12, depth=3):
            super().__init__()
            self.width = dim
            self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
            self.last_norm = nn.LayerNorm(dim)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last_norm(x)
"""
LINES = """
    from attnres_vision.attach.families import BLOCKS, MODELS, Family

    BLOCKS["made_up_vit.models.Layer"] = ("before_mixing", "before_mlp")
    MODELS["made_up_vit.models.MadeUpViT"] = Family(
        blocks="layers",
        exits=("last_norm",),
        pruned_exits=("last_norm",),
        width=lambda model, stream: model.width,
    )
"""
ENTRY_POINTS = """
    [attnres_vision.readers]
    made_up_vit = made_up_vit.attnres
"""


@pytest.fixture
def made_up_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package's models, as installed as pip installs it, with its reader lines in a module of their own."""
    files = {
        "made_up_vit/__init__.py": "",
        "made_up_vit/models.py": MODELS,
        "made_up_vit/attnres.py": LINES,
        "made_up_vit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: made-up-vit\nVersion: 1.0\n",
        "made_up_vit-1.0.dist-info/entry_points.txt": ENTRY_POINTS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("made_up_vit.models")
    for name in [name for name in sys.modules if name.startswith("made_up_vit")]:
        del sys.modules[name]
    for table in (attnres_vision.families.BLOCKS, attnres_vision.families.MODELS):
        for name in [name for name in table if name.startswith("made_up_vit")]:
            del table[name]
    attnres_vision.families._import_lines_of.cache_clear()  # the next test installs the package again


def test_attach_finds_the_reader_lines_of_an_installed_package(made_up_vit) -> None:
    stock = made_up_vit.MadeUpViT().double()
    assert "made_up_vit.attnres" not in sys.modules  # nobody has imported the lines
    model = attnres_vision.attach(copy.deepcopy(stock), mode="full")
    tokens = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(model(tokens), stock(tokens), rtol=1e-12, atol=1e-12)
    assert list(attnres_vision.readers(model)) == [
        *(f"layers.{index}.{norm}" for index in range(3) for norm in ("before_mixing", "before_mlp")),
        "last_norm",
    ]
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            torch.nn.init.normal_(parameter)
    assert not torch.allclose(model(tokens), stock(tokens), rtol=1e-3)
    assert type(attnres_vision.detach(model)) is made_up_vit.MadeUpViT


def test_the_lines_of_a_package_count_for_its_subclass_of_a_known_model(made_up_vit, monkeypatch) -> None:
    """timm's own line would fit it too."""

    class Wide(timm.models.vision_transformer.VisionTransformer):
        pass

    monkeypatch.setattr(Wide, "__module__", "made_up_vit.models")
    model = Wide(img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2)
    attnres_vision.attach(model, num_blocks=2)
    assert "made_up_vit.attnres" in sys.modules


def test_attaching_a_diffusers_model_imports_dit_and_a_timm_model_does_not() -> None:
    """In processes of their own: here everything is imported already."""
    program = textwrap.dedent(
        """
        import sys, attnres_vision
        assert "dit" not in sys.modules and "diffusers" not in sys.modules
        import timm
        vit = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=12, num_heads=2)
        attnres_vision.attach(vit, num_blocks=2)
        assert "dit" not in sys.modules and "diffusers" not in sys.modules
        from diffusers import SD3Transformer2DModel
        model = SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2,
            joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8, out_channels=4,
            pos_embed_max_size=8,
        )
        attnres_vision.attach(model, num_blocks=2)
        assert type(model).__name__ == "AttnResSD3Transformer2DModel" and "dit" in sys.modules
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
