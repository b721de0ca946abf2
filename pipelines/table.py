"""embeddings/v1 -> another row format, a verdict, or another store. See `--help`."""

from ray_jobs.precompute.table_tools import main

if __name__ == "__main__":
    main()
