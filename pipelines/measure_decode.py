"""two served/v1 folders -> decode/v1. See `--help`."""

from ray_jobs.runtime.command_line import main
from ray_jobs.serve.measure_decode import DecodeConfig, run

if __name__ == "__main__":
    main(DecodeConfig, run)
