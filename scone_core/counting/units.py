"""tokens/v1 -> fgrams/v1, the units of work: each runs anywhere and in any order.

map_chunk:       a part of the token shards -> a chunk file of grouped suffix records
plan_ranges:     chunk files -> cuts: where ranges begin and end
reduce_range:    everything between two cuts -> its frequent n-grams in rank order, class sizes
assemble_fgrams: ranked ranges -> one Parquet shard of f-grams

What is published does not depend on how the work is cut into chunks, ranges and rounds. A receipt
says that a unit is finished; whoever runs the units writes it. All workers see the scratch folder
in which chunk and range files are kept. `count` has the order of the units.
"""

import numpy as np
import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, Shard
from scone_core.artifacts.shards import write_shard
from scone_core.counting.chunks import BLOCK, Chunk, write_chunk
from scone_core.counting.one_scan import count_groups, group_records, sort_groups
from scone_core.counting.pieces import chunk_pieces, damage_named
from scone_core.counting.plan import CountPlan
from scone_core.counting.ranges import count_exactly, gather_range, plan_cuts
from scone_core.counting.ranking import Ranking, class_sizes, rank_range
from scone_core.counting.receipts import ChunkReceipt, CutsReceipt, RangeReceipt
from scone_core.fgrams.fgram_shards import write_fgrams
from scone_core.fgrams.ngrams import NGrams


def map_chunk(plan: CountPlan, round_index: int, chunk_index: int) -> ChunkReceipt:
    """Write the suffix records of a chunk whose first tokens belong to the round to scratch,
    grouped by first token.

    Raises:
        ArtifactError: a token shard is missing or damaged.
        ValueError: a token outside the vocabulary.
    """
    first, last = plan.round_tokens[round_index : round_index + 2]
    with damage_named(plan, chunk_index):
        pieces = list(chunk_pieces(plan, chunk_index))
        groups = group_records(pieces, plan.layout, first_token=first, last_token=last)
    compressed = plan.options.scratch_form == "compressed"
    num_ranges = max(1, plan.num_tokens // plan.range_records)
    sorted_from = 1 if compressed else max(1, len(groups.records.low_R) // num_ranges)
    groups = sort_groups(groups, plan.layout, min_size=sorted_from)
    path = plan.chunk_paths(round_index)[chunk_index]
    block = BLOCK if compressed else 0
    num_bytes = write_chunk(path, groups, sorted_from=max(sorted_from, 2), block=block)
    shard = Shard(
        name=path.rsplit("/", 1)[1],
        num_rows=len(groups.records.low_R),
        num_bytes=num_bytes,
        sha256=storage.sha256_of(path) if plan.keeps_chunks else "",
    )
    return ChunkReceipt(shard=shard)


def plan_ranges(plan: CountPlan, round_index: int) -> CutsReceipt:
    """The cuts at which the ranges of a round begin, and the end of the last range.

    Raises:
        ArtifactError: the corpus holds the separator, or a chunk is missing or truncated.
    """
    first, last = plan.round_tokens[round_index : round_index + 2]
    chunks = [Chunk(path) for path in plan.chunk_paths(round_index)]
    sizes_G = np.zeros(last - first, np.int64)
    for chunk in chunks:
        sizes_G += np.diff(chunk.starts(first, last))
    separator = plan.manifest.separator_id
    if first <= separator < last and sizes_G[separator - first]:
        raise ArtifactError(f"{plan.tokens}: {separator=} inside a document; tokenize again")
    cuts = plan_cuts(chunks, plan.layout, sizes_G, first_token=first, budget=plan.range_records)
    return CutsReceipt(cuts=tuple(cuts))


def reduce_range(
    plan: CountPlan, round_index: int, planned: CutsReceipt, range_index: int
) -> RangeReceipt:
    """Count the n-grams between two cuts, and write those at `min_count` or above to scratch, with
    the sizes of their classes.

    The receipt holds the exact counts of n-grams that a cut divides, and of those that the user
    asked to include.

    Raises:
        ArtifactError: a chunk is missing or truncated.
    """
    layout, options = plan.layout, plan.options
    lower, upper = planned.cuts[range_index : range_index + 2]
    chunks = [Chunk(path) for path in plan.chunk_paths(round_index)]
    groups, num_equal = gather_range(chunks, layout, lower, upper)
    groups = sort_groups(groups, layout, min_size=options.min_count)
    found = count_groups(groups, layout, min_count=options.min_count)
    across = lower.open_ngrams(layout) | upper.open_ngrams(layout)
    counts = count_exactly(groups, layout, across | set(options.include), lower, num_equal)
    ranked = rank_range(found.without(across).without_tokens(options.exclude_tokens))
    name = plan.range_names(round_index, planned.num_ranges)[range_index]
    return RangeReceipt(
        rows=write_shard(plan.scratch, f"{name}.arrow", ranked.to_batch()),
        classes=_write_classes(plan, name, ranked),
        across=tuple((ngram, counts[ngram]) for ngram in sorted(across)),
        included=tuple((ngram, counts[ngram]) for ngram in options.include if ngram in counts),
    )


def _write_classes(plan: CountPlan, name: str, ranked: NGrams) -> Shard:
    sizes = class_sizes(ranked)
    classes = pa.RecordBatch.from_arrays([c.to_arrow() for c in sizes], sizes.columns)
    return write_shard(plan.scratch, f"{name}.classes.arrow", classes)


def assemble_fgrams(ranking: Ranking, shard_index: int, *, out: str, rows_per_shard: int) -> Shard:
    """Publish the `rows_per_shard` f-grams with the ids from `shard_index * rows_per_shard` on, or
    as many as are left, as a Parquet shard.

    Raises:
        ArtifactError: a file of a range is missing or damaged.
    """
    first_id = shard_index * rows_per_shard
    last_id = min(first_id + rows_per_shard, ranking.num_fgrams)
    fgrams = ranking.fgrams(first_id, last_id)
    return write_fgrams(out, f"fgrams-{shard_index:05d}.parquet", fgrams, first_id=first_id)


def remove_chunks(plan: CountPlan, round_index: int) -> None:
    """Free the scratch space of a round whose ranges are counted; chunks of earlier counts stay."""
    for path in plan.chunk_paths(round_index)[: plan.num_chunks]:
        storage.remove(path)
