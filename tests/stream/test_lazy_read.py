"""A read and the LayerNorm that takes it run as one operation; that must show in the memory alone."""

import pytest
import timm
import torch
from torch import nn

import attnres_vision
from attnres_vision.ops import reference
from attnres_vision.stream.lazy_read import LazyRead

QUERIES = [{}, {"query": "token", "rank": 3}, {"query": "block", "rank": 3}, {"query": "condition", "rank": 3}]


def small_vit(**attnres) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=3, num_heads=2, num_classes=5)
    attnres_vision.attach(model, block_size=2, **attnres)
    for reader in attnres_vision.readers(model).values():
        for parameter in reader.parameters():
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("attnres", QUERIES, ids=lambda attnres: attnres.get("query", "static"))
def test_fused_reads_equal_reads_that_someone_watches(attnres):
    """A forward hook on a reader makes its read a tensor of its own: the same logits, and gradients to rounding."""
    model = small_vit(**attnres).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def run():
        model.zero_grad()
        logits = model(images)
        logits.square().sum().backward()
        return logits, [parameter.grad.clone() for parameter in model.parameters()]

    logits, gradients = run()
    seen = []
    for reader in attnres_vision.readers(model).values():
        reader.register_forward_hook(lambda reader, args, output: seen.append(output))
    watched_logits, watched_gradients = run()
    assert len(seen) == 7 and all(isinstance(read, torch.Tensor) for read in seen)
    assert torch.equal(logits, watched_logits)
    torch.testing.assert_close(gradients, watched_gradients, rtol=1e-10, atol=1e-12)


def test_a_training_step_saves_one_copy_less_per_read():
    """Saved for backward by `norm(read)`: the sources, which exist anyway, and a few numbers per token."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 50, 64, requires_grad=True) for _ in range(4)]
    norm, query = nn.LayerNorm(64), torch.randn(64, requires_grad=True)

    def saved_bytes(read) -> int:
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t) if t.numel() else t, lambda t: t
        ):
            result = norm(read())
        own = {t.untyped_storage().data_ptr() for t in (*sources, query, norm.weight, norm.bias)}
        assert result.requires_grad
        return sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)

    lazy = saved_bytes(lambda: LazyRead(sources, query))
    eager = saved_bytes(lambda: LazyRead(sources, query).tensor())
    assert eager - lazy == sources[0].nbytes
    assert lazy < 0.3 * sources[0].nbytes


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(24, elementwise_affine=False),
        nn.LayerNorm(24, eps=0.1),
        nn.LayerNorm((7, 24)),
        nn.LayerNorm(24).double(),
        timm.layers.LayerNormFp32(24),
    ],
    ids=["no-affine", "large-eps", "over-tokens", "other-dtype", "timm-fp32"],
)
def test_any_layer_norm_gets_what_it_asks_for(norm):
    torch.manual_seed(0)
    dtype = torch.float64 if norm.weight is not None and norm.weight.dtype == torch.float64 else torch.float32
    sources = [torch.randn(2, 7, 24, dtype=dtype) for _ in range(3)]
    query = torch.randn(24)
    expected = norm(reference.depth_attention(sources, query))
    torch.testing.assert_close(norm(LazyRead(sources, query)), expected, rtol=2e-5, atol=2e-5)
    assert norm(LazyRead(sources, query)).dtype == expected.dtype


def test_mixed_dtypes_are_read_before_the_norm():
    """Under autocast the embedding is fp32 and the outputs bf16: the norm then gets the fp32 tensor."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 7, 24), torch.randn(2, 7, 24).bfloat16()]
    norm, query = nn.LayerNorm(24), torch.randn(24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = norm(LazyRead(sources, query))
    torch.testing.assert_close(result, norm(reference.depth_attention(sources, query)), rtol=1e-5, atol=1e-5)


def test_everything_else_sees_the_tensor():
    torch.manual_seed(0)
    sources, query = [torch.randn(2, 7, 24) for _ in range(3)], torch.randn(24)
    read, expected = LazyRead(sources, query), reference.depth_attention(sources, query)
    assert read.shape == expected.shape and read.dtype == expected.dtype
    torch.testing.assert_close(torch.nn.functional.gelu(read), torch.nn.functional.gelu(expected))
    torch.testing.assert_close(read.mean(dim=1), expected.mean(dim=1))


def test_flops_are_counted_on_the_meta_device():
    """Depth attention is in the count: four more sources per read are more FLOPs, and no memory is touched."""
    counts = []
    for block_size in (1, 6):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, device="meta")
        attnres_vision.attach(model, block_size=block_size)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 32, 32, device="meta"))
        counts.append(counter.get_total_flops())
    tokens, width, flops_per_element = 5, 192, 6
    # Full reads 2, 3, ..., 7 sources; one block reads embedding and partial sum six times
    assert counts[0] - counts[1] == flops_per_element * tokens * width * (sum(range(2, 8)) - 6 * 2)
