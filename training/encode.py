"""Encode the clips and captions of videos once, for training on latents.

    python -m training.encode --data.root videos --data.num_frames 49 --data.size "[480, 720]" \\
        --pipeline path/to/CogVideoX-2b --output_dir latents
    python -m training.encode --config FILE

Writes shards and a manifest (`training/data/latents.py`) into `output_dir`; training reads them with
`data.name: latents` and `data.root`. The same command again continues where a run was stopped, and replaces shards that
are damaged.
"""

from __future__ import annotations

if __name__ == "__main__":
    from training.system.processes import end_with_parent

    end_with_parent()  # before the slow imports

from training.config.encode import EncodeConfig
from training.config.io import load_config
from training.data.encoding import encode
from training.system.processes import stoppable


def main(argv: list[str] | None = None) -> None:
    config = load_config(EncodeConfig, argv)
    message = f"whole shards are kept in {config.output_dir}. The same command goes on from there"
    with stoppable(lambda: message):
        manifest = encode(config)
    count = sum(len(shard["samples"]) for shard in manifest["clips"])
    print(f"{config.output_dir}: {count} clips of shape {tuple(manifest['clip_shape'])}")


if __name__ == "__main__":
    main()
