"""What tasks and actors of the precompute stage do.

Workers import this module and no driver: MLflow alone would take them seconds.
"""

import pyarrow as pa
import torch

from ray_jobs.precompute.config import ConvertConfig
from scone_core.artifacts.manifests import EmbeddingsManifest, Shard
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.artifacts.units import write_receipt
from scone_core.table.build import BuildPlan
from scone_core.table.row_formats import convert_rows, embedding_batch, table_rows


class BlockActor:
    """A BlockWriter that leaves a receipt for every block."""

    def __init__(
        self, plan: BuildPlan, sorted_fgrams: Shard, device: str, num_threads: int
    ) -> None:
        from scone_core.table.blocks import BlockWriter

        torch.set_num_threads(num_threads)
        self._plan, self._writer = plan, BlockWriter(plan, sorted_fgrams, device)

    def __call__(self, batch: pa.Table) -> pa.Table:
        number = batch["number"][0].as_py()
        shard = self._writer.write(number)
        write_receipt(self._plan.out, self._plan.block_names[number], shard)
        return pa.table({"num_fgrams": [shard.num_rows]})


def convert_shard(number: int, *, config: ConvertConfig, source: EmbeddingsManifest) -> Shard:
    """Write a shard of the table `source` in the row format of `config`."""
    shard = source.shards[number]
    rows_SC = table_rows(map_shard(config.table, shard))
    rows_SC = convert_rows(rows_SC, source.row_format, config.row_format)
    batch = embedding_batch(rows_SC, config.row_format)
    return write_shard(config.out, shard.name, batch, first_id=shard.first_id)
