"""The kernels' fused sums and norms under autocast: what the separate operations would return, dtypes included.

On a CPU the kernels run in Triton's interpreter, and autocast is made to treat norms as it does on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

import attnres_vision
from attnres_vision.attach.begin import Begin, Conditions, tell_other_stream
from attnres_vision.attach.families import StreamArgument
from attnres_vision.ops import backend, reference
from attnres_vision.stream.lazy_read import LazyRead
from attnres_vision.stream.stream import DepthStream
from tests.sweeps import covering

SHAPE = (2, 5, 48)


@pytest.fixture
def device(triton_device: str) -> Iterator[str]:
    """A device on which autocast computes norms in fp32."""
    if triton_device == "cuda":
        yield triton_device
        return
    library = torch.library.Library("aten", "IMPL")

    def in_fp32(norm: Any) -> Any:
        def cast(x: Tensor, shape: list[int], *parameters: Any) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                wide = (value.float() if isinstance(value, Tensor) else value for value in parameters[:3])
                return norm(x.float(), shape, *wide)

        return cast

    library.impl("layer_norm", in_fp32(F.layer_norm), "AutocastCPU")
    library.impl("rms_norm", in_fp32(F.rms_norm), "AutocastCPU")
    yield triton_device
    library._destroy()


NORMS = {
    "layer": nn.LayerNorm(48),
    "layer-bare": nn.LayerNorm(48, elementwise_affine=False),
    "layer-bf16": nn.LayerNorm(48, dtype=torch.bfloat16),
    "rms": nn.RMSNorm(48, eps=1e-6),
    "rms-bare": nn.RMSNorm(48, eps=1e-6, elementwise_affine=False),
}
# Embedding, first and second output of the open block
DTYPES = {
    "vit": (torch.float32, torch.bfloat16, torch.bfloat16),
    "bf16-stream": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32-partial": (torch.float32, torch.float32, torch.bfloat16),
    "fp32-output": (torch.bfloat16, torch.bfloat16, torch.float32),
    "fp16": (torch.float32, torch.float16, torch.float16),
}


@covering(norm=NORMS, dtypes=DTYPES)
def test_a_fused_sum_and_norm_are_what_the_separate_ones_are(norm: nn.Module, dtypes: Any, device: str) -> None:
    norm = copy.deepcopy(norm).to(device)
    values = [torch.randn(SHAPE).to(device, dtype) for dtype in dtypes]
    query, upstream = torch.randn(48, device=device) * 48**-0.5, torch.randn(SHAPE, device=device)

    def run(fused: bool) -> list[Tensor]:
        embedding, first, second = leaves = [value.clone().requires_grad_() for value in values]
        leaf_query = query.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16), backend("triton"):
            stream = DepthStream((embedding,)).write(first).write(second)
            assert stream.open_block.pending is second
            if not fused:
                stream.sources()
            read = LazyRead((*stream.blocks, stream.open_block.total), leaf_query, open_block=stream.open_block)
            declared, out = read.dtype, norm(read if fused else read.tensor())
            assert declared == read.tensor().dtype
        later = stream.open_block.total.float()
        (out * upstream).sum().backward(retain_graph=True, inputs=[*leaves, leaf_query, *norm.parameters()])
        (later * upstream).sum().backward(inputs=[first, second])
        gradients = [tensor.grad for tensor in (*leaves, leaf_query, *norm.parameters())]
        norm.zero_grad()
        return [out, stream.open_block.total, *gradients]

    found, wanted = run(True), run(False)
    assert found[0].dtype == torch.float32
    for value, target in zip(found, wanted, strict=True):
        assert value.dtype == target.dtype
        # One rounding to the sources' dtype may fall to the other side
        tolerance = 1e-5 if value.dtype == torch.float32 and dtypes[0] == torch.float32 else 2**-7
        torch.testing.assert_close(value, target, rtol=2 * tolerance, atol=tolerance * target.abs().max().item())
    exact = [value.double() for value in values]
    hidden = reference.depth_attention([exact[0], exact[1] + exact[2]], query)
    normed = (F.layer_norm if isinstance(norm, nn.LayerNorm) else F.rms_norm)(hidden, (48,), eps=norm.eps)
    bound = 1e-4 if dtypes[0] == torch.float32 else 2**-5
    torch.testing.assert_close(found[0].double(), normed, rtol=bound, atol=bound)


def test_telling_the_other_stream_makes_each_pending_sum_once(device: str) -> None:
    """The mean takes the sums, and so they are those that the streams go on with."""
    arguments = tuple(StreamArgument(name, position, name) for position, name in enumerate(("image", "text")))
    block = nn.Module()
    block.depth_begin = Begin(arguments, {}, Conditions(), 1e-6)
    with backend("triton"), Calls(SHAPE) as calls:
        values = torch.randn(6, *SHAPE, device=device).unbind()
        streams = [DepthStream(values[i : i + 1]).write(values[i + 1]).write(values[i + 2]) for i in (0, 3)]
        assert calls.counts["sums"] == 0 and all(stream.open_block.pending is not None for stream in streams)
        told, _ = tell_other_stream(block, tuple(streams), {})
        partials = [stream.sources()[-1] for stream in told]
    assert calls.counts["sums"] == 2
    torch.testing.assert_close(told[0].other, partials[1].mean(1))
    torch.testing.assert_close(told[1].other, partials[0].mean(1))


class Calls(TorchDispatchMode):
    """Counts the operations on hidden states of a shape, and notes the dtypes that reads and norms return."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.counts = shape, {"reads": 0, "norms in a read": 0, "sums in a read": 0, "norms": 0, "sums": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.attnres_vision.depth_attention.default:
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            self.counts["reads"] += 1
            self.counts["norms in a read"] += named["norm"] != ""
            self.counts["sums in a read"] += named["add"] is not None
        elif func is torch.ops.aten.native_layer_norm.default:
            self.counts["norms"] += 1
        elif func is torch.ops.aten.add.Tensor and result.shape == self.shape:
            self.counts["sums"] += 1
        return result


def small_vit(device: str) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=3, num_heads=2, num_classes=5)
    attnres_vision.attach(model, block_size=2, two_phase=False)  # whose first reads have no norm in them
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def test_a_vit_under_autocast_runs_fused_and_equals_the_unfused_one(device: str) -> None:
    """As accelerate's mixed_precision="bf16" runs it: forward under autocast, backward outside."""
    model = small_vit(device)
    images = torch.randn(2, 3, 32, 32, device=device)
    seen: list[torch.dtype] = []
    for name, module in model.named_modules():
        if name.endswith((".attn", ".mlp")) or name == "head":  # takes what a norm returns, writes to the stream
            module.register_forward_hook(lambda module, args, output: seen.extend([args[0].dtype, output.dtype]))

    def run(model: nn.Module, enabled: bool = True) -> tuple[list[Tensor], list[torch.dtype], dict[str, int]]:
        seen.clear()
        model.zero_grad()
        dtype = next(model.parameters()).dtype
        with Calls((2, 5, 48)) as calls, torch.autocast(device, torch.bfloat16, enabled=enabled):
            logits = model(images.to(dtype))
        logits.to(dtype).square().sum().backward()
        return [logits, *(parameter.grad for parameter in model.parameters())], list(seen), calls.counts

    with backend("triton"):
        found, dtypes, counts = run(model)
        watched = copy.deepcopy(model)
        for reader in attnres_vision.readers(watched).values():
            reader.register_forward_hook(lambda reader, args, output: None)
        unfused, unfused_dtypes, unfused_counts = run(watched)
    exact, _, _ = run(copy.deepcopy(model).double(), enabled=False)
    # The first norm reads the embedding alone; the sum that stays is the position embedding's
    assert counts == {"reads": 6, "norms in a read": 6, "sums in a read": 3, "norms": 1, "sums": 1}
    assert unfused_counts["norms in a read"] == 0 and unfused_counts["norms"] == 7
    assert dtypes == unfused_dtypes and torch.float32 in dtypes and torch.bfloat16 in dtypes
    for value, other, target in zip(found, unfused, exact, strict=True):
        assert value.dtype == other.dtype
        noise = (other.double() - target).norm()
        assert (value.double() - other.double()).norm() <= 1e-6 * target.norm() + noise
        assert (value.double() - target).norm() <= 1e-6 * target.norm() + 1.5 * noise


def test_a_compiled_vit_under_autocast_has_the_same_reads(device: str) -> None:
    model = small_vit(device)
    compiled, images, graphs = copy.deepcopy(model), torch.randn(2, 3, 32, 32, device=device), []

    def recording(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    with backend("triton"), torch.autocast(device, torch.bfloat16):
        expected = model(images)
        logits = torch.compile(compiled, fullgraph=True, backend=recording)(images)
    expected.float().square().sum().backward()
    logits.float().square().sum().backward()
    targets = [node.target for node in graphs[0].nodes]
    assert targets.count(torch.ops.attnres_vision.depth_attention.default) == 6
    assert targets.count(F.layer_norm) == 1
    assert logits.dtype == expected.dtype
    for value, other in zip(compiled.parameters(), model.parameters(), strict=True):
        # Autograd adds up a source's gradient, each term rounded: the kernels' own sum is not used here
        torch.testing.assert_close(value.grad, other.grad, rtol=0.02, atol=0.02 * other.grad.abs().max().item())
