"""Attached MMDiTs against loops written from the equations, with random queries of every kind.

The loops share no code with the library: they call the blocks' submodules (norm projections, attention, MLP) by hand
and keep a plain list of what every layer has added (DESIGN section 2; arXiv 2603.15031, Eq. 1 to 6).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnres_vision
import dit
from tests.dit.tiny import MODELS, inputs_for, randomise_queries, relative_error, stock_model

QUERIES: dict[str, dict[str, Any]] = {
    "static": {},
    "static-heads-scale-mean": {"heads": 2, "scale": 0.25, "form": "mean"},
    "token": {"query": "token"},
    "token-rank": {"query": "token", "rank": 3},
    "block": {"query": "block"},
    "block-rank": {"query": "block", "rank": 2},
    "timestep": {"query": "condition"},
    "pooled-text-rank": {"query": "condition", "condition": ["pooled_text"], "rank": 4},
    "other-stream": {"query": "condition", "condition": ["other_stream"]},
    "all-conditions": {"query": "condition", "condition": ["timestep", "other_stream", "pooled_text"]},
}
BLOCKS = {"full": {"mode": "full"}, "blocks-of-2": {"block_size": 2}, "blocks-of-3": {"block_size": 3}}
EPS = 1e-6


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


class Stream:
    """The embedding and the output of every layer so far."""

    def __init__(self, embedding: Tensor, block_size: int) -> None:
        self.embedding, self.block_size = embedding, block_size
        self.layers: list[Tensor] = []

    def sources(self, layer: int | None = None) -> list[Tensor]:
        """What the reader of a layer sees: the embedding and the sums of the blocks, the last one as far as it goes."""
        layer = len(self.layers) if layer is None else layer
        starts = range(0, layer, self.block_size)
        return [self.embedding] + [sum(self.layers[i : min(i + self.block_size, layer)]) for i in starts]  # type: ignore[misc]

    def joined(self, other: Stream) -> Stream:
        """This stream's tokens, then the other's."""
        both = Stream(torch.cat([self.embedding, other.embedding], 1), self.block_size)
        both.layers = [torch.cat(pair, 1) for pair in zip(self.layers, other.layers, strict=True)]
        return both


class Readers:
    """Depth attention by the names of the parameters."""

    def __init__(self, model: Any, conditions: dict[str, Tensor]) -> None:
        self.config, self.conditions = model.attnres_config, conditions
        self.parameters = {name: value for name, value in model.named_parameters() if ".depth" in name}

    def read(self, path: str, stream: Stream, other: Stream | None = None, final: bool = False) -> Tensor:
        """h for the reader at `path`; `other` is the other stream as it was when the block was entered."""
        sources = stream.sources()
        query = self.parameters.get(f"{path}.depth.query")
        if query is None:
            assert len(sources) == 1
            return sources[0]
        query = query + self.projected(path, stream, other, final)
        heads = self.config.heads
        logits = []
        for source in sources:
            products = rms(source) * query
            logits.append(self.config.scale * products.unflatten(-1, (heads, -1)).sum(-1))
        weights = torch.softmax(torch.stack(logits), 0)  # (n, B, T, heads)
        stacked = torch.stack(sources).unflatten(-1, (heads, -1))
        mean = (weights.unsqueeze(-1) * stacked).sum(0).flatten(-2)
        return mean * len(sources) if self.config.form == "sum" else mean

    def projected(self, path: str, stream: Stream, other: Stream | None, final: bool) -> Any:
        """The input-dependent part of the query."""
        kind = self.config.query
        if kind == "static":
            return 0.0
        if kind == "condition":
            names = [name for name in self.config.condition if name != "other_stream"]
            parts = [rms(self.conditions[name]) for name in names]
            if "other_stream" in self.config.condition and other is not None:
                parts.append(rms(other.sources()[-1].mean(1)))
            if not parts:
                return 0.0
            given = torch.cat(parts, -1).unsqueeze(1)
        elif kind == "token" or final:
            given = stream.sources()[-1]
        else:
            entry = len(stream.layers) // stream.block_size * stream.block_size
            given = stream.sources(entry)[-1]
        given, width = rms(given), given.shape[-1]
        if self.config.rank is None:
            return given @ self.parameters[f"{path}.depth.query_proj"].T / width**0.5
        down, up = (self.parameters[f"{path}.depth.query_{name}"] for name in ("down", "up"))
        return given @ down.T @ up.T / (width * self.config.rank) ** 0.5


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def chunks(module: Any, temb: Tensor, count: int) -> list[Tensor]:
    """The modulation vectors of an adaLN module, (B, 1, D) each."""
    return [part.unsqueeze(1) for part in module.linear(F.silu(temb)).chunk(count, dim=1)]


def snapshot(stream: Stream) -> Stream:
    kept = Stream(stream.embedding, stream.block_size)
    kept.layers = list(stream.layers)
    return kept


def conditions_of(model: Any, timestep: Tensor, pooled: Tensor) -> dict[str, Tensor]:
    embed = model.time_text_embed
    dtype = pooled.dtype
    return {
        "timestep": embed.timestep_embedder(embed.time_proj(timestep).to(dtype)),
        "pooled_text": embed.text_embedder(pooled),
    }


def dual_block(
    block: Any, path: str, readers: Readers, image: Stream, text: Stream, temb: Tensor, **kwargs: Any
) -> None:
    """One Flux or HunyuanVideo dual-stream block."""
    image_before, text_before = snapshot(image), snapshot(text)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = chunks(block.norm1, temb, 6)
    c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = chunks(block.norm1_context, temb, 6)
    x = norm(readers.read(f"{path}.norm1", image, text_before)) * (1 + scale) + shift
    c = norm(readers.read(f"{path}.norm1_context", text, image_before)) * (1 + c_scale) + c_shift
    attention, c_attention = block.attn(hidden_states=x, encoder_hidden_states=c, **kwargs)
    image.layers.append(gate * attention)
    text.layers.append(c_gate * c_attention)
    x = norm(readers.read(f"{path}.norm2", image, text_before)) * (1 + scale_mlp) + shift_mlp
    c = norm(readers.read(f"{path}.norm2_context", text, image_before)) * (1 + c_scale_mlp) + c_shift_mlp
    image.layers.append(gate_mlp * block.ff(x))
    text.layers.append(c_gate_mlp * block.ff_context(c))


def final_output(model: Any, readers: Readers, image: Stream, temb: Tensor, other: Stream | None) -> Tensor:
    scale, shift = chunks(model.norm_out, temb, 2)
    h = readers.read("norm_out", image, other, final=True)
    return model.proj_out(norm(h) * (1 + scale) + shift)


def sd3_loop(model: Any, block_size: int, x: dict[str, Any]) -> Tensor:
    temb = model.time_text_embed(x["timestep"], x["pooled_projections"])
    readers = Readers(model, conditions_of(model, x["timestep"], x["pooled_projections"]))
    image = Stream(model.pos_embed(x["hidden_states"]), block_size)
    text = Stream(model.context_embedder(x["encoder_hidden_states"]), block_size)
    text_before = text
    for index, block in enumerate(model.transformer_blocks):
        path = f"transformer_blocks.{index}"
        image_before, text_before = snapshot(image), snapshot(text)
        dual = block.attn2 is not None
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, *second = chunks(block.norm1, temb, 9 if dual else 6)
        normed = norm(readers.read(f"{path}.norm1", image, text_before))
        c = norm(readers.read(f"{path}.norm1_context", text, image_before))
        if block.context_pre_only:
            c_scale, c_shift = chunks(block.norm1_context, temb, 2)
        else:
            c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = chunks(block.norm1_context, temb, 6)
        attention, c_attention = block.attn(
            hidden_states=normed * (1 + scale) + shift, encoder_hidden_states=c * (1 + c_scale) + c_shift
        )
        output = gate * attention
        if dual:  # the second attention is part of the same layer
            shift2, scale2, gate2 = second
            output = output + gate2 * block.attn2(hidden_states=normed * (1 + scale2) + shift2)
        image.layers.append(output)
        h = norm(readers.read(f"{path}.norm2", image, text_before)) * (1 + scale_mlp) + shift_mlp
        image.layers.append(gate_mlp * block.ff(h))
        if not block.context_pre_only:
            text.layers.append(c_gate * c_attention)
            c = norm(readers.read(f"{path}.norm2_context", text, image_before)) * (1 + c_scale_mlp) + c_shift_mlp
            text.layers.append(c_gate_mlp * block.ff_context(c))
    tokens = final_output(model, readers, image, temb, text_before)
    patch, channels = model.config.patch_size, model.out_channels
    rows = x["hidden_states"].shape[-1] // patch
    tokens = tokens.view(-1, rows, rows, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
    return tokens.reshape(-1, channels, rows * patch, rows * patch)


def flux_loop(model: Any, block_size: int, x: dict[str, Any]) -> Tensor:
    timestep = x["timestep"] * 1000
    temb = model.time_text_embed(timestep, x["pooled_projections"])
    readers = Readers(model, conditions_of(model, timestep, x["pooled_projections"]))
    rotary = model.pos_embed(torch.cat([x["txt_ids"], x["img_ids"]]))
    image = Stream(model.x_embedder(x["hidden_states"]), block_size)
    text = Stream(model.context_embedder(x["encoder_hidden_states"]), block_size)
    for index, block in enumerate(model.transformer_blocks):
        dual_block(block, f"transformer_blocks.{index}", readers, image, text, temb, image_rotary_emb=rotary)
    both = text.joined(image)
    for index, block in enumerate(model.single_transformer_blocks):
        shift, scale, gate = chunks(block.norm, temb, 3)
        h = norm(readers.read(f"single_transformer_blocks.{index}.norm", both)) * (1 + scale) + shift
        attention = block.attn(hidden_states=h, image_rotary_emb=rotary)
        mlp = F.gelu(block.proj_mlp(h), approximate="tanh")
        both.layers.append(gate * block.proj_out(torch.cat([attention, mlp], 2)))
    tokens = text.embedding.shape[1]
    image = Stream(both.embedding[:, tokens:], block_size)
    image.layers = [layer[:, tokens:] for layer in both.layers]
    return final_output(model, readers, image, temb, None)


def hunyuan_loop(model: Any, block_size: int, x: dict[str, Any]) -> Tensor:
    temb, _ = model.time_text_embed(x["timestep"], x["pooled_projections"], x["guidance"])
    readers = Readers(model, conditions_of(model, x["timestep"], x["pooled_projections"]))
    rotary = model.rope(x["hidden_states"])
    image = Stream(model.x_embedder(x["hidden_states"]), block_size)
    text_tokens = model.context_embedder(x["encoder_hidden_states"], x["timestep"], x["encoder_attention_mask"])
    text = Stream(text_tokens, block_size)
    latents, tokens = image.embedding.shape[1], text.embedding.shape[1]
    lengths = latents + x["encoder_attention_mask"].sum(1)
    mask = torch.arange(latents + tokens)[None, :] < lengths[:, None]
    kwargs = {"attention_mask": mask[:, None, None], "image_rotary_emb": rotary}
    for index, block in enumerate(model.transformer_blocks):
        dual_block(block, f"transformer_blocks.{index}", readers, image, text, temb, **kwargs)
    both = image.joined(text)
    for index, block in enumerate(model.single_transformer_blocks):
        shift, scale, gate = chunks(block.norm, temb, 3)
        h = norm(readers.read(f"single_transformer_blocks.{index}.norm", both)) * (1 + scale) + shift
        attention = torch.cat(
            block.attn(hidden_states=h[:, :latents], encoder_hidden_states=h[:, latents:], **kwargs), 1
        )
        mlp = F.gelu(block.proj_mlp(h), approximate="tanh")
        both.layers.append(gate * block.proj_out(torch.cat([attention, mlp], 2)))
    image = Stream(both.embedding[:, :latents], block_size)
    image.layers = [layer[:, :latents] for layer in both.layers]
    out = final_output(model, readers, image, temb, None)
    frames, height, width = x["hidden_states"].shape[2:]
    return out.view(-1, frames, height, width, out.shape[-1]).permute(0, 4, 1, 2, 3)


LOOPS = {"sd3": sd3_loop, "sd35": sd3_loop, "flux": flux_loop, "hunyuan-video": hunyuan_loop}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("name", LOOPS)
def test_random_queries_equal_a_loop_written_from_the_equations(name: str, query: str, blocks: str) -> None:
    stock = stock_model(name)
    inputs = inputs_for(name)
    with torch.no_grad():
        plain = stock(**inputs)[0]
        model = dit.convert(stock, {**QUERIES[query], **BLOCKS[blocks]})
        randomise_queries(model, scale=1.0)
        got = model(**inputs)[0]
        wanted = LOOPS[name](model, BLOCKS[blocks].get("block_size", 1), inputs)
    assert relative_error(got, wanted) < 1e-11
    assert relative_error(got, plain) > 1e-2


@pytest.mark.parametrize("name", ["sd35", "flux", "hunyuan-video"])
def test_gradients_equal_those_of_the_loop(name: str) -> None:
    model = dit.convert(stock_model(name), {**QUERIES["all-conditions"], "block_size": 2})
    randomise_queries(model)
    inputs = inputs_for(name)

    def gradients(output: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        output.pow(2).sum().backward()
        return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}

    got = gradients(model(**inputs)[0])
    wanted = gradients(LOOPS[name](model, 2, inputs))
    assert set(got) == set(wanted)
    assert sum(".depth." in key for key in got) > 10
    for key, value in wanted.items():
        assert (got[key] - value).abs().max() <= 1e-10 * max(1.0, value.abs().max().item()), key


@torch.no_grad()
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_reader_reads_the_finished_blocks_and_the_open_one(name: str, block_size: int) -> None:
    """The i-th reader of a stream has 1 + ceil(i / S) sources, and mixes them by the equation."""
    model = dit.convert(stock_model(name), {"block_size": block_size})
    randomise_queries(model, scale=1.0)
    read: dict[str, int] = {"image": 0, "text": 0}  # sublayers behind each stream
    checked = []

    def look(reader: Any, args: Any, output: Tensor) -> None:
        sources = args[0].sources()
        members = ["image", "text"] if reader.stream == "joint" else [reader.stream]
        index = read[members[0]]
        if name == "auraflow" and reader.name.endswith((".norm2", ".norm2_context")):
            # The attention's output is in the open block of what this reader sees, though not of the stream
            assert len(sources) == 2 + (index - 1) // block_size
        else:
            assert len(sources) == 1 + (index + block_size - 1) // block_size, reader.name
            read.update(dict.fromkeys(members, index + 1))
        if reader.query is not None:
            logits = torch.stack([(rms(source) * reader.query).sum(-1) for source in sources])
            mixed = (logits.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0) * len(sources)
            assert relative_error(output.double(), mixed.double()) < 1e-6
            checked.append(reader.name)

    readers = attnres_vision.readers(model)
    for reader in readers.values():
        reader.register_forward_hook(look)
    model(**inputs_for(name))
    assert len(checked) == len({id(reader) for reader in readers.values() if reader.query is not None})
