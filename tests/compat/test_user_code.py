"""What users do to the residual stream with hooks and modules of their own: right, or an error with the way out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import attnres_vision
from tests.compat.models import attached, converted, images, stock

Patches = dict[str, Tensor]


def naflex_batch(padding: int) -> Patches:
    """Two images of 3 x 4 patches, followed by `padding` patches of noise that are marked as not valid."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).reshape(12, 2)
    patches, noise = (torch.randn(2, n, 8 * 8 * 3, generator=generator) for n in (12, padding))
    return {
        "patches": torch.cat([patches, 9 * noise], 1),
        "patch_coord": torch.cat([grid, torch.zeros(padding, 2, dtype=grid.dtype)]).expand(2, -1, -1),
        "patch_valid": (torch.arange(12 + padding) < 12).expand(2, -1),
    }


@pytest.mark.parametrize("query", ["static", "token", "block"])
@pytest.mark.parametrize("name", ["naflex", "naflex-rope"])
@torch.no_grad()
def test_naflex_padding_changes_nothing(name: str, query: str) -> None:
    model = attached(name, {"block_size": 3, "query": query})
    expected = model(naflex_batch(0))
    assert not torch.allclose(expected, stock(name)(naflex_batch(0)))
    torch.testing.assert_close(model(naflex_batch(5)), expected, rtol=1e-4, atol=1e-5)


TOKEN_HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "drop": lambda x: x[:, ::2],
    "reorder": lambda x: x[torch.arange(2)[:, None], torch.arange(18, -1, -1)],
    "append": lambda x: torch.cat([x, torch.ones(2, 3, 32)], dim=1),
    "add": lambda x: x + torch.linspace(-1, 1, 32).expand(2, 19, 32),
    "view": lambda x: x.reshape(2, 19, 1, 32)[:, :, 0],
}


@pytest.mark.parametrize("hook", TOKEN_HOOKS)
@torch.no_grad()
def test_token_operations_between_blocks_act_on_the_residual_stream(hook: str) -> None:
    """Dropping, merging, prompting and adapting tokens: at zero queries as in the stock model."""
    models = converted("vit")
    for model in models:
        model.blocks[2].register_forward_pre_hook(lambda block, args: (TOKEN_HOOKS[hook](args[0]), *args[1:]))
    expected, got = (model.forward_features(images()) for model in models)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    same = torch.allclose(got[:, 0], stock("vit").forward_features(images())[:, 0])
    assert same == (hook == "view")  # the hook did something


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: x * 0.5,
    "subtract": lambda x: x - torch.ones(2, 19, 32),
    "einsum": lambda x: torch.einsum("ij,bjd->bid", torch.eye(19), x),
    "cut the width": lambda x: x[..., :16],
    "norm": lambda x: torch.nn.functional.layer_norm(x, (32,)),
    "detach": lambda x: x.detach(),
    "mean": lambda x: x.mean(1, keepdim=True),
    "where": lambda x: torch.where(torch.ones(2, 19, 1, dtype=torch.bool), x, torch.zeros(2, 19, 32)),
    "add a number": lambda x: x + 1,
    "add two streams": lambda x: x + x,
}


@pytest.mark.parametrize("hook", REFUSED)
@torch.no_grad()
def test_other_operations_are_refused(hook: str) -> None:
    model = attached("vit")
    model.blocks[2].register_forward_pre_hook(lambda block, args: (REFUSED[hook](args[0]), *args[1:]))
    with pytest.raises((TypeError, AttributeError), match=r"stream\.total\(\)"):
        model(images())


@torch.no_grad()
def test_hooks_on_norms_and_sublayers_see_tensors() -> None:
    """Probing tools hook norms, attention and MLPs: what these give out are tensors, as in timm."""
    model, seen = attached("vit"), {}
    for name in ("norm1", "attn", "ls1", "norm2", "mlp"):
        module = model.blocks[1].get_submodule(name)
        module.register_forward_hook(lambda m, args, output, name=name: seen.update({name: type(output)}))
    model(images())
    assert set(seen.values()) == {Tensor} and len(seen) == 5


@torch.no_grad()
def test_a_parametrised_query_is_used() -> None:
    class Zero(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return query * 0

    model = attached("vit")
    for reader in attnres_vision.readers(model).values():
        if reader.query is not None:
            parametrize.register_parametrization(reader, "query", Zero())
    torch.testing.assert_close(model(images()), stock("vit")(images()), rtol=1e-4, atol=1e-5)


def test_a_frozen_embedding_trains_the_rest_under_checkpointing() -> None:
    model = attached("vit").train()
    model.set_grad_checkpointing()
    for module in (model.patch_embed, model.pos_embed, model.cls_token, model.reg_token):
        module.requires_grad_(False)
    model(images()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def test_an_empty_batch() -> None:
    assert attached("vit")(images()[:0]).shape == (0, 5)
