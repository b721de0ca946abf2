"""embeddings/v1 -> embeddings/v1 with rows of another format."""

from functools import partial
from typing import Any

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.tracking import log_manifest, stage_run
from ray_jobs.runtime.units import run_units
from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath
from scone_core.artifacts.folders import claim, publish, shared_fields
from scone_core.artifacts.manifests import EmbeddingsManifest, RowFormat, Shard, load_manifest
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.table.row_formats import (
    STORAGE,
    convert_rows,
    embedding_batch,
    table_rows,
)


class Convert(JobConfig):
    """Write a table in another row format, without the model."""

    table: InputPath
    """Folder or URI of the embeddings/v1 artifact to convert."""
    row_format: RowFormat = "int8"
    """Format of the rows to write."""


def convert(config: Convert) -> EmbeddingsManifest:
    """Write `config.table` in the format `config.row_format`, shard by shard."""
    source = load_manifest(EmbeddingsManifest, config.table)
    inputs = {"table": source.fingerprint}
    if done := claim(EmbeddingsManifest, config.out, config, inputs):
        print(f"convert: {config.out} is up to date")
        return done
    shared = shared_fields(EmbeddingsManifest, config, inputs)
    connect(config.cluster)
    with stage_run(config, stage="convert", fingerprint=shared["fingerprint"]):
        receipts = run_units(
            "convert",
            [shard.name for shard in source.shards],
            partial(_convert_shard, config=config, source=source),
            folder=config.out,
        )
        if source.ranks is not None:
            names = (
                storage.join(folder, source.ranks.name) for folder in (config.table, config.out)
            )
            storage.copy_file(*names)
        changed = shared | {
            "shards": tuple(Shard.model_validate(receipt) for receipt in receipts),
            "row_format": config.row_format,
            "bytes_per_row": STORAGE[config.row_format].num_bytes(source.width),
            "converted_from": (*source.converted_from, source.row_format),
        }
        manifest = EmbeddingsManifest.model_validate(source.model_dump() | changed)
        publish(config.out, manifest)
        log_manifest(manifest)
    return manifest


def _convert_shard(number: int, *, config: Convert, source: EmbeddingsManifest) -> dict[str, Any]:
    shard = source.shards[number]
    rows_NC = table_rows(map_shard(config.table, shard))
    rows_NC = convert_rows(rows_NC, source.row_format, config.row_format)
    batch = embedding_batch(rows_NC, config.row_format)
    written = write_shard(config.out, shard.name, batch, first_id=shard.first_id)
    return written.model_dump()
