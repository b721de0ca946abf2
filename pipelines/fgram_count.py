"""tokens/v1 -> fgrams/v1. See `--help`."""

from ray_jobs.count.count_fgrams import CountConfig, run
from ray_jobs.runtime.units import main

if __name__ == "__main__":
    main(CountConfig, run)
