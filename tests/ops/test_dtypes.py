"""Every mixture of dtypes gives the same result on all paths, or the same error: PyTorch's own norms decide which.

A row is a choice of dtypes for sources, query, sum (`add`) and the norm's parameters, a kind of norm, and autocast. The
default run takes rows from all over the product; `-m exhaustive` takes all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_vision.ops import Norm, backend, depth_attention, dispatch, reference, two_phase
from attnres_vision.stream.lazy_read import LazyRead

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHAPE, WIDTH = (2, 3, 16), 16
# Roundings of what is stored: the sum, h, its norm, the mean of a first phase, gradients. fp32 sums are longer.
TOLERANCES = {BF16: 4 * 2**-7, FP16: 4 * 2**-10, FP32: 100 * 2**-23, FP64: 500 * 2**-52}

SOURCES = [(FP32,), (BF16,), (FP16,), (FP64,), (FP32, BF16), (BF16, FP16), (BF16, FP32), (FP64, FP32)]
ADDS = [None, FP32, BF16, FP16, FP64]
QUERIES = WEIGHTS = [FP32, BF16, FP16, FP64]
ROWS = list(itertools.product(SOURCES, QUERIES, ADDS, WEIGHTS, ("layer", "rms"), (False, True)))
SAMPLE = ROWS[::71]  # 71 shares no factor with the numbers of choices: all of each come up


class Case:
    """Leaves and what is expected of them."""

    def __init__(self, row: tuple[Any, ...]) -> None:
        sources, query, add, weight, self.kind, self.autocast = row
        torch.manual_seed(0)
        self.leaves = {f"source{i}": torch.randn(SHAPE).to(sources[i % len(sources)]) for i in range(3)}
        self.leaves["query"] = (0.3 * torch.randn(WIDTH)).to(query)
        self.leaves["weight"] = torch.randn(WIDTH).to(weight)
        if self.kind == "layer":
            self.leaves["bias"] = torch.randn(WIDTH).to(weight)
        if add is not None:
            self.leaves["add"] = torch.randn(SHAPE).to(add)
        self.tolerance = max(TOLERANCES[leaf.dtype] for leaf in self.leaves.values())
        self.upstream = torch.randn(SHAPE, dtype=FP64)
        wide = [leaf.dtype for name, leaf in self.leaves.items() if name.startswith("source") or name == "add"]
        self.dtype = wide[0]
        for dtype in wide[1:]:
            self.dtype = torch.promote_types(self.dtype, dtype)

    def is_allowed(self) -> bool:
        """Whether PyTorch's own norm takes these parameters for what is read."""
        hidden = torch.zeros(SHAPE, dtype=self.dtype)
        try:
            with torch.autocast("cpu", BF16, enabled=self.autocast):
                module_of(self.kind, self.leaves)(hidden)
        except RuntimeError:
            return False
        return True

    def run(self, path: Callable[..., Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Result and gradients by name."""
        leaves = {n: leaf.detach().to(dtype or leaf.dtype).clone().requires_grad_() for n, leaf in self.leaves.items()}
        with torch.autocast("cpu", BF16, enabled=self.autocast and dtype is None):
            out = path(self.kind, leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), self.upstream.to(out.dtype))
        return {"result": out.detach(), **dict(zip(leaves, grads, strict=True))}


def sources_of(leaves: dict[str, Tensor]) -> list[Tensor]:
    return [leaves[f"source{i}"] for i in range(3)]


def with_sum(leaves: dict[str, Tensor]) -> list[Tensor]:
    *others, last = sources_of(leaves)
    return [*others, last + leaves["add"] if "add" in leaves else last]


def module_of(kind: str, leaves: dict[str, Tensor]) -> nn.Module:
    """The host's norm, with these leaves as parameters."""
    module = nn.LayerNorm(WIDTH, 1e-5) if kind == "layer" else nn.RMSNorm(WIDTH, 1e-5)
    for name in ("weight", "bias") if kind == "layer" else ("weight",):
        delattr(module, name)
        setattr(module, name, leaves[name])
    return module


def composition(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    return module_of(kind, leaves)(reference.depth_attention(with_sum(leaves), leaves["query"]))


def operator(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    norm = Norm(kind, 1e-5, leaves["weight"], leaves.get("bias"))
    found = depth_attention(sources_of(leaves), leaves["query"], add=leaves.get("add"), norm=norm)
    return found[0] if "add" in leaves else found


def transformed(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    """What compilers and torch.func see: decomposed.py."""
    with torch.autograd.forward_ad.dual_level():
        return operator(kind, leaves)


def compiled(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(operator, backend="aot_eager", fullgraph=True)(kind, leaves)


def lazy(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    return module_of(kind, leaves)(LazyRead(with_sum(leaves), leaves["query"]))


def in_two_phases(kind: str, leaves: dict[str, Tensor]) -> Tensor:
    *blocks, last = with_sum(leaves)
    kernel, query = dispatch.choose([*blocks, last], 1), leaves["query"]
    options: dict[str, Any] = {"eps": 1e-6, "scale": 1.0, "form": "sum"}
    _, (earlier,) = two_phase.attend_blocks(blocks, [query.detach() * 0.5, query], kernel=kernel, **options)
    return module_of(kind, leaves)(LazyRead([last], query, earlier=earlier, **options))


PATHS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "eager": ("eager", operator),
    "eager-transformed": ("eager", transformed),
    "eager-lazy": ("eager", lazy),
    "eager-two-phase": ("eager", in_two_phases),
    "triton": ("triton", operator),
    "triton-lazy": ("triton", lazy),
    "triton-two-phase": ("triton", in_two_phases),
}


def check(case: Case, names: list[str]) -> None:
    is_allowed = case.is_allowed()
    expected = case.run(composition, FP64) if is_allowed else {}
    errors = {}
    for name in names:
        kernel, path = PATHS[name]
        with backend(kernel):
            if kernel == "triton" and case.dtype == FP64:
                # The kernels have no fp64, and say so before anything else is computed
                with pytest.raises((ValueError, TypeError), match=r"must be fp32, fp16 or bf16|must have the dtype"):
                    case.run(path)
            elif not is_allowed:
                with pytest.raises(TypeError, match="must have the dtype of what it reads") as caught:
                    case.run(path)
                errors[name] = str(caught.value)
            else:
                found = case.run(path)
                assert found["result"].dtype == case.dtype, name
                for key, value in found.items():
                    size = expected[key].abs().max().item()
                    error = (value.double() - expected[key]).abs().max().item()
                    assert error <= case.tolerance * size, f"{name}, {key}: off by {error:.1e} of {size:.1e}"
    assert len(set(errors.values())) <= 1, errors


def name_of(row: tuple[Any, ...]) -> str:
    sources, query, add, weight, kind, autocast = row
    short = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP64: "fp64", None: "none"}
    kinds = "+".join(short[dtype] for dtype in sources)
    return f"{kinds}-query_{short[query]}-add_{short[add]}-{kind}_{short[weight]}" + "-autocast" * autocast


@pytest.mark.parametrize("row", SAMPLE, ids=name_of)
def test_all_paths_agree(row, triton_device):
    # Triton's interpreter takes a second per path: one of them for each row, in turn
    which = SAMPLE.index(row) % 3
    eager, triton = ([name for name in PATHS if name.startswith(kind)] for kind in ("eager", "triton"))
    check(Case(row), eager + triton[which : which + 1] if triton_device == "cpu" else eager)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_all_paths_agree_on_every_mixture(row, triton_device):
    check(Case(row), [name for name in PATHS if triton_device == "cpu" or name.startswith("eager")])


def test_the_sample_has_every_choice():
    for choices, taken in zip(zip(*ROWS, strict=True), zip(*SAMPLE, strict=True), strict=True):
        assert set(choices) == set(taken)
    assert {Case(row).is_allowed() for row in SAMPLE} == {True, False}


COMPILED = [((BF16,), FP32, None, FP32, "layer", True), ((FP32, BF16), BF16, FP32, BF16, "rms", False)]


@pytest.mark.parametrize("row", COMPILED, ids=name_of)
def test_a_compiled_read_agrees(row):
    case = Case(row)
    expected = case.run(composition, FP64)
    found = case.run(compiled)
    assert found["result"].dtype == case.dtype
    for key, value in found.items():
        assert (value.double() - expected[key]).abs().max() <= case.tolerance * expected[key].abs().max(), key


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (FP32, BF16, "norm.weight of torch.float32 and norm.bias of torch.bfloat16"),
        (torch.int32, FP32, "norm.weight must be a floating-point tensor, got a tensor of torch.int32"),
    ],
)
def test_parameters_that_do_not_go_together(weight, bias, message):
    norm = Norm("layer", 1e-5, torch.ones(WIDTH, dtype=weight), torch.ones(WIDTH, dtype=bias))
    with pytest.raises(TypeError, match=message):
        depth_attention([torch.ones(SHAPE, dtype=BF16)], torch.ones(WIDTH), norm=norm)
