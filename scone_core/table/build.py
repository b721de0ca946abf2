"""checkpoint/v1 + fgrams/v1 -> the shards of embeddings/v1: how they are cut, sorted and assembled.

F-grams sorted by their tokens are the prefix forest in depth-first order. A block is a range of
that order: a forest whose only foreign nodes are the ancestors of its first f-gram. Blocks spill
their rows by f-gram id (`table_blocks`), shards collect ranges of ids; both are units of work for
any process.

Shapes: S f-grams of one block or shard, K max_n, D width.
"""

import numpy as np
import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import RowFormat, Shard
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.fgrams.fgram_shards import depth_first_order, read_fgrams
from scone_core.table.row_formats import embedding_batch, table_rows


class BuildPlan(Frozen):
    """Which rows are built where, and in which parts."""

    checkpoint: str
    fgrams: str
    out: str
    row_format: RowFormat
    first_id: int
    """F-grams below have their rows already."""
    last_id: int
    num_shards_before: int
    """Shards of the rows that are there already."""
    rows_per_shard: int
    fgrams_per_block: int
    fgrams_per_forest: int

    @property
    def num_fgrams(self) -> int:
        return self.last_id - self.first_id

    @property
    def block_folder(self) -> str:
        """Of the sorted f-grams and the spilled blocks; not needed once every shard is there."""
        return storage.join(self.out, "_blocks")

    @property
    def block_names(self) -> list[str]:
        return [f"block-{n:06d}" for n in range(-(-self.num_fgrams // self.fgrams_per_block))]

    @property
    def shard_names(self) -> list[str]:
        num_shards = -(-self.num_fgrams // self.rows_per_shard)
        return [f"embeddings-{self.num_shards_before + n:06d}" for n in range(num_shards)]


def sort_fgrams(plan: BuildPlan) -> Shard:
    """Write the f-grams in depth-first order as one mapped file."""
    num = plan.num_fgrams
    tokens_SK, n_S, _ = read_fgrams(plan.fgrams, first_id=plan.first_id, num=num)
    order_S = depth_first_order(tokens_SK, n_S)
    tokens = pa.FixedSizeListArray.from_arrays(tokens_SK[order_S].reshape(-1), tokens_SK.shape[1])
    batch = pa.record_batch(
        {"fgram_id": plan.first_id + order_S, "n": n_S[order_S], "tokens": tokens}
    )
    return write_shard(plan.block_folder, "sorted.arrow", batch)


def assemble_rows(plan: BuildPlan, blocks: list[Shard], number: int) -> Shard:
    """Collect the rows of shard `number` from all blocks and publish them in id order."""
    first_id = plan.first_id + number * plan.rows_per_shard
    last_id = min(first_id + plan.rows_per_shard, plan.last_id)
    ids, rows = [], []
    for block in blocks:
        spilled = map_shard(plan.block_folder, block)
        ids_S = spilled["fgram_id"].to_numpy()
        part = slice(*np.searchsorted(ids_S, [first_id, last_id]))
        ids.append(ids_S[part])
        rows.append(table_rows(spilled)[part])
    rows_SD = np.empty((last_id - first_id, rows[0].shape[1]), rows[0].dtype)
    for ids_M, rows_MD in zip(ids, rows, strict=True):
        rows_SD[ids_M - first_id] = rows_MD
    batch = embedding_batch(rows_SD, plan.row_format)
    name = f"{plan.shard_names[number]}.arrow"
    return write_shard(plan.out, name, batch, first_id=first_id)
