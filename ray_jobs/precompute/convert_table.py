"""embeddings/v1 -> embeddings/v1 with rows of another format."""

from functools import partial

from ray_jobs.precompute.config import ConvertConfig
from ray_jobs.precompute.worker import convert_shard
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.runtime.units import run_units
from scone_core.artifacts import storage
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import EmbeddingsManifest, Shard, load_manifest
from scone_core.table.row_formats import STORAGE


def run(config: ConvertConfig) -> EmbeddingsManifest:
    """Write `config.table` in the format `config.row_format`, shard by shard."""
    source = load_manifest(EmbeddingsManifest, config.table)
    inputs = {"table": source.fingerprint}
    build = partial(_convert, config, source)
    return run_stage(EmbeddingsManifest, config, inputs, build, stage="convert")


def _convert(
    config: ConvertConfig, source: EmbeddingsManifest, shared: SharedFields, log: RunLog
) -> EmbeddingsManifest:
    connect(config.cluster)
    shards = run_units(
        "convert",
        [shard.name for shard in source.shards],
        partial(convert_shard, config=config, source=source),
        kind=Shard,
        folder=config.out,
    )
    if source.ranks is not None:
        names = (storage.join(folder, source.ranks.name) for folder in (config.table, config.out))
        storage.copy_file(*names)
    changed = {
        **shared,
        "shards": tuple(shards),
        "row_format": config.row_format,
        "bytes_per_row": STORAGE[config.row_format].num_bytes(source.width),
        "converted_from": (*source.converted_from, source.row_format),
    }
    manifest = EmbeddingsManifest.model_validate(source.model_dump() | changed)
    num_bytes = manifest.num_rows * manifest.bytes_per_row
    print(f"convert: {manifest.num_rows:,} rows of {config.row_format}, {num_bytes:,} bytes")
    return manifest
