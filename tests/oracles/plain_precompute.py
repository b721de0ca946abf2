"""The units of a precomputation one after another in this process, with receipts: something to
kill, or to run out of disk.

    python -m tests.plain_precompute <inputs> <out> <bytes that a file may have>
"""

import resource
import sys

from scone_core.artifacts.manifests import FGramsManifest, Shard, load_manifest
from scone_core.table.blocks import BlockWriter
from scone_core.table.build import BuildPlan, assemble_rows, sort_fgrams
from tests.oracles.plain_count import once


def precompute(inputs: str, out: str) -> None:
    """The table of `inputs`/checkpoint and `inputs`/fgrams, going on where a killed run stopped."""
    plan = BuildPlan(
        checkpoint=f"{inputs}/checkpoint",
        fgrams=f"{inputs}/fgrams",
        out=out,
        row_format="fp32",
        first_id=0,
        last_id=load_manifest(FGramsManifest, f"{inputs}/fgrams").num_fgrams,
        num_shards_before=0,
        rows_per_shard=300,
        fgrams_per_block=400,
        fgrams_per_forest=300,
    )
    order = once(out, "sorted", lambda: sort_fgrams(plan).model_dump())
    writer = BlockWriter(plan, Shard.model_validate(order))
    blocks = [
        Shard.model_validate(once(out, name, lambda n=number: writer.write(n).model_dump()))
        for number, name in enumerate(plan.block_names)
    ]
    for number, name in enumerate(plan.shard_names):
        once(out, name, lambda n=number: assemble_rows(plan, blocks, n).model_dump())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    precompute(*sys.argv[1:3])
