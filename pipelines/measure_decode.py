"""two served/v1 folders -> decode/v1. See `--help`."""

from ray_jobs.measure_decode import DecodeConfig, run
from ray_jobs.runtime import main

if __name__ == "__main__":
    main(DecodeConfig, run)
