"""tokens/v1 (+ fgrams/v1) -> checkpoint/v1. See `--help`."""

from ray_jobs.runtime.command_line import main
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.train import run

if __name__ == "__main__":
    main(TrainConfig, run)
