"""fgrams/v1 + a newer count -> fgrams/v1: the next generation of an f-gram set."""

from pydantic import Field, PositiveInt

from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.tracking import log_manifest, stage_run
from scone_core.artifacts.config import InputPath
from scone_core.artifacts.folders import claim, publish, shared_fields
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
    if done := claim(FGramsManifest, config.out, config, inputs):
        print(f"grow: {config.out} is up to date")
        return done
    shared = shared_fields(FGramsManifest, config, inputs)
    with stage_run(config, stage="grow", fingerprint=shared["fingerprint"]):
        fields = growth.grow(
            sources, config.out, num_new=config.num_new, rows_per_shard=config.rows_per_shard
        )
        manifest = FGramsManifest.model_validate({**shared, **fields})
        log_manifest(manifest)
    print(
        f"grow: generation {len(manifest.generations)}: "
        f"{manifest.num_fgrams - sources.base.num_fgrams:,} f-grams behind the "
        f"{sources.base.num_fgrams:,} of {config.fgrams}"
    )
    return publish(config.out, manifest)
