"""The units of a precomputation one after another in this process, with receipts: something to
kill, or to run out of disk.

    python -m tests.oracles.plain_precompute <inputs> <out> <bytes that a file may have>
"""

import resource
import sys
from functools import partial

from scone_core.artifacts.manifests import FGramsManifest, Shard, load_manifest
from scone_core.artifacts.units import do_here
from scone_core.table.blocks import BlockWriter
from scone_core.table.build import BuildPlan, assemble_rows, sort_fgrams


def precompute(inputs: str, out: str) -> None:
    """The table of `inputs`/checkpoint and `inputs`/fgrams, resumed where a killed run stopped."""
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
    do_units = partial(do_here, kind=Shard, folder=out)
    (order,) = do_units("sort", ["sorted"], lambda _: sort_fgrams(plan))
    blocks = do_units("compute", plan.block_names, BlockWriter(plan, order).write)
    do_units("assemble", plan.shard_names, partial(assemble_rows, plan, blocks))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    precompute(*sys.argv[1:3])
