"""tokens/v1 -> counted n-grams in max_n - 1 scans, as in the paper: the engine for little scratch,
and the oracle of the one-scan engine.

Scan n counts, chunk by chunk, the n-grams whose prefix and suffix are frequent; a merge per range
of first tokens adds the chunks up and keeps what reaches `min_count`. Ids number the frequent
n-grams of one length in the order of their tokens, so keys (id of the prefix, last token) sort like
tokens. Between scans a chunk keeps 4 bytes per position, which of its own keys starts there, and 12
per distinct key, about 7 bytes per token of English text.

Shapes: L positions, M candidates, U distinct keys, C slots of the table, K max_n.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.folders import write_receipt
from scone_core.artifacts.manifests import ArtifactError, Shard
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.counting import apriori_kernels
from scone_core.counting.apriori_kernels import DEAD, TOKEN_BITS
from scone_core.counting.one_scan import Piece, count_tokens, starts_of
from scone_core.counting.plan import CountPlan, chunk_pieces, damage_named, sample_cuts
from scone_core.counting.records import Layout
from scone_core.counting.units import Receipt, write_range
from scone_core.fgrams.ngrams import NGrams, ngram_batch, ngrams_of
from scone_core.machine.buffers import buffer

SAMPLE = 200_000
"""Keys by which the size of the hash table is guessed."""


class Counted(NamedTuple):
    """The distinct candidates of one scan, keys ascending."""

    keys_U: np.ndarray
    """uint64, prefix << 32 | last token."""
    counts_U: np.ndarray
    """uint64."""
    numbers_L: np.ndarray
    """uint32: for every position the number of the key that starts there, or DEAD."""


def count_ngrams(pieces: Iterable[Piece], layout: Layout, *, min_count: int) -> NGrams:
    """What `ngrams.count_ngrams` gives, in max_n - 1 scans."""
    pieces = list(pieces)
    count_tokens(pieces, layout.vocab_size)
    levels: list[NGrams] = []
    ids_L = None
    for n in range(2, layout.max_n + 1):
        counted = count_candidates(pieces, n, ids_L, min_count=min_count)
        levels.append(to_rows(counted, n, levels[-1] if levels else None, max_n=layout.max_n))
        ids_L = counted.numbers_L
    return NGrams(*(np.concatenate(columns) for columns in zip(*levels, strict=True)))


def count_candidates(
    pieces: list[Piece], n: int, ids_L: np.ndarray | None, *, min_count: int = 1
) -> Counted:
    """Count the candidates of length n, and keep those at `min_count` or above.

    Args:
        ids_L: ids of the (n - 1)-grams that start at each position of all pieces together, or DEAD;
            None for n = 2.
    """
    num_positions = sum(piece.last - piece.first for piece in pieces)
    keys_M = buffer("keys", num_positions, np.uint64)
    positions_M = buffer("positions", num_positions, np.uint32)
    num = start = 0
    for piece in pieces:
        out = keys_M[num:], positions_M[num:]
        length = piece.last - piece.first
        if ids_L is None:
            found = apriori_kernels.bigram_keys(*piece, *out)
        else:
            end = piece.offsets_D1[np.searchsorted(piece.offsets_D1, piece.last)]
            ids = ids_L[start : start + length]
            found = apriori_kernels.longer_keys(piece.tokens_L, piece.first, end, n, ids, *out)
        positions_M[num : num + found] += np.uint32(start)
        num, start = num + found, start + length
    return _count(keys_M[:num], positions_M[:num], num_positions, min_count)


def _count(
    keys_M: np.ndarray, positions_M: np.ndarray, num_positions: int, min_count: int
) -> Counted:
    slots_M = buffer("slots", len(keys_M), np.uint32)
    num_slots = _num_slots(keys_M)
    while True:
        table_C2 = buffer("table", (num_slots, 2), np.uint64)
        num_distinct = apriori_kernels.count_keys(keys_M, table_C2, slots_M)
        if num_distinct >= 0:
            break
        num_slots *= 2
    slots_U = np.empty(num_distinct, np.int64)
    slots_U = slots_U[: apriori_kernels.frequent_slots(table_C2, min_count, slots_U)]
    slots_U = slots_U[np.argsort(table_C2[slots_U, 0])]
    ids_C1 = buffer("ids of slots", (num_slots, 1), np.uint32)
    ids_C1[:] = DEAD
    ids_C1[slots_U, 0] = np.arange(len(slots_U), dtype=np.uint32)
    numbers_L = np.full(num_positions, DEAD)
    apriori_kernels.place_ids(slots_M, positions_M, ids_C1, numbers_L)
    return Counted(table_C2[slots_U, 0], table_C2[slots_U, 1], numbers_L)


def _num_slots(keys_M: np.ndarray) -> int:
    """A power of two with room for about as many distinct keys as a sample promises."""
    sample = keys_M[:: max(1, len(keys_M) // SAMPLE)]
    share = len(np.unique(sample)) / max(len(sample), 1)
    return 1 << max(10, int(share * len(keys_M) / apriori_kernels.MAX_LOAD).bit_length())


def to_rows(counted: Counted, n: int, prefixes: NGrams | None, *, max_n: int) -> NGrams:
    """Distinct candidates as n-grams; `prefixes` are those that their prefix ids number."""
    prefix_U = (counted.keys_U >> np.uint64(TOKEN_BITS)).astype(np.int64)
    tokens_UK = np.zeros((len(prefix_U), max_n), np.uint32)
    if prefixes is None:
        tokens_UK[:, 0] = prefix_U
    else:
        tokens_UK[:] = np.take(prefixes.tokens_MK, prefix_U, axis=0)
    tokens_UK[:, n - 1] = counted.keys_U.astype(np.uint32)
    return NGrams(tokens_UK, np.full(len(prefix_U), n, np.uint8), counted.counts_U)


def plan_tokens(plan: CountPlan) -> list[int]:
    """First tokens at which ranges begin, and the end of the last, by a sample of the corpus."""
    return sample_cuts(plan, max(1, plan.num_tokens // plan.range_records))


def scan_chunk(
    plan: CountPlan, n: int, scans: list[list[Receipt]], merged: list[list[Receipt]], chunk: int
) -> Receipt:
    """Count the candidates of length n of one chunk and write them to scratch, in place of what the
    scan before left there.

    Args:
        scans, merged: receipts of the scans and merges before, from n = 2 on.

    Raises:
        ArtifactError: a token shard is missing or damaged, or holds the separator.
    """
    with damage_named(plan, chunk):
        pieces = list(chunk_pieces(plan, chunk))
        if n == 2:
            _check_tokens(plan, pieces)
    ids_L = None if n == 2 else _ids(plan, scans[-1][chunk], merged[-1])
    counted = count_candidates(pieces, n, ids_L)
    name = f"scan-{n}-{plan.chunk_names(0)[chunk]}"
    keys = {"key": counted.keys_U, "count": counted.counts_U.astype(np.uint32)}
    receipt = {
        "keys": _write(plan, f"{name}.keys.arrow", keys),
        "numbers": _write(plan, f"{name}.numbers.arrow", {"number": counted.numbers_L}),
    }
    write_receipt(plan.scratch, name, receipt)
    for shard in scans[-1][chunk].values() if scans else ():
        storage.remove(storage.join(plan.scratch, shard["name"]))
    return receipt


def _check_tokens(plan: CountPlan, pieces: list[Piece]) -> None:
    """
    Raises:
        ValueError: a token outside the vocabulary.
        ArtifactError: a token is the separator.
    """
    separator = plan.manifest.separator_id
    sizes_V = count_tokens(pieces, plan.manifest.vocab_size)
    if separator < len(sizes_V) and sizes_V[separator]:
        raise ArtifactError(f"{plan.tokens}: {separator=} inside a document; tokenize again")


def merge_range(
    plan: CountPlan,
    n: int,
    cuts: list[int],
    scans: list[list[Receipt]],
    merged: list[list[Receipt]],
    number: int,
) -> Receipt:
    """Add up what scan n found in all chunks between two first tokens; write what is frequent."""
    prefixes = None
    first, last = cuts[number], cuts[number + 1]
    base = 0
    if merged:
        bases = starts_of(np.array([receipt["rows"]["num_rows"] for receipt in merged[-1]]))
        first, last = bases[number : number + 2].tolist()
        base, prefixes = first, ngrams_of(_map(plan, merged[-1][number]["rows"]))
    parts = [
        _between(plan, scan["keys"], first << TOKEN_BITS, last << TOKEN_BITS) for scan in scans[-1]
    ]
    keys_X, counts_X = map(np.concatenate, zip(*parts, strict=True))
    keys_U, places_X = np.unique(keys_X, return_inverse=True)
    counts_U = np.zeros(len(keys_U), np.uint64)
    np.add.at(counts_U, places_X, counts_X)
    frequent = counts_U >= plan.min_count
    keys_U, counts_U = keys_U[frequent], counts_U[frequent]
    local = Counted(keys_U - np.uint64(base << TOKEN_BITS), counts_U, np.empty(0, np.uint32))
    rows = to_rows(local, n, prefixes, max_n=plan.max_n)
    name = f"merge-{n}-{plan.range_names(0, len(cuts) - 1)[number]}"
    return {
        "rows": write_shard(plan.scratch, f"{name}.arrow", ngram_batch(rows)).model_dump(),
        "keys": _write(plan, f"{name}.keys.arrow", {"key": keys_U}),
    }


def rank_merged(
    plan: CountPlan, merged: list[list[Receipt]], names: Sequence[str], number: int
) -> Receipt:
    """The frequent n-grams of all lengths of one range in rank order."""
    levels = [ngrams_of(_map(plan, receipts[number]["rows"])) for receipts in merged]
    found = NGrams(*(np.concatenate(columns) for columns in zip(*levels, strict=True)))
    return {**write_range(plan, names[number], found), "across": [], "included": []}


def _ids(plan: CountPlan, scan: Receipt, merges: list[Receipt]) -> np.ndarray:
    """The id of the frequent n-gram that starts at each position of a scanned chunk, or DEAD."""
    frequent_F = np.concatenate([_map(plan, merge["keys"])["key"].to_numpy() for merge in merges])
    keys_U = _map(plan, scan["keys"])["key"].to_numpy()
    ids_U = np.searchsorted(frequent_F, keys_U).astype(np.uint32)
    known_U = ids_U < len(frequent_F)
    known_U[known_U] = frequent_F[ids_U[known_U]] == keys_U[known_U]
    ids_U1 = np.append(np.where(known_U, ids_U, DEAD), DEAD)
    numbers_L = _map(plan, scan["numbers"])["number"].to_numpy()
    return ids_U1[np.minimum(numbers_L, len(keys_U))]


def _between(plan: CountPlan, shard: Receipt, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    batch = _map(plan, shard)
    keys_U = batch["key"].to_numpy()
    first, last = np.searchsorted(keys_U, np.array([low, high], np.uint64))
    return keys_U[first:last], batch["count"].to_numpy()[first:last]


def _write(plan: CountPlan, name: str, columns: dict[str, np.ndarray]) -> Receipt:
    batch = pa.RecordBatch.from_pydict({key: pa.array(value) for key, value in columns.items()})
    return write_shard(plan.scratch, name, batch).model_dump()


def _map(plan: CountPlan, shard: Receipt) -> pa.RecordBatch:
    return map_shard(plan.scratch, Shard.model_validate(shard))
