"""a model + tokens/v1, task files -> evaluation/v1. See `--help`."""

from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.evaluate.evaluate import run
from ray_jobs.runtime.command_line import main

if __name__ == "__main__":
    main(EvaluateConfig, run)
