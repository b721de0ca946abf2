"""Addresses of stored rows -> rows in the caller's buffer: compiled copies and dequantisation.

Shapes: M rows of one lookup, T rows of the caller's buffer, D width, R bytes of one stored row.
"""

import numba as nb
import numpy as np

from scone_core.machine.intrinsics import CACHE_LINE, copy_bytes, fence, prefetch_line, stream_line
from scone_core.table.row_formats import SCALE_BYTES

AHEAD, LINES = 4, 8
"""Rows between the prefetch of a row and its copy, and how many of its first lines are fetched. The
hardware follows a row by itself once it is in it; what it cannot know is the next row's page.
4,096-byte rows at random, batch 256: 0.84 us a row without, 0.71 with one line, 0.57 with 8,
0.66 with all 64."""

STREAMED_BYTES = 8 << 20
"""From this size on a result, which no core's cache can hold, is written past the caches; else
every line of it would be read from memory before it is overwritten. 4,096-byte rows, batch 4096:
0.72 us a row instead of 0.89."""


@nb.njit(nogil=True, cache=True)
def locate(
    ids_M: np.ndarray,
    first_ids: np.ndarray,
    bases: np.ndarray,
    limits: tuple[int, int, int, int],
    ranks: np.ndarray,
    addresses_M: np.ndarray,
) -> tuple[int, int, int]:
    """The address of every row's bytes; shard s begins at address `bases[s]` with id
    `first_ids[s]`.

    Args:
        limits: end of the ids, bytes of a row, end of the hot ranks, begin of the cold ranks.
        ranks: uint32, the rank of every id; empty where ids are ranks.

    Returns:
        The position of the first id without a row, or -1; the numbers of hot and of cold ids.
    """
    end, row_bytes, hot_end, cold_begin = limits
    begin, last = first_ids[0], len(first_ids) - 1
    step = first_ids[1] - begin if last > 0 else np.int64(end)
    num_hot = num_cold = 0
    for m in range(len(ids_M)):
        row = ids_M[m]
        if row < begin or row >= end:
            return m, num_hot, num_cold
        shard = min(
            (row - begin) // step, last
        )  # right at once when all shards but the last have one size
        if row < first_ids[shard] or (shard < last and row >= first_ids[shard + 1]):
            shard = np.searchsorted(first_ids, row, side="right") - 1
        addresses_M[m] = bases[shard] + (row - first_ids[shard]) * row_bytes
        rank = row if len(ranks) == 0 else np.int64(ranks[row])
        num_hot += int(rank < hot_end)
        num_cold += int(rank >= cold_begin)
    return -1, num_hot, num_cold


@nb.njit(inline="always")
def _prefetch_row(address: int, num_bytes: int) -> None:
    for byte in range(0, min(num_bytes, LINES * CACHE_LINE), CACHE_LINE):
        prefetch_line(address + byte)


@nb.njit(nogil=True, cache=True)
def copy_rows(
    addresses_M: np.ndarray, chosen: np.ndarray, places_M: np.ndarray, out_TR: np.ndarray
) -> None:
    """Row `places_M[m]` of `out_TR` (uint8, C-contiguous) becomes the bytes at `addresses_M[m]`,
    for every m in `chosen`; both are int64.
    """
    row_bytes = out_TR.shape[1]
    target = out_TR.ctypes.data
    has_whole_lines = target % CACHE_LINE == 0 and row_bytes % CACHE_LINE == 0
    is_streamed = has_whole_lines and len(chosen) * row_bytes >= STREAMED_BYTES
    for i in range(len(chosen)):
        m = chosen[i]
        _prefetch_row(addresses_M[chosen[min(i + AHEAD, len(chosen) - 1)]], row_bytes)
        row = target + places_M[m] * row_bytes
        if is_streamed:
            for byte in range(0, row_bytes, CACHE_LINE):
                stream_line(row + byte, addresses_M[m] + byte)
        else:
            copy_bytes(row, addresses_M[m], row_bytes)
    if is_streamed:
        fence()


@nb.njit(nogil=True, cache=True)
def _decode(record_R: np.ndarray, byte_values: np.ndarray, row_D: np.ndarray) -> None:
    """The float32 values of one record; `byte_values` is empty for int8, which needs no table."""
    scale = record_R[:SCALE_BYTES].view(np.float32)[0]
    if len(byte_values) == 0:
        values_D = record_R[SCALE_BYTES:].view(np.int8)
        for d in range(len(row_D)):
            row_D[d] = np.float32(values_D[d]) * scale
    else:
        for d in range(len(row_D)):
            row_D[d] = byte_values[record_R[SCALE_BYTES + d]] * scale


@nb.njit(nogil=True, cache=True)
def decode_rows(
    addresses_M: np.ndarray,
    chosen: np.ndarray,
    places_M: np.ndarray,
    byte_values: np.ndarray,
    out_TD: np.ndarray,
) -> None:
    """Row `places_M[m]` of `out_TD` (float32) becomes the values of the record at `addresses_M[m]`,
    for every m in `chosen`.
    """
    record_R = np.empty(SCALE_BYTES + out_TD.shape[1], np.uint8)
    for i in range(len(chosen)):
        m = chosen[i]
        _prefetch_row(addresses_M[chosen[min(i + AHEAD, len(chosen) - 1)]], len(record_R))
        copy_bytes(record_R.ctypes.data, addresses_M[m], len(record_R))
        _decode(record_R, byte_values, out_TD[places_M[m]])


@nb.njit(nogil=True, cache=True)
def decode_rows_bf16(
    addresses_M: np.ndarray,
    chosen: np.ndarray,
    places_M: np.ndarray,
    byte_values: np.ndarray,
    out_TD: np.ndarray,
) -> None:
    """`decode_rows` into the bits of bfloat16 (uint16), rounded to the nearest, ties to even."""
    record_R = np.empty(SCALE_BYTES + out_TD.shape[1], np.uint8)
    row_D = np.empty(out_TD.shape[1], np.float32)
    bits_D = row_D.view(np.uint32)
    for i in range(len(chosen)):
        m = chosen[i]
        _prefetch_row(addresses_M[chosen[min(i + AHEAD, len(chosen) - 1)]], len(record_R))
        copy_bytes(record_R.ctypes.data, addresses_M[m], len(record_R))
        _decode(record_R, byte_values, row_D)
        for d in range(len(row_D)):
            bits = bits_D[d]
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            out_TD[places_M[m], d] = np.uint16((bits + half) >> np.uint32(16))
