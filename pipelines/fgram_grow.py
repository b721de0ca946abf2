"""fgrams/v1 + a newer count -> the next generation of the f-grams. See `--help`."""

from ray_jobs.count.fgram_grow import GrowConfig, run
from ray_jobs.runtime.command_line import main

if __name__ == "__main__":
    main(GrowConfig, run)
