"""What actors of the precompute stage do."""

import pyarrow as pa
import torch

from scone_core.artifacts.folders import write_receipt
from scone_core.artifacts.manifests import Shard
from scone_core.table.build import BuildPlan


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
        write_receipt(self._plan.out, self._plan.block_names[number], shard.model_dump())
        return pa.table({"num_fgrams": [shard.num_rows]})
