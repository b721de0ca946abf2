"""tokens/v1 -> fgrams/v1: the order of a count's units. Where they run is a parameter.

Every step takes a `DoUnits`: Ray's tasks, a pool of processes, or a loop in this process. A count
that was killed runs again with the same plan: finished units have receipts and are not repeated.
"""

from collections.abc import Sequence
from functools import partial

from scone_core.artifacts.manifests import Shard
from scone_core.artifacts.units import DoUnits, read_receipt, write_receipt
from scone_core.counting.kept_chunks import publish_chunks
from scone_core.counting.plan import ROW_BYTES, WORKER_BYTES, CountPlan
from scone_core.counting.ranking import Ranking, rank_ranges
from scone_core.counting.receipts import ChunkReceipt, CutsReceipt, RangeReceipt
from scone_core.counting.units import (
    assemble_fgrams,
    map_chunk,
    plan_ranges,
    reduce_range,
    remove_chunks,
)
from scone_core.fgrams.fgram_shards import build_index
from scone_core.fgrams.trie import num_buckets


def count_fgrams(
    plan: CountPlan, do_units: DoUnits, *, num_fgrams: int, out: str, rows_per_shard: int
) -> tuple[Ranking, list[Shard]]:
    """Count a corpus, and publish the `num_fgrams` most frequent n-grams in `out`, as Parquet
    shards of `rows_per_shard`.

    Raises:
        NothingFrequentError: no n-gram reaches `min_count`.
        ArtifactError: an input or a scratch file is missing or damaged.
    """
    receipts = count_rounds(plan, do_units)
    ranking = rank_ranges(plan, receipts, num_fgrams=num_fgrams)
    return ranking, write_shards(ranking, do_units, out=out, rows_per_shard=rows_per_shard)


def count_rounds(plan: CountPlan, do_units: DoUnits) -> list[RangeReceipt]:
    """Map and reduce the corpus, round by round.

    Returns:
        The receipts of all ranges, in the order of n-grams.
    """
    receipts = []
    for round_index in range(plan.num_rounds):
        receipts += _count_round(plan, round_index, do_units)
        if plan.keeps_chunks and not plan.is_mapped:
            publish_chunks(plan)
        elif plan.num_rounds > 1:
            remove_chunks(plan, round_index)
    return receipts


def _count_round(plan: CountPlan, round_index: int, do_units: DoUnits) -> list[RangeReceipt]:
    """Map all chunks, reduce all ranges. No chunk is opened once every range is finished."""
    cuts_name = plan.cuts_name(round_index)
    planned = read_receipt(plan.scratch, cuts_name, CutsReceipt)
    if planned is None:
        do_units(
            "count: map chunks",
            plan.chunk_names(round_index),
            partial(map_chunk, plan, round_index),
            kind=ChunkReceipt,
            folder=plan.chunk_folder,
            memory_bytes=plan.peak_bytes,
        )
        planned = plan_ranges(plan, round_index)
        write_receipt(plan.scratch, cuts_name, planned)
    return do_units(
        "count: reduce ranges",
        plan.range_names(round_index, planned.num_ranges),
        partial(reduce_range, plan, round_index, planned),
        kind=RangeReceipt,
        folder=plan.scratch,
        memory_bytes=plan.peak_bytes,
    )


def write_shards(
    ranking: Ranking, do_units: DoUnits, *, out: str, rows_per_shard: int
) -> list[Shard]:
    """Publish all f-grams in rank order in `out`, as Parquet shards of `rows_per_shard`."""
    num_shards = -(-ranking.num_fgrams // rows_per_shard)
    return do_units(
        "count: write shards",
        [f"shard-{shard_index:05d}" for shard_index in range(num_shards)],
        partial(assemble_fgrams, ranking, out=out, rows_per_shard=rows_per_shard),
        kind=Shard,
        folder=out,
        memory_bytes=WORKER_BYTES + min(rows_per_shard, ranking.num_fgrams) * ROW_BYTES,
    )


def write_index(shards: Sequence[Shard], do_units: DoUnits, *, out: str, vocab_size: int) -> Shard:
    """Publish the trie index of the f-grams in `shards` of `out`."""
    num_fgrams = sum(shard.num_rows for shard in shards)
    (index,) = do_units(
        "count: build index",
        ["index"],
        partial(_build_index, shards, out, vocab_size),
        kind=Shard,
        folder=out,
        memory_bytes=WORKER_BYTES + num_buckets(num_fgrams) * 64,
    )
    return index


def _build_index(shards: Sequence[Shard], out: str, vocab_size: int, _: int) -> Shard:
    return build_index(out, shards, out=out, vocab_size=vocab_size)
