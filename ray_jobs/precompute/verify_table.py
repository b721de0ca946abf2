"""embeddings/v1 -> a verdict: compare files with the manifest and rows with the f-gram model."""

from ray_jobs.precompute.config import VerifyConfig
from scone_core.table.check import RowCheck, check_table


def run(config: VerifyConfig) -> RowCheck:
    """Check all files of a table and `config.num_rows` random rows; a difference is an error."""
    check = check_table(
        config.table,
        checkpoint=config.checkpoint,
        fgrams=config.fgrams,
        num_rows=config.num_rows,
        seed=config.seed,
    )
    print(
        f"{config.table}: files agree with the manifest, {check.num_rows:,} rows with the "
        f"model (largest error {check.largest_error:.2f} of what rounding allows, mean "
        f"cosine error {check.mean_cosine_error:.1e})"
    )
    return check
