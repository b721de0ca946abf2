"""documents -> tokens/v1. See `--help`."""

from ray_jobs.runtime.command_line import main
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.tokenize.tokenize_corpus import run

if __name__ == "__main__":
    main(TokenizeConfig, run)
