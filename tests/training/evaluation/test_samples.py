"""Samples: fixed noise, guidance, and files that hold the pixels they were given."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from training.data import encoders
from training.evaluation import samples


def moving_square(size: tuple[int, int] = (24, 24), frames: int = 8) -> Tensor:
    """A clip (3, F, H, W): a red square that moves over a dark gradient."""
    clip = torch.linspace(-1, 0, size[1]).expand(3, frames, *size).clone()
    for frame in range(frames):
        clip[0, frame, 4:12, frame : frame + 8] = 1.0
    return clip


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_noise_of_a_row_depends_on_its_seed_and_place_alone() -> None:
    many = samples.fixed_noise(3, 4, (2, 3, 4, 4))
    torch.manual_seed(99)
    assert torch.equal(many[:2], samples.fixed_noise(3, 2, (2, 3, 4, 4)))
    assert not torch.equal(many[0], many[1])
    assert not torch.equal(many, samples.fixed_noise(4, 4, (2, 3, 4, 4)))
    assert many.std() == pytest.approx(1, abs=0.1)


def test_guidance_moves_from_the_empty_text_to_the_text_and_beyond() -> None:
    calls = []

    def model(noisy: Tensor, timestep: Tensor, text: dict[str, Tensor]) -> Tensor:
        calls.append(len(noisy))
        return noisy * text["text"].mean((1, 2)).view(-1, 1, 1, 1, 1) + timestep.view(-1, 1, 1, 1, 1)

    noisy, timestep = torch.randn(2, 3, 2, 4, 4), torch.tensor([1.0, 2.0])
    text = {"text": torch.stack([torch.full((5, 6), 2.0), torch.full((5, 6), 3.0)])}
    empty = {"text": torch.full((5, 6), 1.0)}
    with_text = model(noisy, timestep, text)
    without = model(noisy, timestep, {"text": torch.ones(2, 5, 6)})
    assert torch.equal(samples.guided(model, text, empty, 1.0)(noisy, timestep), with_text)
    assert torch.allclose(samples.guided(model, text, empty, 0.0)(noisy, timestep), without)
    found = samples.guided(model, text, empty, 4.0)(noisy, timestep)
    assert torch.allclose(found, without + 4 * (with_text - without), atol=1e-5)
    assert calls[-3:] == [2, 4, 4]  # no guidance, no second half


def test_frames_are_pixels_in_0_to_255() -> None:
    clip = torch.tensor([-3.0, -1.0, 0.0, 1.0, 5.0]).view(1, 1, 1, 5)
    assert samples.to_frames(clip)[0, 0, :, 2].tolist() == [0, 0, 128, 255, 255]
    assert samples.to_frames(moving_square()).shape == (8, 24, 24, 3)
    with pytest.raises(ValueError, match=r"1 or 3 channels, got shape \(16, 2, 3, 3\)"):
        samples.to_frames(torch.zeros(16, 2, 3, 3))
    with pytest.raises(ValueError, match="finite"):
        samples.to_frames(torch.full((3, 2, 3, 3), torch.nan))


@pytest.mark.parametrize("size", [(24, 24), (25, 37), (201, 203)], ids=str)
def test_an_mp4_shows_the_clip_enlarged(tmp_path: Path, size: tuple[int, int]) -> None:
    frames = samples.to_frames(moving_square(size))
    samples.write_mp4(tmp_path / "clip.mp4", frames, fps=8)
    found = decoded(tmp_path / "clip.mp4")
    factor = max(1, -(-192 // min(size)))
    assert found.shape[0] == 8 and all(side % 2 == 0 and side >= 192 for side in found.shape[1:3])
    centres = found[:, factor // 2 :: factor, factor // 2 :: factor][:, : size[0], : size[1]].astype(int)
    assert np.abs(centres - frames).mean() < 6  # h264, and colour at half the resolution
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 8)


def test_a_gif_plays_all_frames(tmp_path: Path) -> None:
    frames = samples.to_frames(moving_square())
    samples.write_gif(tmp_path / "clip.gif", frames, fps=10)
    with Image.open(tmp_path / "clip.gif") as found:
        assert (found.n_frames, found.info["duration"], found.info["loop"]) == (8, 100, 0)
        found.seek(5)
        pixels = np.asarray(found.convert("RGB"))[4::8, 4::8].astype(int)
    assert np.abs(pixels - frames[5]).max() < 24


def test_strips_are_lossless_and_large_frames_are_reduced(tmp_path: Path) -> None:
    frames = samples.to_frames(moving_square((20, 30)))
    samples.write_strip(tmp_path / "small.png", frames)
    assert np.array_equal(samples.read_strip(tmp_path / "small.png", 8), frames)
    samples.write_strip(tmp_path / "large.png", samples.to_frames(moving_square((300, 512), 2)))
    assert samples.read_strip(tmp_path / "large.png", 2).shape == (2, 150, 256, 3)


def test_write_samples_makes_every_file_that_it_names(tmp_path: Path) -> None:
    clips = torch.stack([moving_square(), -moving_square(), moving_square().flip(1)])
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "clip_9.mp4").write_text("of an earlier evaluation")
    found = samples.write_samples(
        tmp_path, clips, ["a", "b", "a"], seed=7, fps=8, real={"a": moving_square(), "other": moving_square()}
    )
    assert (found["seed"], found["captions"], found["frames"]) == (7, ["a", "b", "a"], 8)
    named = [found["sheet"], found["gif"], *found["mp4"], *found["strips"], *found["real"].values()]
    assert sorted(named) == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert len(found["mp4"]) == len(found["strips"]) == 3 and list(found["real"]) == ["a"]
    assert np.array_equal(samples.read_strip(tmp_path / found["strips"][1], 8), samples.to_frames(clips[1]))
    with Image.open(tmp_path / found["sheet"]) as sheet:
        assert sheet.height > 4 * 96  # real a, two samples of a, one of b
    with Image.open(tmp_path / found["gif"]) as animation:
        assert animation.n_frames == 8
    with pytest.raises(ValueError, match="one per clip, at least one, got 1 for 3 clips"):
        samples.write_samples(tmp_path, clips, ["a"], seed=0)


def test_a_sheet_of_a_long_clip_shows_some_frames_from_the_first_to_the_last(tmp_path: Path) -> None:
    frames = np.repeat(np.arange(81, dtype=np.uint8)[:, None, None, None] * 3, 3, axis=3).repeat(96, 1).repeat(96, 2)
    samples.write_sheet(tmp_path / "sheet.png", [("long", frames)])
    row = np.asarray(Image.open(tmp_path / "sheet.png"))[40]
    assert row[-16 * 98 :: 98][:, 0].tolist()[:2] == [0, 15] and row[-4, 0] == 240
    assert len(row) < 17 * 98


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "AutoencoderKLHunyuanVideo"])
def test_latents_are_decoded_by_a_vae_from_a_folder(tmp_path: Path, name: str) -> None:
    """Scaling and shifting undone: the pixels are those of the VAE's own decoder on raw latents."""
    import diffusers

    options = {
        "AutoencoderKLWan": {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False],
            "latents_mean": [0.1, 0.2, 0.3, 0.4],
            "latents_std": [1.0, 2.0, 3.0, 4.0],
        },
        "AutoencoderKLHunyuanVideo": {
            "latent_channels": 4,
            "block_out_channels": (4, 4),
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 2,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 2,
            "spatial_compression_ratio": 2,
            "temporal_compression_ratio": 4,
            "scaling_factor": 0.5,
        },
    }[name]
    torch.manual_seed(0)
    vae = getattr(diffusers, name)(**options).eval()
    vae.save_pretrained(tmp_path / "pipeline" / "vae")
    raw = torch.randn(2, 4, 2, 4, 4)
    if name == "AutoencoderKLWan":
        mean, std = (torch.tensor(options[key]).view(1, 4, 1, 1, 1) for key in ("latents_mean", "latents_std"))
        latents = (raw - mean) / std
    else:
        latents = raw * 0.5
    with torch.no_grad():
        expected = vae.decode(raw).sample
    for folder in ("pipeline", "pipeline/vae"):
        found = encoders.decode_clips(encoders.load_vae(tmp_path / folder), latents)
        assert found.shape[1] == 3 and torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match="folder of a diffusers VAE"):
        encoders.load_vae(tmp_path)
