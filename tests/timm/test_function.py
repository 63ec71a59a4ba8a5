"""With random queries an attached model computes what the equations say.

`written_out` below is a loop over the layers of the *stock* model, written from section 2 of the design and
arXiv 2603.15031, Eq. 1 to 6. It shares no code with attnres_vision: it takes the depth parameters by name and calls the
stock model's own sublayers by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_vision import DepthAttention, attnres_state_dict
from tests.timm.tiny import attached_copy, images, randomise_depth, regularise, stock_model

# A sublayer: the names of the modules that read the stream for it, and what it makes of one read per name.
Sublayer = tuple[list[str], Callable[..., Tensor]]


# The stock models, sublayer by sublayer ------------------------------------------------------------------------------


def prenorm_sublayers(model: Any, name: str, block: Any, rope: Tensor | None) -> list[Sublayer]:
    return [
        ([f"{name}.norm1"], lambda h: block.drop_path1(block.ls1(block.attn(block.norm1(h))))),
        ([f"{name}.norm2"], lambda h: block.drop_path2(block.ls2(block.mlp(block.norm2(h))))),
    ]


def postnorm_sublayers(model: Any, name: str, block: Any, rope: Tensor | None) -> list[Sublayer]:
    return [
        ([f"{name}.attn"], lambda h: block.drop_path1(block.norm1(block.attn(h)))),
        ([f"{name}.mlp"], lambda h: block.drop_path2(block.norm2(block.mlp(h)))),
    ]


def eva_sublayers(model: Any, name: str, block: Any, rope: Tensor | None) -> list[Sublayer]:
    return [
        ([f"{name}.norm1"], lambda h: block.gamma_1 * block.attn(block.norm1(h), rope=rope)),
        ([f"{name}.norm2"], lambda h: block.gamma_2 * block.mlp(block.norm2(h))),
    ]


def parallel_things_sublayers(model: Any, name: str, block: Any, rope: Tensor | None) -> list[Sublayer]:
    """Two attentions side by side are one sublayer with two readers, and so are two MLPs."""
    return [
        ([f"{name}.attns.0.norm", f"{name}.attns.1.norm"], lambda h, g: block.attns[0](h) + block.attns[1](g)),
        ([f"{name}.ffns.0.norm", f"{name}.ffns.1.norm"], lambda h, g: block.ffns[0](h) + block.ffns[1](g)),
    ]


def parallel_scaling_sublayers(model: Any, name: str, block: Any, rope: Tensor | None) -> list[Sublayer]:
    """Attention and MLP read one norm: the whole block is one sublayer. In float64 a subtraction gives its delta."""
    return [([f"{name}.in_norm"], lambda h: block(h) - h)]


SUBLAYERS: dict[str, Callable[..., list[Sublayer]]] = {
    "prenorm": prenorm_sublayers,
    "deit3": prenorm_sublayers,
    "no-final-norm": prenorm_sublayers,
    "respost": postnorm_sublayers,
    "dinov3": eva_sublayers,
    "parallel-things": parallel_things_sublayers,
    "parallel-scaling": parallel_scaling_sublayers,
}


# The equations -------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


def make_query(depth: dict[str, Tensor], name: str, kind: str, given: Tensor, eps: float) -> Tensor:
    """q = w + W RMSNorm(given) / sqrt(fan-in); a low-rank W is U V, and both have a fan-in."""
    w = depth[f"{name}.depth.query"]
    if kind == "static":
        return w
    width = w.shape[0]
    if f"{name}.depth.query_proj" in depth:
        matrix = depth[f"{name}.depth.query_proj"] / width**0.5
    else:
        up, down = depth[f"{name}.depth.query_up"], depth[f"{name}.depth.query_down"]
        matrix = (up / up.shape[1] ** 0.5) @ (down / width**0.5)
    return w + rms_norm(given, eps) @ matrix.T


def attend(sources: list[Tensor], query: Tensor, heads: int, scale: float, form: str, eps: float) -> Tensor:
    """h = n * sum_i softmax_i(scale * q . RMSNorm(v_i)) v_i, each head with its own slice of q, k and v."""
    columns = []
    width = sources[0].shape[-1] // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = torch.stack([scale * (query[..., part] * rms_norm(v, eps)[..., part]).sum(-1) for v in sources])
        exponentials = torch.exp(scores - scores.max(dim=0).values)
        weights = exponentials / exponentials.sum(dim=0)
        columns.append(sum(a[..., None] * v[..., part] for a, v in zip(weights, sources, strict=True)))
    mixed = torch.cat(columns, dim=-1)
    return len(sources) * mixed if form == "sum" else mixed


def written_out(
    key: str,
    model: Any,
    depth: dict[str, Tensor],
    x: Tensor,
    *,
    block_size: int,
    query: str = "static",
    heads: int = 1,
    scale: float = 1.0,
    form: str = "sum",
    key_eps: float = 1e-6,
    cumulative: bool = False,
) -> Tensor:
    """The logits of a stock model whose layers read as the equations say.

    `cumulative` is the commonest mistake in public code: sources are running states in the place of outputs.
    """
    x = model.patch_embed(x)
    x, rope = model._pos_embed(x) if key == "dinov3" else (model._pos_embed(x), None)
    embedding = model.norm_pre(x)
    condition = embedding.mean(dim=1, keepdim=True)
    layers = [
        layer
        for index, block in enumerate(model.blocks)
        for layer in SUBLAYERS[key](model, f"blocks.{index}", block, rope)
    ]
    outputs: list[Tensor] = []  # v_1 .. v_L

    def sources_of(number: int) -> list[Tensor]:
        """What layer `number` (from 1) reads: the embedding, the finished blocks' sums, the open block's sum."""
        groups = [outputs[start : start + block_size] for start in range(0, number - 1, block_size)]
        if cumulative:
            ends = [min(start + block_size, number - 1) for start in range(0, number - 1, block_size)]
            return [embedding, *(embedding + sum(outputs[:end]) for end in ends)]
        return [embedding, *(sum(group) for group in groups)]

    def read(name: str, number: int) -> Tensor:
        sources = sources_of(number)
        entry = number - (number - 1) % block_size if number <= len(layers) else number
        given = {
            "static": embedding,
            "token": sources[-1],
            "block": sources_of(entry)[-1],  # the newest source when the reader's block was entered
            "condition": condition,
        }[query]
        return attend(sources, make_query(depth, name, query, given, key_eps), heads, scale, form, key_eps)

    for number, (names, compute) in enumerate(layers, start=1):
        # the first layer has one source: nothing to choose from
        outputs.append(compute(*[embedding if number == 1 else read(name, number) for name in names]))
    return model.forward_head(model.norm(read("norm", len(layers) + 1)))


# The comparison ------------------------------------------------------------------------------------------------------


def both(key: str, config: dict[str, Any], block_size: int, training: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Logits and gradients of the attached model and of the loop, in float64 with random depth parameters."""
    stock = stock_model(key, torch.float64, drop_path_rate=0.3)
    stock = regularise(stock).train(training)
    attached = randomise_depth(attached_copy(stock, **config))
    depth = {name: value.clone().requires_grad_() for name, value in attnres_state_dict(attached).items()}
    options = {name: config[name] for name in ("query", "heads", "scale", "form", "key_eps") if name in config}
    x = images(key, torch.float64)
    torch.manual_seed(1)
    got = attached(x)
    torch.manual_seed(1)
    expected = written_out(key, stock, depth, x, block_size=block_size, **options, **kwargs)
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    stock_parameters = dict(stock.named_parameters()) | depth
    return {
        "logits": (got.detach(), expected.detach()),
        "gradients": {
            name: (parameter.grad, stock_parameters[name].grad) for name, parameter in attached.named_parameters()
        },
    }


def assert_equal(result: dict[str, Any], tolerance: float = 1e-10) -> None:
    got, expected = result["logits"]
    assert (got - expected).abs().max() <= tolerance * expected.std()
    gradients = result["gradients"]
    total = torch.stack([expected.norm() for _, expected in gradients.values() if expected is not None]).norm()
    for name, (got, expected) in gradients.items():
        assert (got is None) == (expected is None), name
        if got is not None:
            assert (got - expected).norm() <= tolerance * max(expected.norm(), 1e-3 * total), name
    assert any(".depth." in name and got.any() for name, (got, _) in gradients.items())


KINDS: dict[str, dict[str, Any]] = {
    "static": {"query": "static"},
    "token": {"query": "token"},
    "token-rank3": {"query": "token", "rank": 3},
    "block": {"query": "block"},
    "block-rank3": {"query": "block", "rank": 3},
    "condition": {"query": "condition"},
    "condition-rank3": {"query": "condition", "rank": 3},
}
# Each with the number of sublayers per block that it must mean for the 8 sublayers of a tiny model.
BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({"mode": "full"}, 1),
    "size1": ({"block_size": 1}, 1),
    "size2": ({"block_size": 2}, 2),
    "size3-short-last": ({"block_size": 3}, 3),
    "size5-short-last": ({"block_size": 5}, 5),
    "size8-one-block": ({"block_size": 8}, 8),
    "num4": ({"num_blocks": 4}, 2),
    "num3-does-not-divide": ({"num_blocks": 3}, 3),
    "default": ({"mode": "block"}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_block_size_and_query_kind_equals_the_equations(blocks: str, kind: str) -> None:
    config, block_size = BLOCKS[blocks]
    assert_equal(both("prenorm", {**config, **KINDS[kind], "heads": 2}, block_size))


@pytest.mark.parametrize("form", ["sum", "mean"])
@pytest.mark.parametrize("scale", [1.0, 48**-0.5], ids=["scale1", "scale-rsqrt-D"])
@pytest.mark.parametrize("heads", [1, 2], ids=["heads1", "heads2"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_count_scale_and_form_equals_the_equations(kind: str, heads: int, scale: float, form: str) -> None:
    assert_equal(both("prenorm", {"block_size": 3, **KINDS[kind], "heads": heads, "scale": scale, "form": form}, 3))


@pytest.mark.parametrize("kind", ["static", "token-rank3"])
def test_key_eps_is_the_epsilon_of_every_norm_of_a_reader(kind: str) -> None:
    assert_equal(both("deit3", {"block_size": 3, **KINDS[kind], "key_eps": 0.3}, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", ["full", "size3-short-last"])
@pytest.mark.parametrize("key", [key for key in SUBLAYERS if key != "prenorm"])
def test_every_kind_of_block_equals_the_equations(key: str, blocks: str, kind: str) -> None:
    config, block_size = BLOCKS[blocks]
    assert_equal(both(key, {**config, **KINDS[kind], "heads": 2}, block_size))


@pytest.mark.parametrize("key", ["prenorm", "respost"])
def test_layer_outputs_are_sources_after_their_drop_path(key: str) -> None:
    """In training a dropped output is a zero source, as the stock model adds zero."""
    assert_equal(both(key, {"block_size": 3, "query": "token"}, 3, training=True))


# The tests above can fail --------------------------------------------------------------------------------------------


def test_cumulative_states_as_sources_are_another_function() -> None:
    got, expected = both("prenorm", {"mode": "full"}, 1, cumulative=True)["logits"]
    assert (got - expected).abs().max() > 0.1 * expected.std()


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"block_size": 3}, {"block_size": 2}),
        ({"block_size": 3, "query": "token"}, {"query": "block"}),
        ({"block_size": 3, "query": "block"}, {"query": "token"}),
        ({"block_size": 3, "heads": 2}, {"heads": 1}),
        ({"block_size": 3, "form": "mean"}, {"form": "sum"}),
    ],
    ids=["block-size", "token", "block", "heads", "form"],
)
def test_another_config_is_another_function(config: dict[str, Any], wrong: dict[str, Any]) -> None:
    stock = stock_model("no-final-norm", torch.float64).eval()  # a final norm would hide the form
    attached = randomise_depth(attached_copy(stock, **config))
    x = images("no-final-norm", torch.float64)
    depth = attnres_state_dict(attached)
    right = {"block_size": 3} | config
    expected = attached(x)
    assert torch.allclose(written_out("no-final-norm", stock, depth, x, **right), expected, rtol=1e-9)
    got = written_out("no-final-norm", stock, depth, x, **{**right, **wrong})
    assert (got - expected).abs().max() > 1e-2 * expected.std()


# Mixed precision -----------------------------------------------------------------------------------------------------


def test_block_sums_accumulate_in_fp32_under_bf16_autocast() -> None:
    """Layers write bf16 under autocast; a block's sum is that of the stock stream, in the embedding's fp32."""
    model = randomise_depth(attached_copy(stock_model("prenorm").eval(), block_size=4))
    deltas: list[Tensor] = []
    read: list[tuple[Tensor, ...]] = []
    for name, module in model.named_modules():
        if name.endswith(("drop_path1", "drop_path2")):
            module.register_forward_hook(lambda module, args, output: deltas.append(output))
        if isinstance(module, DepthAttention) and name == "norm.depth":
            module.register_forward_pre_hook(lambda module, args: read.append(args[0].sources()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images("prenorm"))
    assert {delta.dtype for delta in deltas} == {torch.bfloat16}
    embedding, *blocks = read[0]
    assert embedding.dtype == torch.float32
    for index, block in enumerate(blocks):
        total = torch.zeros_like(embedding)
        for delta in deltas[4 * index : 4 * index + 4]:
            total = total + delta.float()
        assert block.dtype == torch.float32
        assert torch.equal(block, total)


@pytest.mark.parametrize("config", [{"block_size": 3}, {"mode": "full", "query": "token"}], ids=["block", "full-token"])
def test_conversion_under_bf16_autocast_stays_within_the_noise_of_bf16(config: dict[str, Any]) -> None:
    """With zero queries the converted model is as close to stock bf16 as stock bf16 is to fp32."""
    stock = stock_model("deit3").eval()
    x = images("deit3", batch=4)
    exact = stock(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, got = stock(x).float(), attached_copy(stock, **config)(x).float()
    assert (got - rounded).std() < (rounded - exact).std()
