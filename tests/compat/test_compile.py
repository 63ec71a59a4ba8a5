"""torch.compile and torch.export on AttnRes models. Inductor needs a C++ compiler; without one its tests skip."""

import copy
import operator
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from attnres_vision.ops import backend
from tests.compat.models import attached, images
from tests.sweeps import exhaustive

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
TOKEN = {"block_size": 3, "query": "token", "rank": 4}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: nn.Module, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one training step of `model`, run through `run`."""
    model.zero_grad()
    torch.manual_seed(0)
    output = run(images())
    output.square().sum().backward()
    return output.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    scale = max(float(value.abs().max()) for value in expected[1].values())  # some biases have no gradient but rounding
    for name, value in expected[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-3, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_step(model: nn.Module, run: Any) -> None:
    expected = step(model, model)
    assert_same(step(model, run), expected)


@needs_compiler
@pytest.mark.parametrize("config", [pytest.param({"block_size": 3}, id="static"), exhaustive(TOKEN, id="token")])
def test_inductor_forward_and_backward_equal_eager(config: dict) -> None:
    model = attached("vit", config, depth=2).train()
    assert_same_step(model, torch.compile(model, fullgraph=True))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vit", {"mode": "full"}),
        ("eva", {"block_size": 3, "query": "condition"}),
        ("beit", {"block_size": 3}),
        ("sam", TOKEN),
        ("qwen3-classifier", {"block_size": 3, "query": "block"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("query", "static"),
)
def test_whole_graph_forward_and_backward(name: str, config: dict) -> None:
    """fullgraph=True: nothing in the library breaks the graph; with AOT autograd, as inductor traces it."""
    model = attached(name, config, depth=2).train()
    assert_same_step(model, torch.compile(model, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize(
    ("config", "sums"),
    [
        pytest.param({"block_size": 3}, 2, id="block"),
        exhaustive(TOKEN, 0, id="token"),
        exhaustive({"mode": "full", "heads": 2}, 0, id="full-heads"),
    ],
)
def test_the_kernels_stay_fused_in_a_whole_graph(config: dict, sums: int, triton_device: str) -> None:
    """Every read is one operator, with its norm, and with the sum before it where no query is made from that."""
    model = attached("vit", config, depth=2).train().to(triton_device)
    graphs = []

    def recording(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.graph)
        return aot_eager(graph, inputs)

    with backend("triton"):
        assert_same_step(model, torch.compile(model, fullgraph=True, backend=recording))
    (graph,) = graphs
    reads = [node for node in graph.nodes if node.target is torch.ops.attnres_vision.depth_attention.default]
    names = [argument.name for argument in torch.ops.attnres_vision.depth_attention.default._schema.arguments]
    arguments = [dict(zip(names, node.args, strict=False)) for node in reads]
    assert [read["norm"] for read in arguments] == ["layer"] * 4
    assert sum(read["add"] is not None for read in arguments) == sums
    functions = [node.target for node in graph.nodes]
    assert functions.count(torch.nn.functional.layer_norm) == 1  # of the embedding
    if config == {"block_size": 3}:  # the position embedding's
        assert sum(function in (operator.add, operator.iadd, torch.add) for function in functions) == 1


@pytest.mark.exhaustive
def test_checkpointed_blocks_between_compiled_frames_keep_the_kernels(triton_device: str) -> None:
    """Where the graph breaks, eager and compiled readers share the sources."""
    model = attached("vit", {"block_size": 3}, depth=2).train().to(triton_device)
    model.set_grad_checkpointing()
    with backend("triton"):
        assert_same_step(model, torch.compile(model, fullgraph=False, backend="aot_eager"))


@pytest.mark.parametrize("name", ["cait", exhaustive("xcit")])
def test_late_class_tokens_break_the_graph(name: str) -> None:
    """Dynamo cannot trace torch.cat of a tensor and a stream; with fullgraph=False the model is right."""
    model = attached(name, depth=2).train()
    assert_same_step(model, torch.compile(model, backend="aot_eager"))


@torch.no_grad()
def test_whole_graph_under_autocast() -> None:
    model = attached("vit", depth=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(images()), compiled(images())
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_features_compile() -> None:
    model = attached("vit", depth=2)
    compiled = torch.compile(model.forward_intermediates, fullgraph=True, backend="aot_eager")
    final, taken = compiled(images(), indices=[0, 1])
    expected_final, expected = model.forward_intermediates(images(), indices=[0, 1])
    for a, b in zip([final, *taken], [expected_final, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_new_query_needs_no_new_graph() -> None:
    """The parameters are inputs of the graph: an optimiser step is seen by the compiled model."""
    model = attached("vit", depth=2)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        first = compiled(images())
        model.norm.depth.query.add_(1.0)
        second = compiled(images())
        assert not torch.allclose(first, second)
        torch.testing.assert_close(second, model(images()), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_blocks_compiled_one_by_one() -> None:
    """Regional compilation: the number of sources differs per block, so there is one graph for each."""
    model = attached("vit").train()
    compiled = copy.deepcopy(model)
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert_same(step(compiled, compiled), step(model, model))


def test_checkpointing_in_a_compiled_model() -> None:
    """fullgraph=True says what to do instead; with graph breaks the gradients are right."""
    model = attached("vit").train()
    model.set_grad_checkpointing()
    with pytest.raises(Exception, match=r"gradient\s+checkpointing off in a compiled model"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(images())
    torch._dynamo.reset()
    assert_same_step(model, torch.compile(model, fullgraph=False, backend="aot_eager"))


@pytest.mark.parametrize("config", [{"block_size": 3}, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize("name", ["vit", "sam"])
@torch.no_grad()
def test_export(name: str, config: dict) -> None:
    model = attached(name, config, depth=2)
    program = torch.export.export(model, (images(),), strict=False)
    targets = {str(node.target) for node in program.graph.nodes}
    assert not [target for target in targets if "attnres" in target]  # only operators that every runtime knows
    other = images(seed=7)
    torch.testing.assert_close(program.module()(other), model(other), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_export_with_a_dynamic_batch() -> None:
    model = attached("vit", TOKEN)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(model, (images(4),), strict=False, dynamic_shapes=({0: batch},))
    for size in (1, 3):
        torch.testing.assert_close(program.module()(images(size)), model(images(size)), rtol=1e-4, atol=1e-5)
