"""The units of a count one after another in this process, with receipts: something to kill."""

from collections.abc import Callable
from functools import partial
from typing import Any

from scone_core.artifacts.folders import read_receipt, write_receipt
from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.counting.plan import plan_count
from scone_core.counting.ranges import Cut
from scone_core.counting.units import (
    assemble_fgrams,
    map_chunk,
    plan_ranges,
    rank_ranges,
    reduce_range,
)

NUM_CHUNKS, NUM_RANGES, ROWS_PER_SHARD = 6, 6, 300


def count(tokens: str, out: str) -> None:
    """Count `tokens` into the Parquet shards of `out`, going on where a killed count stopped."""
    plan = plan_count(
        tokens,
        load_manifest(TokensManifest, tokens),
        scratch=f"{out}/scratch",
        max_n=5,
        min_count=2,
        memory_bytes=1 << 30,
        num_chunks=NUM_CHUNKS,
        num_ranges=NUM_RANGES,
    )
    for i, name in enumerate(plan.chunk_names(0)):
        once(plan.scratch, name, partial(map_chunk, plan, 0, i))
    cuts = [
        Cut.model_validate(cut)
        for cut in once(
            plan.scratch,
            plan.cuts_name(0),
            lambda: {"cuts": [cut.model_dump() for cut in plan_ranges(plan, 0)]},
        )["cuts"]
    ]
    receipts = [
        once(plan.scratch, name, partial(reduce_range, plan, 0, cuts[i], cuts[i + 1], name))
        for i, name in enumerate(plan.range_names(0, len(cuts) - 1))
    ]
    ranking = rank_ranges(plan, receipts, num_fgrams=2000)
    for number in range(-(-ranking.num_fgrams // ROWS_PER_SHARD)):
        assemble = partial(
            assemble_fgrams, plan, receipts, ranking, out=out, rows_per_shard=ROWS_PER_SHARD
        )
        once(out, f"shard-{number}", lambda n=number, do=assemble: do(number=n).model_dump())


def once(folder: str, name: str, unit: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The receipt of a unit, which runs where there is none."""
    if read_receipt(folder, name) is None:
        write_receipt(folder, name, unit())
    return read_receipt(folder, name) or {}
