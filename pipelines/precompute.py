"""checkpoint/v1 + fgrams/v1 -> embeddings/v1. See `--help`."""

from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.precompute.precompute import run
from ray_jobs.runtime.command_line import main

if __name__ == "__main__":
    main(PrecomputeConfig, run)
