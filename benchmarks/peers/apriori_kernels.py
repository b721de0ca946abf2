"""tokens + ids of their (n - 1)-grams -> counted candidate n-grams: the compiled inner loops of
`apriori`.

An n-gram can be frequent only if its prefix and its suffix of n - 1 tokens are. Its key is (id of
the prefix, last token), the prefix of a bigram being its token. Keys are counted in a hash table of
(key, count) pairs, whose cache lines are asked for ahead of time.

Shapes: L positions, M candidates, C slots of the table.
"""

import numba as nb
import numpy as np

from scone_core.machine.intrinsics import prefetch_row

DEAD = np.uint32(0xFFFF_FFFF)
"""Stands in place of an id where no frequent n-gram starts."""
TOKEN_BITS = 32
MAX_LOAD = 0.7
AHEAD = 24
"""Keys between a slot's prefetch and its use."""

_EMPTY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_SHIFT = np.uint64(TOKEN_BITS)


@nb.njit(nogil=True, cache=True)
def bigram_keys(
    tokens_L: np.ndarray,
    offsets_D1: np.ndarray,
    first: int,
    last: int,
    keys_M: np.ndarray,
    positions_M: np.ndarray,
) -> int:
    """Write keys and positions (counted from `first`) of all bigrams that start at the positions
    `first` to `last - 1`; their number.
    """
    num = 0
    document = np.searchsorted(offsets_D1, first, side="right") - 1
    while document < len(offsets_D1) - 1 and offsets_D1[document] < last:
        begin, end = max(offsets_D1[document], first), min(offsets_D1[document + 1] - 1, last)
        for i in range(begin, end):
            keys_M[num] = np.uint64(tokens_L[i]) << _SHIFT | np.uint64(tokens_L[i + 1])
            positions_M[num] = i - first
            num += 1
        document += 1
    return num


@nb.njit(nogil=True, cache=True)
def longer_keys(
    tokens_L: np.ndarray,
    first: int,
    document_end: int,
    n: int,
    ids_L: np.ndarray,
    keys_M: np.ndarray,
    positions_M: np.ndarray,
) -> int:
    """Write keys and positions of the n-grams whose prefix and suffix have ids; their number.

    `ids_L` holds the ids of the (n - 1)-grams that start from `first` on. The id behind its last is
    unknown, so the n-gram that starts at the last position counts unless it passes `document_end`.
    """
    num = 0
    for i in range(len(ids_L)):
        if ids_L[i] != DEAD:
            if i + 1 < len(ids_L):
                is_candidate = ids_L[i + 1] != DEAD
            else:
                is_candidate = first + i + n <= document_end
            if is_candidate:
                token = np.uint64(tokens_L[first + i + n - 1])
                keys_M[num] = np.uint64(ids_L[i]) << _SHIFT | token
                positions_M[num] = i
                num += 1
    return num


@nb.njit(inline="always")
def _slot(key: np.uint64, mask: np.uint64) -> np.int64:
    mixed = (key ^ (key >> np.uint64(29))) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & mask)


@nb.njit(nogil=True, cache=True)
def count_keys(keys_M: np.ndarray, table_C2: np.ndarray, slots_M: np.ndarray) -> int:
    """Count keys in an empty table of a power of two of slots and say where each one is.

    Returns:
        Distinct keys; -1 when the table is too small.
    """
    num_slots = len(table_C2)
    mask = np.uint64(num_slots - 1)
    room = np.int64(num_slots * MAX_LOAD)
    table_C2[:, 0] = _EMPTY
    num_distinct = 0
    for j in range(-AHEAD, len(keys_M)):
        ahead = j + AHEAD
        if ahead < len(keys_M):
            slot = _slot(keys_M[ahead], mask)
            slots_M[ahead] = slot
            prefetch_row(table_C2, slot)
        if j < 0:
            continue
        key, slot = keys_M[j], np.int64(slots_M[j])
        while table_C2[slot, 0] != key and table_C2[slot, 0] != _EMPTY:
            slot = (slot + 1) & np.int64(mask)
        if table_C2[slot, 0] == _EMPTY:
            if num_distinct == room:
                return -1
            table_C2[slot, 0] = key
            table_C2[slot, 1] = 0
            num_distinct += 1
        table_C2[slot, 1] += np.uint64(1)
        slots_M[j] = slot
    return num_distinct


@nb.njit(nogil=True, cache=True)
def frequent_slots(table_C2: np.ndarray, min_count: int, slots_U: np.ndarray) -> int:
    """The slots of the keys that were counted at least `min_count` times; their number."""
    num = 0
    for slot in range(len(table_C2)):
        if table_C2[slot, 0] != _EMPTY and table_C2[slot, 1] >= min_count:
            slots_U[num] = slot
            num += 1
    return num


@nb.njit(nogil=True, cache=True)
def place_ids(
    slots_M: np.ndarray, positions_M: np.ndarray, ids_C: np.ndarray, ids_L: np.ndarray
) -> None:
    """`ids_L[position] = ids_C[slot]` for every candidate."""
    for j in range(len(slots_M)):
        if j + AHEAD < len(slots_M):
            prefetch_row(ids_C, np.int64(slots_M[j + AHEAD]))
        ids_L[positions_M[j]] = ids_C[slots_M[j], 0]
