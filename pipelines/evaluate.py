"""a model + tokens/v1, task files -> evaluation/v1. See `--help`."""

from ray_jobs.evaluate.evaluate_model import EvaluateConfig, run
from ray_jobs.runtime.units import main

if __name__ == "__main__":
    main(EvaluateConfig, run)
