"""documents -> exact counts of all n-grams, n = 2 .. max_n, in max_n - 1 scans: the method of the
SCONE paper, in memory.

Scan n counts the n-grams whose prefix and suffix of n - 1 tokens are frequent, and keeps those that
reach `min_count`. Ids number the frequent n-grams of one length in the order of their tokens, so
keys (id of the prefix, last token) sort like tokens. It counts nothing that `one_scan` cannot: it
is a peer of `bench_count`, and tests use it as an oracle.

Source: arXiv 2502.01637. Shapes: L positions, M candidates, U distinct keys, C slots of the table,
K max_n.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.peers import apriori_kernels
from benchmarks.peers.apriori_kernels import DEAD, TOKEN_BITS
from scone_core.counting.one_scan import Piece, count_tokens
from scone_core.counting.records import Layout
from scone_core.fgrams.ngrams import NGrams
from scone_core.machine.buffers import buffer

SAMPLE = 200_000
"""Keys from which the size of the hash table is guessed."""


class Counted(NamedTuple):
    """The distinct candidates of one scan, keys ascending."""

    keys_U: np.ndarray
    """uint64, prefix << 32 | last token."""
    counts_U: np.ndarray
    """uint64."""
    numbers_L: np.ndarray
    """uint32: for every position the number of the key that starts there, or DEAD."""


def count_ngrams(pieces: Iterable[Piece], layout: Layout, *, min_count: int) -> NGrams:
    """All n-grams that occur at least `min_count` times in `pieces`, as `one_scan.count_ngrams`
    counts them.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    pieces = list(pieces)
    count_tokens(pieces, layout.vocab_size)
    levels: list[NGrams] = []
    ids_L = None
    for n in range(2, layout.max_n + 1):
        counted = count_candidates(pieces, n, ids_L, min_count=min_count)
        levels.append(to_rows(counted, n, levels[-1] if levels else None, max_n=layout.max_n))
        ids_L = counted.numbers_L
    return NGrams.concat(levels)


def count_candidates(
    pieces: list[Piece], n: int, ids_L: np.ndarray | None, *, min_count: int
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
    """A power of two with room for the distinct keys that a sample lets expect."""
    sample = keys_M[:: max(1, len(keys_M) // SAMPLE)]
    share = len(np.unique(sample)) / max(len(sample), 1)
    return 1 << max(10, int(share * len(keys_M) / apriori_kernels.MAX_LOAD).bit_length())


def to_rows(counted: Counted, n: int, prefixes: NGrams | None, *, max_n: int) -> NGrams:
    """Distinct candidates as n-grams; `prefixes` are the n-grams that their prefix ids number."""
    prefix_U = (counted.keys_U >> np.uint64(TOKEN_BITS)).astype(np.int64)
    tokens_UK = np.zeros((len(prefix_U), max_n), np.uint32)
    if prefixes is None:
        tokens_UK[:, 0] = prefix_U
    else:
        tokens_UK[:] = np.take(prefixes.tokens_MK, prefix_U, axis=0)
    tokens_UK[:, n - 1] = counted.keys_U.astype(np.uint32)
    return NGrams(tokens_UK, np.full(len(prefix_U), n, np.uint8), counted.counts_U)
