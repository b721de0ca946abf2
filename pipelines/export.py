"""checkpoint/v1 + embeddings/v1 -> served/v1. See `--help`."""

from ray_jobs.runtime.command_line import main
from ray_jobs.serve.export import ExportConfig, run

if __name__ == "__main__":
    main(ExportConfig, run)
