"""The Frechet distance: zero for equal sets, larger for larger differences, equal to its formula, any extractor."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from training.evaluation.frechet import RANDOM, FrechetDistance, frechet_distance


def clips(count: int, seed: int, shape: tuple[int, ...] = (3, 4, 8, 8)) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


class Means(nn.Module):
    """Mean of every channel and frame: features that a formula can be checked with."""

    def forward(self, video: Tensor) -> Tensor:
        return video.mean((-1, -2)).flatten(1)


class Resized(Means):
    input_size = (2, 6, 6)

    def forward(self, video: Tensor) -> Tensor:
        assert video.shape[2:] == (2, 6, 6)
        return super().forward(video)


def test_equal_sets_are_at_distance_zero_and_the_order_does_not_matter() -> None:
    real = clips(32, 0)
    found = frechet_distance([real[:20], real[20:]], [real.flip(0)])
    assert found["value"] == pytest.approx(0, abs=1e-6)
    assert (found["real"], found["generated"], found["extractor"]) == (32, 32, RANDOM)
    assert "not comparable with FVD" in found["extractor"]


def test_the_distance_grows_with_the_distortion_in_space_and_in_time() -> None:
    real = torch.nn.functional.interpolate(clips(48, 0, (3, 2, 3, 3)), size=(6, 12, 12), mode="trilinear")
    noise = clips(48, 1, (3, 6, 12, 12))
    in_space = [frechet_distance([real], [(1 - s) * real + s * noise])["value"] for s in (0.05, 0.2, 0.6)]
    assert 0 < in_space[0] < in_space[1] < in_space[2]
    still = torch.nn.functional.interpolate(clips(96, 2, (3, 4, 4)), size=(16, 16), mode="bilinear")
    moving = torch.stack([still.roll(frame, -1) for frame in range(8)], dim=2)
    halves = frechet_distance([moving[:48]], [moving[48:]])["value"]
    shuffled = frechet_distance([moving[:48]], [moving[48:, :, [3, 7, 0, 5, 1, 6, 4, 2]]])["value"]
    assert shuffled > 1.5 * halves  # the same frames in another order: the network sees motion


def test_the_distance_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = clips(40, 0), clips(40, 1) * 0.7 + 0.2
    monkeypatch.setitem(sys.modules, "my_features", sys.modules[__name__])
    found = frechet_distance([real], [made], "my_features:Means")
    a, b = (Means()(part).double().numpy() for part in (real, made))
    root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T))
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root.real)
    assert found["value"] == pytest.approx(expected, rel=1e-6)
    assert found["extractor"] == "my_features:Means"
    assert frechet_distance([real], [made], "my_features:Resized")["value"] > 0


def test_a_torchscript_file_is_an_extractor(tmp_path: Path) -> None:
    path = tmp_path / "features.pt"
    torch.jit.trace(Means(), clips(2, 0)).save(str(path))
    found = frechet_distance([clips(8, 0)], [clips(8, 1)], path)
    assert found["extractor"] == str(path)
    assert found["value"] == pytest.approx(frechet_distance([clips(8, 0)], [clips(8, 1)], f"{__name__}:Means")["value"])


def test_grey_clips_and_many_batches_work() -> None:
    grey = clips(6, 0, (1, 3, 5, 5))
    assert frechet_distance(grey.split(1), [grey])["value"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.pt", "no file missing.pt"),
        ("i3d", "'package.module:name', got 'i3d'"),
        ("no_such_package:net", "cannot be imported"),
        ("torch.nn:NoSuchLayer", "cannot be imported"),
        ("builtins:dict", "must be or make an nn.Module, got dict"),
    ],
)
def test_a_wrong_extractor_is_an_error_that_says_so(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrechetDistance(source)


def test_a_file_that_is_no_torchscript_is_an_error(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="must be a TorchScript file"):
        FrechetDistance(tmp_path / "weights.pt")


def test_wrong_clips_are_errors() -> None:
    distance = FrechetDistance()
    with pytest.raises(ValueError, match=r"\(B, C, F, H, W\) with 1 or 3 channels, got shape \(2, 16, 4, 8, 8\)"):
        distance.update(clips(2, 0, (16, 4, 8, 8)), real=True)
    with pytest.raises(ValueError, match=r"values in \[-1, 1\], got up to"):
        distance.update(100 * clips(2, 0), real=True)
    with pytest.raises(ValueError, match="at least 2 real and 2 generated clips, got 0 and 0"):
        distance.result()
    distance.update(clips(3, 0), real=True)
    with pytest.raises(ValueError, match="got 3 and 0"):
        distance.result()
    with pytest.raises(ValueError, match=r"must return features \(1, n\), got \(1, 3, 4, 8, 8\)"):
        FrechetDistance("torch.nn:Identity").update(clips(2, 0), real=True)
