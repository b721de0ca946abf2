"""checkpoint/v1 + embeddings/v1 -> served/v1. See `--help`."""

from ray_jobs.export_model import ExportConfig, run
from ray_jobs.runtime import main

if __name__ == "__main__":
    main(ExportConfig, run)
