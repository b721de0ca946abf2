"""documents -> exact counts of all n-grams, n = 2 .. max_n, in one scan: suffix records, grouped
chunks, sorted ranges.

Every position writes one 8-byte record into the group of its token: the next max_n - 1 tokens,
packed big-endian, END behind the end of the document. Sorted, equal prefixes of any length are
adjacent, so one pass over the runs counts every n at once and nothing is pruned before it is
complete. A chunk is a part of the corpus, grouped; a range is some groups of all chunks. (Truncated
suffix sort after Berberich and Bedathur, EDBT 2013.)

Shapes: L tokens, D documents, G groups, R records, M n-grams, K max_n.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numba as nb
import numpy as np
import pyarrow as pa

from scone_core import storage
from scone_core.artifacts import ArtifactError

MAX_N = 5
MAX_VOCAB = 65_535
RECORD_BYTES = 8
"""Four tokens of 16 bits."""

_BITS = np.uint64(16)
_END = np.uint64(0xFFFF)
_ALL_END = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


class NGrams(NamedTuple):
    """n-grams with their counts."""

    tokens_MK: np.ndarray
    """uint32, zero padded behind the n-th token."""
    n_M: np.ndarray
    """uint8."""
    counts_M: np.ndarray
    """uint64."""


class Piece(NamedTuple):
    """Positions `first` to `last` of a flat token stream; documents may reach beyond both."""

    tokens_L: np.ndarray
    """Unsigned integers below the vocabulary size."""
    offsets_D1: np.ndarray
    """int64, document i is tokens_L[offsets_D1[i]:offsets_D1[i + 1]]."""
    first: int
    last: int


class Groups(NamedTuple):
    """Records grouped by token, tokens ascending, each group in no order."""

    starts_G1: np.ndarray
    """int64, group g is records_R[starts_G1[g]:starts_G1[g + 1]]."""
    records_R: np.ndarray
    """uint64."""


def check_limits(*, max_n: int, vocab_size: int) -> None:
    """Raises ValueError when a record cannot hold the n-grams."""
    if not 2 <= max_n <= MAX_N:
        raise ValueError(f"{max_n=}: expected 2 to {MAX_N}")
    if vocab_size > MAX_VOCAB:
        raise ValueError(
            f"{vocab_size=}: counting holds token ids up to {MAX_VOCAB - 1}; "
            "use a tokenizer with a smaller vocabulary"
        )


def count_ngrams(pieces: Iterable[Piece], *, max_n: int, vocab_size: int, min_count: int) -> NGrams:
    """All n-grams that occur at least `min_count` times in `pieces`, in memory, in one go."""
    groups = group_records(list(pieces), max_n=max_n, vocab_size=vocab_size)
    return count_groups(groups, first_token=0, max_n=max_n, min_count=min_count)


def group_records(pieces: list[Piece], *, max_n: int, vocab_size: int) -> Groups:
    """One record per position of `pieces`, grouped by token.

    Raises:
        ValueError: beyond the limits of `check_limits`, or a token outside the vocabulary.
    """
    check_limits(max_n=max_n, vocab_size=vocab_size)
    sizes_G = np.zeros(vocab_size, np.int64)
    for piece in pieces:
        largest = _count_tokens(piece.tokens_L[piece.first : piece.last], sizes_G)
        if largest >= vocab_size:
            raise ValueError(f"token id {largest} >= {vocab_size=}: tokens of another tokenizer")
    starts_G1 = starts_of(sizes_G)
    ends_G = starts_G1[1:].copy()
    records_R = np.empty(starts_G1[-1], np.uint64)
    for piece in pieces:
        _scatter(*piece, max_n, ends_G, records_R)
    return Groups(starts_G1, records_R)


def starts_of(sizes_G: np.ndarray) -> np.ndarray:
    """int64 [G + 1]: where each group starts, and the end of the last."""
    starts_G1 = np.zeros(len(sizes_G) + 1, np.int64)
    np.cumsum(sizes_G, out=starts_G1[1:])
    return starts_G1


def write_chunk(path: str, groups: Groups) -> int:
    """Publish groups as a chunk file: the starts, then the records, little-endian. Its bytes."""

    def write(file: Path) -> None:
        with open(file, "wb") as sink:
            groups.starts_G1.tofile(sink)
            groups.records_R.tofile(sink)

    return storage.write_atomic(path, write)[0]


def read_starts(path: str, first_group: int, last_group: int) -> np.ndarray:
    """Where the groups `first_group` to `last_group` start in a chunk, int64."""
    num = last_group - first_group + 1
    return np.frombuffer(_read(path, first_group * 8, num * 8), np.int64)


def gather_groups(
    paths: list[str], first_group: int, last_group: int, *, num_groups: int
) -> Groups:
    """Some groups of all chunks, joined: one contiguous read per chunk.

    Raises:
        ArtifactError: a chunk is missing or truncated.
    """
    starts = [read_starts(path, first_group, last_group) for path in paths]
    joined_G1 = np.zeros(last_group - first_group + 1, np.int64)
    for starts_G1 in starts:
        joined_G1 += starts_G1 - starts_G1[0]
    next_G = joined_G1[:-1].copy()
    records_R = np.empty(joined_G1[-1], np.uint64)
    for path, starts_G1 in zip(paths, starts, strict=True):
        offset = (num_groups + 1 + starts_G1[0]) * 8
        data = _read(path, int(offset), int(starts_G1[-1] - starts_G1[0]) * RECORD_BYTES)
        _append_groups(np.frombuffer(data, np.uint64), starts_G1, next_G, records_R)
    return Groups(joined_G1, records_R)


def count_groups(groups: Groups, *, first_token: int, max_n: int, min_count: int) -> NGrams:
    """The n-grams of whole groups that occur at least `min_count` times, tokens ascending among
    those of equal n. Sorts the records of `groups` in place.

    Group g holds the records of token `first_token + g`.
    """
    sizes_G = np.diff(groups.starts_G1)
    for group in np.flatnonzero(sizes_G >= max(min_count, 2)):
        groups.records_R[groups.starts_G1[group] : groups.starts_G1[group + 1]].sort()
    most = int((sizes_G // min_count).sum()) * (max_n - 1)
    found = NGrams(
        np.zeros((most, max_n), np.uint32), np.empty(most, np.uint8), np.empty(most, np.uint64)
    )
    num = _emit_groups(*groups, first_token, max_n, min_count, *found)
    return NGrams(*(column[:num] for column in found))


def plan_ranges(sizes_G: np.ndarray, num_ranges: int) -> np.ndarray:
    """Cut groups into ranges of about equal numbers of records, int64 [num_ranges + 1]: range r is
    the groups from cuts[r] to cuts[r + 1]. A range may be empty.
    """
    ends_G = np.cumsum(sizes_G)
    targets = np.arange(1, num_ranges) * (ends_G[-1] / num_ranges)
    return np.concatenate([[0], np.searchsorted(ends_G, targets), [len(sizes_G)]])


def _read(path: str, offset: int, num_bytes: int) -> pa.Buffer:
    filesystem, inner = storage.resolve(path)
    try:
        with filesystem.open_input_file(inner) as file:
            data = file.read_buffer(num_bytes) if not offset else file.read_at(num_bytes, offset)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: scratch file is gone; start the count stage again") from error
    if len(data) != num_bytes:
        raise ArtifactError(f"{path}: truncated scratch file; delete it and start again")
    return data


@nb.njit(nogil=True, cache=True)
def _count_tokens(tokens_L: np.ndarray, sizes_G: np.ndarray) -> np.int64:
    """Add the occurrences of every token to `sizes_G`; the largest token.

    Stops at a token outside the vocabulary.
    """
    largest = np.int64(0)
    for i in range(len(tokens_L)):
        token = np.int64(tokens_L[i])
        if token > largest:
            largest = token
        if token >= len(sizes_G):
            break
        sizes_G[token] += 1
    return largest


@nb.njit(nogil=True, cache=True)
def _scatter(
    tokens_L: np.ndarray,
    offsets_D1: np.ndarray,
    first: int,
    last: int,
    max_n: int,
    ends_G: np.ndarray,
    records_R: np.ndarray,
) -> None:
    """Write the record of every position in front of `ends_G` of its group, and move that.

    From the back, so the window of next tokens costs one shift per position and the end of a
    document resets it.
    """
    unused = _ALL_END >> (_BITS * np.uint64(max_n - 1)) if max_n < MAX_N else np.uint64(0)
    document = np.searchsorted(offsets_D1, last, side="left") - 1
    while document >= 0 and offsets_D1[document + 1] > first:
        end = offsets_D1[document + 1]
        window = _ALL_END
        for i in range(min(end, last + MAX_N - 1) - 1, last - 1, -1):
            window = (window >> _BITS) | (np.uint64(tokens_L[i]) << np.uint64(48))
        for i in range(min(end, last) - 1, max(offsets_D1[document], first) - 1, -1):
            token = np.int64(tokens_L[i])
            ends_G[token] -= 1
            records_R[ends_G[token]] = window | unused
            window = (window >> _BITS) | (np.uint64(token) << np.uint64(48))
        document -= 1


@nb.njit(nogil=True, cache=True)
def _append_groups(
    source_R: np.ndarray, starts_G1: np.ndarray, next_G: np.ndarray, records_R: np.ndarray
) -> None:
    """Copy each group of a chunk to its place `next_G` among the joined groups, and move that."""
    for group in range(len(next_G)):
        begin = starts_G1[group] - starts_G1[0]
        num = starts_G1[group + 1] - starts_G1[group]
        place = next_G[group]
        for i in range(num):
            records_R[place + i] = source_R[begin + i]
        next_G[group] = place + num


@nb.njit(nogil=True, cache=True)
def _emit_groups(
    starts_G1: np.ndarray,
    records_R: np.ndarray,
    first_token: int,
    max_n: int,
    min_count: int,
    tokens_MK: np.ndarray,
    n_M: np.ndarray,
    counts_M: np.ndarray,
) -> int:
    """Emit the frequent n-grams of all groups; their number."""
    num = 0
    for group in range(len(starts_G1) - 1):
        segment_R = records_R[starts_G1[group] : starts_G1[group + 1]]
        if len(segment_R) >= min_count:
            token = first_token + group
            num = _emit_runs(segment_R, token, max_n, min_count, tokens_MK, n_M, counts_M, num)
    return num


@nb.njit(nogil=True, cache=True)
def _emit_runs(
    segment_R: np.ndarray,
    token: int,
    max_n: int,
    min_count: int,
    tokens_MK: np.ndarray,
    n_M: np.ndarray,
    counts_M: np.ndarray,
    num: int,
) -> int:
    """Emit the n-grams of one sorted group behind the first `num`; the new number.

    A run of n-grams ends where one of their n - 1 tokens in the record changes.
    """
    begins = np.zeros(MAX_N + 1, np.int64)
    for i in range(1, len(segment_R) + 1):
        record = segment_R[i - 1]
        changed = record ^ segment_R[i] if i < len(segment_R) else _ALL_END
        n = max_n
        shift = _BITS * np.uint64(MAX_N - max_n)
        while n >= 2 and changed >> shift:
            if i - begins[n] >= min_count and (record >> shift) & _END != _END:
                tokens_MK[num, 0] = token
                for j in range(1, n):
                    tokens_MK[num, j] = (record >> np.uint64(16 * (MAX_N - 1 - j))) & _END
                n_M[num] = n
                counts_M[num] = i - begins[n]
                num += 1
            begins[n] = i
            n -= 1
            shift += _BITS
    return num
