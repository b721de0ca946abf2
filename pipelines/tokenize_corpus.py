"""documents -> tokens/v1. See `--help`."""

from ray_jobs.runtime import main
from ray_jobs.tokenize_config import TokenizeConfig
from ray_jobs.tokenize_corpus import run

if __name__ == "__main__":
    main(TokenizeConfig, run)
