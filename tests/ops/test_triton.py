"""The Triton kernels equal the equations in float64: values and all gradients, with every option.

On a machine with a GPU they run there; elsewhere Triton's interpreter runs them on the CPU (tests/conftest.py). Errors
are relative to the largest entry of a tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_vision.ops import Norm, backend, depth_attention, operator, reference
from tests.sweeps import covering, exhaustive

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# What half-precision sources lose: a sum, h and dh are rounded on the way (2^-9 each for bf16), and a norm divides
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# kind of norm, names of its parameters
NORMS = {
    "layer": ("layer", ()),
    "layer-affine": ("layer", ("weight", "bias")),
    "rms": ("rms", ()),
    "rms-affine": ("rms", ("weight",)),
    "adaln": ("layer", ("scale", "shift")),
    "adaln-affine": ("layer", ("weight", "bias", "scale", "shift")),
    "ada-rms": ("rms", ("weight", "scale", "shift")),
    "shift": ("rms", ("shift",)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A read. `query` is "static", "sample", "token" or "low-rank"; dtypes are repeated over the sources."""

    n: int = 3
    shape: tuple[int, ...] = (2, 5, 48)
    query: str = "static"
    dtypes: tuple[str, ...] = ("fp32",)
    heads: int = 1
    form: str = "sum"
    scale: float = 1.0
    add: str = ""
    norm: str = ""

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[DTYPES[name]] for name in (*self.dtypes, *([self.add] if self.add else [])))

    def inputs(self, device: str) -> dict[str, Tensor]:
        """Random leaves by name; queries are scaled so that scores are of order one: no source dominates."""
        torch.manual_seed(self.n)
        width = self.shape[-1]
        shapes: dict[str, tuple[int, ...]] = {f"source{i}": self.shape for i in range(self.n)}
        dtypes = {f"source{i}": DTYPES[self.dtypes[i % len(self.dtypes)]] for i in range(self.n)}
        shapes["query"] = {"sample": (self.shape[0], width), "token": self.shape}.get(self.query, (width,))
        if self.query == "low-rank":
            shapes |= {"left": (*self.shape[:-1], 3), "right": (width, 3)}
        if self.add:
            shapes["add"], dtypes["add"] = self.shape, DTYPES[self.add]
        for name in NORMS[self.norm][1] if self.norm else ():
            shapes[name] = (width,) if name in ("weight", "bias") else (self.shape[0], width)
        leaves = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name in {"query", "right"} & leaves.keys():
            leaves[name] *= width**-0.5
        return {k: leaf.to(device, dtypes.get(k, torch.float32)).requires_grad_() for k, leaf in leaves.items()}

    def read(self, leaves: dict[str, Tensor]) -> list[Tensor]:
        """Result, sum, weights from the kernels."""
        norm = Norm(NORMS[self.norm][0], 1e-5, *map(leaves.get, NORM_PARAMETERS)) if self.norm else None
        low_rank = {"low_rank": (leaves["left"], leaves["right"])} if "left" in leaves else {}
        function, chosen = (operator.depth_attention, {"kernel": "triton"}) if low_rank else (depth_attention, {})
        with backend("triton"):
            return function(
                self.sources(leaves), leaves["query"], form=self.form, heads=self.heads, scale=self.scale,
                add=leaves.get("add"), norm=norm, return_weights=True, **low_rank, **chosen,
            )  # fmt: skip

    def expected(self, leaves: dict[str, Tensor]) -> list[Tensor]:
        """The same from the reference and PyTorch's norms."""
        sources, query = self.sources(leaves), leaves["query"]
        if "add" in leaves:
            sources[-1] = sources[-1] + leaves["add"]
        if "left" in leaves:
            query = query + leaves["left"] @ leaves["right"].T
        options: dict[str, Any] = {"form": self.form, "heads": self.heads, "scale": self.scale}
        out, weights = reference.depth_attention(sources, query, return_weights=True, **options)
        if self.norm:
            out = Norm(NORMS[self.norm][0], 1e-5, *map(leaves.get, NORM_PARAMETERS)).apply(out)
        return [out, *([sources[-1]] if "add" in leaves else []), weights]

    def sources(self, leaves: dict[str, Tensor]) -> list[Tensor]:
        return [leaves[f"source{i}"] for i in range(self.n)]


NORM_PARAMETERS = ("weight", "bias", "scale", "shift")


def exact(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as float64 leaves."""
    return {name: leaf.detach().double().requires_grad_(leaf.requires_grad) for name, leaf in leaves.items()}


def upstream(results: list[Tensor]) -> list[Tensor]:
    """Random gradients of results, the same for every implementation."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in results]


def gradients(results: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(results, list(wanted.values()), upstream(results))
    for grad, leaf in zip(grads, wanted.values(), strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
    return {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        size = expected[name].detach().abs().max().item()
        error = (value.detach().double() - expected[name].detach()).abs().max().item()
        assert error <= tolerance * size, f"{name}: off by {error:.1e} of {size:.1e}"


def check(case: Case, device: str, outputs: slice = slice(None)) -> None:
    """Values and gradients of the chosen results; upstream gradients exist for those alone."""
    leaves = case.inputs(device)
    doubles = exact(leaves)
    results, wanted = case.read(leaves), case.expected(doubles)
    names = ["result", *(["sum"] if case.add else []), "weights"]
    assert len(results) == len(wanted) == len(names)
    assert_close(dict(zip(names, results, strict=True)), dict(zip(names, wanted, strict=True)), case.tolerance)
    assert_close(gradients(results[outputs], leaves), gradients(wanted[outputs], doubles), case.tolerance)


SIZES = [(n, width) for n in (1, 2, 9, 33, 65) for width in (16, 48, 96, 192, 384) if n * width <= 9 * 384]


@covering(size={f"n{n}-D{width}": (n, width) for n, width in SIZES}, dtype=["fp32", "bf16"])
def test_any_depth_and_width(size, dtype, triton_device):
    n, width = size
    """n up to a 32-layer model read by every sublayer; widths that are no powers of two; an odd number of tokens."""
    check(Case(n, (1, 3, width), dtypes=(dtype,)), triton_device)


@pytest.mark.parametrize(("width", "norm"), [(1, ""), (33, ""), (33, "adaln-affine"), (100, ""), (100, "adaln-affine")])
def test_widths_that_are_no_multiple_of_sixteen(width, norm, triton_device):
    check(Case(4, (2, 3, width), norm=norm), triton_device)


OPTIONS = {
    "sample": Case(query="sample"),
    "token": Case(query="token"),
    "low-rank": Case(query="low-rank"),
    "mean": Case(form="mean"),
    "scaled": Case(scale=0.3),
    "h2-static": Case(heads=2),
    "h3-sample-mean": Case(query="sample", heads=3, form="mean"),
    "h4-token": Case(query="token", heads=4),
    "h3-low-rank": Case(query="low-rank", heads=3),
    "h4-narrow": Case(shape=(2, 5, 16), heads=4),
    "h3-odd": Case(shape=(2, 5, 33), heads=3),
    "add": Case(add="fp32"),
    "add-to-one-source": Case(1, add="fp32"),
    "add-sample-h2": Case(add="fp32", query="sample", heads=2),
    "add-token": Case(add="fp32", query="token"),
    "add-low-rank-layer": Case(add="fp32", query="low-rank", norm="layer-affine"),
    "add-adaln-mean": Case(5, add="fp32", norm="adaln-affine", form="mean"),
    "token-adaln": Case(query="token", norm="adaln"),
    "sample-h3-rms": Case(query="sample", heads=3, norm="rms-affine"),
    "n9-adaln-h2": Case(9, heads=2, norm="adaln-affine"),
    "n20-adaln-add": Case(20, (2, 3, 48), norm="adaln-affine", add="fp32"),
    "n12-token-low": Case(12, query="low-rank", norm="layer-affine"),
    "n11-sample-h3-add": Case(11, query="sample", heads=3, add="fp32"),
    "n12-mixed": Case(12, dtypes=("bf16", "fp32", "bf16"), norm="adaln-affine", query="sample"),
    "n11-mixed-token-add": Case(11, dtypes=("fp32", "bf16"), query="token", add="fp32"),
    "n10-odd-width": Case(10, shape=(2, 5, 33), norm="rms"),
    "many-tokens": Case(2, (2, 37, 96), norm="adaln-affine", query="sample"),  # several programs, several tiles in each
    "tokens-only": Case(shape=(7, 48)),
    "tokens-only-token-layer": Case(shape=(7, 48), query="token", norm="layer-affine"),
    "one-token": Case(shape=(48,)),
    "image-static": Case(shape=(2, 3, 2, 48), norm="rms"),
    "image-sample": Case(shape=(2, 3, 2, 48), query="sample", add="fp32"),
    "image-token": Case(shape=(2, 3, 2, 48), query="token", norm="ada-rms"),
    "video-adaln": Case(shape=(2, 2, 2, 3, 16), norm="adaln"),
    "batch-of-one": Case(shape=(1, 5, 48), query="sample", norm="adaln"),
    "bf16-add-adaln": Case(4, dtypes=("bf16",), add="bf16", norm="adaln-affine"),
    "bf16-token-h3": Case(4, query="token", heads=3, dtypes=("bf16",)),
    "fp16-layer": Case(4, dtypes=("fp16",), norm="layer-affine"),
    "mixed-bf16-fp32": Case(5, dtypes=("bf16", "fp32")),
    "mixed-adaln": Case(5, dtypes=("bf16", "bf16", "fp32"), norm="adaln-affine", query="sample"),
    "mixed-fp32-last": Case(4, dtypes=("bf16", "bf16", "bf16", "fp32"), query="token"),
    "mixed-sum": Case(3, dtypes=("bf16", "bf16", "fp32"), add="bf16", norm="layer-affine"),
    "mixed-sum-promotes": Case(3, dtypes=("bf16",), add="fp32"),
}


SLOW = ("n20-adaln-add", "n11-mixed-token-add", "n9-adaln-h2", "n12-mixed", "n10-odd-width")


@pytest.mark.parametrize("name", [exhaustive(name) if name in SLOW else name for name in OPTIONS])
def test_every_option(name, triton_device):
    check(OPTIONS[name], triton_device)


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm(norm, triton_device):
    check(Case(norm=norm), triton_device)


@pytest.mark.parametrize("n", [3, 17], ids=["held", "walked-twice"])
@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(2, 3)], ids=["result", "sum", "weights"])
def test_one_of_the_results_can_be_used_alone(used, n, triton_device):
    """Leaves without a part in it, such as the norm's parameters in the weights, have a gradient of zero or none."""
    case = Case(n, (2, 3, 48), heads=2, norm="adaln-affine", add="fp32")
    leaves = case.inputs(triton_device)
    doubles = exact(leaves)
    grads = []
    for results, given in ((case.read(leaves), leaves), (case.expected(doubles), doubles)):
        found = torch.autograd.grad(
            results[used], list(given.values()), upstream(results)[used], allow_unused=True, materialize_grads=True
        )
        grads.append(dict(zip(given, found, strict=True)))
    assert_close(*grads, case.tolerance)


WITHOUT = [
    ("source0", "source2", "query"),
    ("source1", "add", "weight", "shift"),
    ("source2", "add", "scale"),
    ("source0", "source1", "source2", "source10", "add"),
    ("query", "weight", "bias", "scale", "shift"),
    ("source0", "source1", "source2", "add", "query"),
]


@covering(without={"+".join(names): names for names in WITHOUT}, n={"": 3, "looped": 11})
def test_only_what_requires_grad_gets_one(n, without, triton_device):
    case = Case(n, norm="adaln-affine", add="fp32")
    leaves = case.inputs(triton_device)
    for name in leaves.keys() & set(without):
        leaves[name].requires_grad_(False)
    doubles = exact(leaves)
    results, wanted = case.read(leaves), case.expected(doubles)
    used = [i for i, result in enumerate(wanted) if result.requires_grad]
    found = gradients([results[i] for i in used], leaves)
    expected = gradients([wanted[i] for i in used], doubles)
    assert found and not any(name.split()[-1] in without for name in found)
    assert_close(found, expected, case.tolerance)


VIEWS = {
    "without-class-token": lambda whole: whole[:, 1:],
    "every-second-token": lambda whole: whole[:, ::2],
    "transposed": lambda whole: whole.transpose(0, 1),
    "one-sample-for-all": lambda whole: whole[:1].expand(3, -1, -1),
    "half-the-width": lambda whole: whole[..., 24:],
    "every-second-column": lambda whole: whole[..., ::2],
    "columns-first": lambda whole: whole.transpose(1, 2),
}


@covering(view=list(VIEWS), query=["static", "sample", "token"], n={"": 3, "looped": 11})
def test_views_of_larger_tensors(view, query, n, triton_device):
    """Sources and `add` as slices of what a model has, next to some that are contiguous."""
    shape = VIEWS[view](torch.empty(4, 7, 48)).shape
    case = Case(n, tuple(shape), query, add="fp32", norm="adaln")
    leaves = case.inputs(triton_device)
    for name in ("source0", "source2", "add"):
        leaves[name] = torch.randn(4, 7, 48, device=triton_device, requires_grad=True)

    def viewed(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return given | {name: VIEWS[view](given[name]) for name in ("source0", "source2", "add")}

    doubles = exact(leaves)
    results, wanted = case.read(viewed(leaves)), case.expected(viewed(doubles))
    assert_close({"result": results[0]}, {"result": wanted[0]}, case.tolerance)
    assert_close(gradients(results, leaves), gradients(wanted, doubles), case.tolerance)


@pytest.mark.parametrize("query", ["static", "token"])
@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced"])
def test_upstream_gradients_that_are_not_contiguous(kind, query, triton_device):
    case = Case(3, (2, 5, 48), query, add="fp32", norm="rms-affine")
    leaves = case.inputs(triton_device)
    doubles = exact(leaves)
    consume = {
        "transposed": lambda out: out.transpose(1, 2).contiguous(),
        "expanded": lambda out: out.sum((1, 2)),
        "sliced": lambda out: out[:, 1:],
    }[kind]
    found, expected = (
        gradients([consume(result) for result in results[:2]], given)
        for results, given in ((case.read(leaves), leaves), (case.expected(doubles), doubles))
    )
    assert_close(found, expected, case.tolerance)


@pytest.mark.parametrize("shape", [(0, 5, 48), (2, 0, 48)], ids=["no-samples", "no-tokens"])
def test_an_empty_batch(shape, triton_device):
    """Gradients are there and zero: a process of a distributed run that ran out of data waits for nobody."""
    case = Case(3, shape, "sample", add="fp32", norm="adaln-affine")
    leaves = case.inputs(triton_device)
    results = case.read(leaves)
    assert [tuple(r.shape) for r in results] == [shape, shape, (3, *shape[:-1], 1)]
    assert not any(grad.any() for grad in gradients(results, leaves).values())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(9, heads=2), id="held"),
        exhaustive(Case(14, (1, 37, 96), norm="adaln-affine", dtypes=("bf16",)), id="walked-twice"),
    ],
)
def test_two_runs_give_the_same_bits(case, triton_device):
    runs = []
    for _ in range(2):
        leaves = case.inputs(triton_device)
        results = case.read(leaves)
        runs.append([*results, *gradients(results, leaves).values()])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_large_scores_do_not_overflow(triton_device):
    case = Case(5, norm="layer")
    leaves = case.inputs(triton_device)
    leaves["query"] = torch.full((48,), 1e4, device=triton_device, requires_grad=True)
    results = case.read(leaves)
    assert all(tensor.isfinite().all() for tensor in [*results, *gradients(results, leaves).values()])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 7, 48), {"dtype": torch.float64}, "fp32, fp16 or bf16, got torch.float64"),
        ((2, 7, 48), {"device": "meta"}, "on meta, not on a GPU"),
        ((1, 8208), {}, "at most D=8192.*got D=8208"),
        ((1, 1, 1), {"n": 258}, "257 sources.*258 sources"),
        ((1, 1, 35), {"heads": 5}, "4 heads, got.*5 heads"),
    ],
    ids=["float64", "device", "width", "sources", "heads"],
)
def test_what_the_kernels_cannot_compute_is_an_error_and_eager_by_default(shape, options, message, triton_device):
    options = {"device": triton_device, **options}
    n, heads = options.pop("n", 2), options.pop("heads", 1)
    sources, query = [torch.randn(shape, **options) for _ in range(n)], torch.randn(shape[-1:], **options)
    with backend("triton"), pytest.raises(ValueError, match="backend 'triton' cannot compute this read.*" + message):
        depth_attention(sources, query, heads=heads)
    assert depth_attention(sources, query, heads=heads).shape == shape


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match="backend must be one of auto, eager, triton, got 'cuda'"), backend("cuda"):
        pass
