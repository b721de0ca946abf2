"""fgrams/v1 + a newer count -> fgrams/v1: the next generation of an f-gram set."""

from functools import partial

from pydantic import Field, PositiveInt

from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts.config import InputPath
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import FGramsManifest
from scone_core.fgrams import growth
from scone_core.fgrams.growth import GrowthSources


class GrowConfig(JobConfig):
    """Options of growing an f-gram set."""

    fgrams: InputPath
    """Folder or URI of the fgrams/v1 artifact that grows. It stays as it is; the next generation
    takes over its shards."""
    counted: InputPath
    """Folder or URI of the fgrams/v1 artifact of a newer count, e.g. of a grown corpus."""
    num_new: PositiveInt | None = None
    """F-grams to add: the most frequent ones that are new; by default all."""
    rows_per_shard: int = Field(default=1 << 22, ge=1)
    """F-grams per Parquet file."""


def run(config: GrowConfig) -> FGramsManifest:
    """Append the f-grams of a newer count to an f-gram set, whose ids stay."""
    sources = GrowthSources.open(config.fgrams, config.counted)
    inputs = {"fgrams": sources.base.fingerprint, "counted": sources.counted.fingerprint}
    return run_stage(FGramsManifest, config, inputs, partial(_grow, config, sources), stage="grow")


def _grow(
    config: GrowConfig, sources: GrowthSources, shared: SharedFields, log: RunLog
) -> FGramsManifest:
    fields = growth.grow(
        sources, config.out, num_new=config.num_new, rows_per_shard=config.rows_per_shard
    )
    manifest = FGramsManifest.model_validate({**shared, **fields})
    num_before = sources.base.num_fgrams
    print(
        f"grow: generation {len(manifest.generations)}: {manifest.num_fgrams - num_before:,} "
        f"f-grams behind the {num_before:,} of {config.fgrams}"
    )
    return manifest
