"""Train a timm classifier with standard residuals or Attention Residuals.

    accelerate launch training/image.py --config configs/image/imagenet_vit_s16.yaml --variant block --data.root DIR
    python -m training.image --config FILE --optim.lr 1e-3

The loop is `training/loop/trainer.py`, what it trains `training/tasks/image.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run as a file: modules are found from the repository, not from here
        sys.path[0] = str(Path(__file__).resolve().parents[1])
    from training.system.processes import end_with_parent

    end_with_parent()  # before the slow imports

from training.config.image import ImageConfig
from training.loop.run import run_command
from training.tasks.image import train


def main(argv: list[str] | None = None) -> None:
    run_command(ImageConfig, train, argv)


if __name__ == "__main__":
    main()
