"""tokens/v1 -> fgrams/v1. See `--help`."""

from ray_jobs.count.config import CountConfig
from ray_jobs.count.fgram_count import run
from ray_jobs.runtime.command_line import main

if __name__ == "__main__":
    main(CountConfig, run)
