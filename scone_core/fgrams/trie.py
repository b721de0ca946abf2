"""The f-gram trie in one array: compiled insert, walk, and level-synchronous longest match.

A hash from (node of the first n - 1 tokens, last token) to the id of the n-gram, so keys are exact:
no fingerprint, no false match. Nodes: token t is t, f-gram r is FGRAM_BASE + r. A bucket is one
64-byte cache line: words 0-4 hold keys, words 5-7 the five u32 ids and, in the last 32 bits,
whether a key that belongs here had to move on to the next bucket.

Shapes: B rows, T positions, K max_n, S f-grams, N buckets, L positions of all rows together.
"""

import math
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

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
STREAMS_AHEAD = 16
"""Sequences whose buckets are asked for before those of one are used: each has up to K - 1."""

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


def _prefetch_code(typing_context: Any, buckets_N8: types.Array, bucket: types.Integer) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, args[0])
        zero = context.get_constant(types.intp, 0)
        pointer = cgutils.get_item_pointer(context, builder, array_type, array, [args[1], zero])
        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]),
            "llvm.prefetch.p0",
        )
        read, high_locality, data = int32(0), int32(3), int32(1)
        builder.call(function, [builder.bitcast(pointer, byte_pointer), read, high_locality, data])
        return context.get_dummy_value()

    return types.void(buckets_N8, types.intp), codegen


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
prefetch: Callable[[np.ndarray, np.int64], None] = intrinsic(_prefetch_code)
"""Asks for the cache line of row `bucket` before it is needed."""


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
                    prefetch(buckets_N8, probes_R[row])
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
def match_windows(windows_BK: np.ndarray, buckets_N8: np.ndarray, max_n: int) -> np.ndarray:
    """`FGramIndex.match_windows`, for callers that are compiled themselves."""
    fgram_ids_BK = np.empty(windows_BK.shape, np.int64)
    match_len_BK = np.empty(windows_BK.shape, np.uint8)
    match_rows(windows_BK, buckets_N8, max_n, fgram_ids_BK, match_len_BK)
    return fgram_ids_BK[:, -1].copy()


@nb.njit(nogil=True, cache=True)
def advance(
    tokens_B: np.ndarray,
    buckets_N8: np.ndarray,
    nodes_BP: np.ndarray,
    fgram_ids_B: np.ndarray,
    match_len_B: np.ndarray,
) -> None:
    """One more token for each of B sequences: the longest f-gram that ends at it, in at most one
    probe per length and without looking at earlier tokens.

    Args:
        nodes_BP: int64, P = K - 1: column p is the node of the last p + 1 tokens, -1 when they are
            no f-gram (p = 0: no token). Brought up to date.
        fgram_ids_B: becomes the ids, -1 for a miss.
        match_len_B: becomes the lengths, 1 for a miss.
    """
    num = len(tokens_B)
    probes_BP = np.empty(nodes_BP.shape, np.int64)
    for j in range(num + STREAMS_AHEAD):
        if j < num:
            _prepare(np.int64(tokens_B[j]), buckets_N8, nodes_BP, probes_BP, j)
        b = j - STREAMS_AHEAD
        if b >= 0:
            node, length = _extend(np.int64(tokens_B[b]), buckets_N8, nodes_BP, probes_BP, b)
            fgram_ids_B[b], match_len_B[b] = node - FGRAM_BASE if length > 1 else -1, length


@nb.njit(inline="always")
def _prepare(
    token: np.int64,
    buckets_N8: np.ndarray,
    nodes_BP: np.ndarray,
    probes_BP: np.ndarray,
    b: int,
) -> None:
    """Ask for all buckets that `_extend` may read. A token outside the vocabulary ends everything
    before it.
    """
    if token < 0 or token >= MAX_VOCAB:
        nodes_BP[b] = -1
        return
    for p in range(nodes_BP.shape[1]):
        if nodes_BP[b, p] < 0:
            return
        probes_BP[b, p] = _bucket(_key(nodes_BP[b, p], token), buckets_N8.shape[0])
        prefetch(buckets_N8, probes_BP[b, p])


@nb.njit(inline="always")
def _extend(
    token: np.int64,
    buckets_N8: np.ndarray,
    nodes_BP: np.ndarray,
    probes_BP: np.ndarray,
    b: int,
) -> tuple[np.int64, int]:
    """`advance` for one sequence: the node and the length of the longest match."""
    longest, length = token, 1
    node = token if token >= 0 and token < MAX_VOCAB else np.int64(-1)
    for p in range(nodes_BP.shape[1]):
        prefix = nodes_BP[b, p]
        nodes_BP[b, p] = node
        if node >= 0 and prefix >= 0:
            node = _find(buckets_N8, probes_BP[b, p], _key(prefix, token))
        else:
            node = np.int64(-1)
        if node >= 0:
            longest, length = node, p + 2
    return longest, length


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
            prefetch(buckets_N8, probes_L[j])
        if j >= AHEAD:
            node = _find(buckets_N8, probes_L[j - AHEAD], keys_L[j - AHEAD])
            if node >= 0:
                positions_L[num_found] = positions_L[j - AHEAD]
                nodes_L[num_found] = node
                num_found += 1
    return num_found
