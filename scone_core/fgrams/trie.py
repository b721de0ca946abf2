"""The f-gram trie in one array: compiled insert, walk, and level-synchronous longest match.

A hash from (node of the first n - 1 tokens, last token) to the id of the n-gram, so keys are exact:
no fingerprint, no false match. Nodes: token t is t, f-gram r is FGRAM_BASE + r. A bucket is one
64-byte cache line: words 0-4 hold keys, words 5-7 the five u32 ids and, in the last 32 bits,
whether a key that belongs here had to move on to the next bucket.

Shapes: B rows, T positions, K max_n, S f-grams, N buckets, L positions of all rows together,
R sequences of one step.
"""

import math

import numba as nb
import numpy as np

from scone_core.machine.intrinsics import prefetch_row

TOKEN_BITS = 20
MAX_VOCAB = 1 << TOKEN_BITS
FGRAM_BASE = MAX_VOCAB
MAX_FGRAMS = 1 << 32
SLOTS = 5
MEAN_FILL = 3.75
"""F-grams per bucket: 17.1 bytes per f-gram."""
BLOCK = 1 << 14
"""Positions that are matched together: their working arrays stay in the L2 cache."""
INSERT_BLOCK = 1 << 10
"""Rows that are inserted together."""
AHEAD = 16
"""Probes between a bucket's prefetch and its use."""

_EMPTY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_MOVED_ON = np.uint64(1 << 32)
_ID_MASK = np.uint64(0xFFFF_FFFF)


def num_buckets(num_fgrams: int) -> int:
    """Buckets of the index of `num_fgrams` f-grams."""
    return math.ceil(num_fgrams / MEAN_FILL) + 1


def clear(buckets_N8: np.ndarray) -> np.ndarray:
    buckets_N8[:, :SLOTS] = _EMPTY
    buckets_N8[:, SLOTS:] = 0
    return buckets_N8


@nb.njit(inline="always")
def _key(prefix_node: np.int64, token: np.int64) -> np.uint64:
    return (np.uint64(prefix_node) << np.uint64(TOKEN_BITS)) | np.uint64(token)


@nb.njit(inline="always")
def _bucket(key: np.uint64, num_buckets: int) -> np.int64:
    """Multiply-shift range reduction of a mixed key: any number of buckets below 2^32."""
    mixed = key * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8_FEB8_6659_FD93)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32))


@nb.njit(inline="always")
def _find(buckets_N8: np.ndarray, bucket: np.int64, key: np.uint64) -> np.int64:
    """Node of `key`, searched from `bucket` on; -1 when it is absent."""
    while True:
        for slot in range(SLOTS):
            if buckets_N8[bucket, slot] == key:
                shift = np.uint64(32 * (slot & 1))
                word = buckets_N8[bucket, SLOTS + (slot >> 1)]
                return FGRAM_BASE + np.int64((word >> shift) & _ID_MASK)
        if not buckets_N8[bucket, 7] & _MOVED_ON:
            return np.int64(-1)
        bucket += 1
        if bucket == buckets_N8.shape[0]:
            bucket = np.int64(0)


@nb.njit(nogil=True, cache=True)
def find_node(buckets_N8: np.ndarray, prefix_node: np.int64, token: np.int64) -> np.int64:
    """One step down the trie: the node of prefix + token, -1 when that is no f-gram."""
    key = _key(prefix_node, token)
    return _find(buckets_N8, _bucket(key, buckets_N8.shape[0]), key)


@nb.njit(nogil=True, cache=True)
def _walk(buckets_N8: np.ndarray, tokens_K: np.ndarray, first: int, last: int) -> np.int64:
    """The node of tokens_K[first:last]; -1 when that is neither a token nor an f-gram."""
    node = np.int64(tokens_K[first])
    for i in range(first + 1, last):
        node = find_node(buckets_N8, node, tokens_K[i])
        if node < 0:
            return node
    return node


@nb.njit(nogil=True, cache=True)
def find_rows(buckets_N8: np.ndarray, tokens_SK: np.ndarray, n_S: np.ndarray) -> np.ndarray:
    ids_S = np.empty(len(n_S), np.int64)
    for row in range(len(n_S)):
        ids_S[row] = max(_walk(buckets_N8, tokens_SK[row], 0, n_S[row]) - FGRAM_BASE, -1)
    return ids_S


@nb.njit(nogil=True, cache=True)
def insert_key(buckets_N8: np.ndarray, key: np.uint64, fgram_id: int) -> None:
    """Put a key that is not there yet into the first free slot from its bucket on."""
    bucket = _bucket(key, buckets_N8.shape[0])
    while True:
        for slot in range(SLOTS):
            if buckets_N8[bucket, slot] == _EMPTY:
                buckets_N8[bucket, slot] = key
                shifted = np.uint64(fgram_id) << np.uint64(32 * (slot & 1))
                buckets_N8[bucket, SLOTS + (slot >> 1)] |= shifted
                return
        buckets_N8[bucket, 7] |= _MOVED_ON
        bucket += 1
        if bucket == buckets_N8.shape[0]:
            bucket = np.int64(0)


@nb.njit(nogil=True, cache=True)
def insert_rows(
    buckets_N8: np.ndarray, tokens_SK: np.ndarray, n_S: np.ndarray, first_id: int, vocab_size: int
) -> int:
    """Insert rows until one breaks an invariant; its number, or the number of rows."""
    nodes_R, probes_R = np.empty(INSERT_BLOCK, np.int64), np.empty(INSERT_BLOCK, np.int64)
    for first in range(0, len(n_S), INSERT_BLOCK):
        last = min(first + INSERT_BLOCK, len(n_S))
        for row in range(first, last):
            for i in range(n_S[row]):
                if tokens_SK[row, i] >= vocab_size or tokens_SK[row, i] < 0:
                    last = min(last, row)
        _touch(buckets_N8, tokens_SK[first:last], n_S[first:last], nodes_R, probes_R)
        for row in range(first, last):
            n = n_S[row]
            prefix = _walk(buckets_N8, tokens_SK[row], 0, n - 1)
            suffix = _walk(buckets_N8, tokens_SK[row], 1, n)
            if prefix < 0 or suffix < 0:
                return row
            if find_node(buckets_N8, prefix, tokens_SK[row, n - 1]) >= 0:
                return row
            insert_key(buckets_N8, _key(prefix, tokens_SK[row, n - 1]), first_id + row)
        if last < min(first + INSERT_BLOCK, len(n_S)):
            return last
    return len(n_S)


@nb.njit(nogil=True, cache=True)
def _touch(
    buckets_N8: np.ndarray,
    tokens_SK: np.ndarray,
    n_S: np.ndarray,
    nodes_R: np.ndarray,
    probes_R: np.ndarray,
) -> None:
    """Bring the buckets to the cache that inserting these rows will read: all rows take each step
    of their prefixes' and suffixes' walks together. Rows of the same block are not found yet.
    """
    num_buckets = buckets_N8.shape[0]
    for first in range(2):
        for row in range(len(n_S)):
            nodes_R[row] = tokens_SK[row, first]
        for i in range(first + 1, tokens_SK.shape[1]):
            for row in range(len(n_S)):
                if i < n_S[row] and nodes_R[row] >= 0:
                    probes_R[row] = _bucket(_key(nodes_R[row], tokens_SK[row, i]), num_buckets)
                    prefetch_row(buckets_N8, probes_R[row])
            for row in range(len(n_S)):
                if i < n_S[row] and nodes_R[row] >= 0:
                    key = _key(nodes_R[row], tokens_SK[row, i])
                    nodes_R[row] = _find(buckets_N8, probes_R[row], key)


@nb.njit(nogil=True, cache=True)
def match_rows(
    tokens_BT: np.ndarray,
    buckets_N8: np.ndarray,
    max_n: int,
    fgram_ids_BT: np.ndarray,
    match_len_BT: np.ndarray,
) -> None:
    """`FGramIndex.match` into given arrays, for callers that are compiled themselves."""
    tokens_L = tokens_BT.reshape(-1)
    fgram_ids_L = fgram_ids_BT.reshape(-1)
    match_len_L = match_len_BT.reshape(-1)
    size = min(len(tokens_L), BLOCK + max_n)
    positions_L, nodes_L = np.empty(size, np.int64), np.empty(size, np.int64)
    keys_L, probes_L = np.empty(size, np.uint64), np.empty(size, np.int64)
    # From the back: a block begins max_n - 1 positions early for its context, and what it writes
    # there is written again by the block before it.
    for last in range(len(tokens_L), 0, -BLOCK):
        first = max(last - BLOCK - max_n + 1, 0)
        block = tokens_L[first:last]
        ids, lengths = fgram_ids_L[first:last], match_len_L[first:last]
        ids[:] = -1
        lengths[:] = 1
        column = first % tokens_BT.shape[1]
        num = _bigram_keys(block, column, tokens_BT.shape[1], positions_L, keys_L)
        for n in range(2, max_n + 1):
            num = _probe(buckets_N8, num, keys_L, probes_L, positions_L, nodes_L)
            for j in range(num):
                ids[positions_L[j]] = nodes_L[j] - FGRAM_BASE
                lengths[positions_L[j]] = n
            num = _longer_keys(block, num, positions_L, nodes_L, keys_L)


@nb.njit(nogil=True, cache=True)
def match_step(
    tokens_RL: np.ndarray,
    num_computed_R: np.ndarray,
    starts_R1: np.ndarray,
    buckets_N8: np.ndarray,
    max_n: int,
    hits_3T: np.ndarray,
) -> int:
    """The hits among the tokens of one step of R sequences, each of which has a past.

    Args:
        tokens_RL: any integer dtype, all tokens of each sequence so far.
        num_computed_R: integer, how many tokens of each sequence earlier steps have matched.
        starts_R1: integer, sequence r has the tokens starts[r]..starts[r + 1] - 1 of the step.
        hits_3T: int64; column m becomes the f-gram's id, its position in the step, and its length.

    Returns:
        The number of hits; -1, before anything was matched, where `hits_3T` has no room for a hit
        at every token.
    """
    num_sequences, num_tokens = len(starts_R1) - 1, np.int64(starts_R1[-1])
    if num_tokens > hits_3T.shape[1]:
        return -1
    flat_L = np.empty(num_tokens + num_sequences * max_n, np.int64)
    num_flat = _flatten_with_past(tokens_RL, num_computed_R, starts_R1, max_n, flat_L)
    ids_1L = np.empty((1, num_flat), np.int64)
    lengths_1L = np.empty((1, num_flat), np.uint8)
    match_rows(flat_L[:num_flat].reshape(1, num_flat), buckets_N8, max_n, ids_1L, lengths_1L)
    place = num_hits = 0
    for r in range(num_sequences):
        place += 1 + min(np.int64(num_computed_R[r]), max_n - 1)
        for t in range(starts_R1[r], starts_R1[r + 1]):
            if ids_1L[0, place] >= 0:
                hits_3T[0, num_hits] = ids_1L[0, place]
                hits_3T[1, num_hits] = t
                hits_3T[2, num_hits] = lengths_1L[0, place]
                num_hits += 1
            place += 1
    return num_hits


@nb.njit(nogil=True, cache=True)
def _flatten_with_past(
    tokens_RL: np.ndarray,
    num_computed_R: np.ndarray,
    starts_R1: np.ndarray,
    max_n: int,
    flat_L: np.ndarray,
) -> int:
    """Write each sequence's new tokens behind a -1, which no f-gram contains, and up to K - 1
    tokens of its past; the number of tokens written.
    """
    end = 0
    for r in range(len(starts_R1) - 1):
        flat_L[end] = -1
        end += 1
        first = np.int64(num_computed_R[r])
        last = first + np.int64(starts_R1[r + 1]) - np.int64(starts_R1[r])
        for position in range(max(first - max_n + 1, 0), last):
            flat_L[end] = tokens_RL[r, position]
            end += 1
    return end


@nb.njit(nogil=True, cache=True)
def _bigram_keys(
    tokens_L: np.ndarray, column: int, num_columns: int, positions_L: np.ndarray, keys_L: np.ndarray
) -> int:
    """Positions and keys of all bigrams that lie inside one row; their number."""
    num = 0
    previous = np.int64(-1)
    for i in range(len(tokens_L)):
        token = np.int64(tokens_L[i])
        if token >= MAX_VOCAB:
            token = np.int64(-1)
        if column == num_columns:
            column = 0
        if column > 0 and previous >= 0 and token >= 0:
            positions_L[num] = i
            keys_L[num] = _key(previous, token)
            num += 1
        previous = token
        column += 1
    return num


@nb.njit(nogil=True, cache=True)
def _longer_keys(
    tokens_L: np.ndarray,
    num: int,
    positions_L: np.ndarray,
    nodes_L: np.ndarray,
    keys_L: np.ndarray,
) -> int:
    """From the n-grams found (position, node) to the (n + 1)-grams that closure leaves possible:
    prefix and suffix, the n-grams that end at i - 1 and at i, are both f-grams.
    """
    num_longer = 0
    before, prefix = np.int64(-2), np.int64(-1)
    for j in range(num):
        position, node = positions_L[j], nodes_L[j]
        if position == before + 1:
            positions_L[num_longer] = position
            keys_L[num_longer] = _key(prefix, tokens_L[position])
            num_longer += 1
        before, prefix = position, node
    return num_longer


@nb.njit(nogil=True, cache=True)
def _probe(
    buckets_N8: np.ndarray,
    num: int,
    keys_L: np.ndarray,
    probes_L: np.ndarray,
    positions_L: np.ndarray,
    nodes_L: np.ndarray,
) -> int:
    """Look `num` keys up, cache lines fetched ahead; keep positions and nodes of those found."""
    num_found = 0
    for j in range(num + AHEAD):
        if j < num:
            probes_L[j] = _bucket(keys_L[j], buckets_N8.shape[0])
            prefetch_row(buckets_N8, probes_L[j])
        if j >= AHEAD:
            node = _find(buckets_N8, probes_L[j - AHEAD], keys_L[j - AHEAD])
            if node >= 0:
                positions_L[num_found] = positions_L[j - AHEAD]
                nodes_L[num_found] = node
                num_found += 1
    return num_found
