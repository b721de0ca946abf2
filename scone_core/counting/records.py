"""tokens behind a position <-> a record of fixed width: how they are packed, sorted and found.

The record of a position is the max_n - 1 tokens behind it as one big-endian number of `num_bits`
bits, END (all ones) behind the end of the document. Sorted, records of equal prefixes of any length
are adjacent. Up to 64 bits a record is one word; beyond, it is a low word and a high part in the
smallest type that holds it: 2 bytes for vocabularies up to 2^18 at max_n 5, 8 bytes at most.

Shapes: R records.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scone_core.counting.record_kernels import sort_pairs

MAX_N = 8
MAX_BITS = 128


@dataclass(frozen=True)
class Layout:
    """How the tokens behind a position are packed.

    Raises:
        ValueError: 128 bits do not hold them.
    """

    max_n: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not 2 <= self.max_n <= MAX_N:
            raise ValueError(f"max_n={self.max_n}: expected 2 to {MAX_N}")
        if self.num_bits > MAX_BITS:
            raise ValueError(
                f"max_n={self.max_n}, vocab_size={self.vocab_size}: {self.num_bits} bits per "
                f"record, {MAX_BITS} are possible; lower max_n to {MAX_BITS // self.bits + 1}"
            )

    @property
    def bits(self) -> int:
        """Bits of a token; all ones is END, so every id of the vocabulary is below it."""
        return self.vocab_size.bit_length()

    @property
    def num_bits(self) -> int:
        return self.bits * (self.max_n - 1)

    @property
    def high_dtype(self) -> np.dtype | None:
        """The type of a record's high part, the bits above 64; None when there are none."""
        for dtype in (np.uint16, np.uint32, np.uint64):
            if 64 < self.num_bits <= 64 + 8 * np.dtype(dtype).itemsize:
                return np.dtype(dtype)
        return None

    @property
    def record_bytes(self) -> int:
        return 8 + (self.high_dtype.itemsize if self.high_dtype else 0)

    def truncate(self, value: int, num_tokens: int) -> int:
        """The smallest record that begins with the first `num_tokens` tokens of `value`."""
        shift = self.bits * (self.max_n - 1 - num_tokens)
        return value >> shift << shift

    def ngram(self, token: int, value: int, n: int) -> tuple[int, ...] | None:
        """The n-gram of n tokens at the position of a record; None when the document ends before.

        Args:
            token: the token at the position, which is the record's group.
        """
        end = (1 << self.bits) - 1
        shifts = [self.bits * (self.max_n - 1 - j) for j in range(1, n)]
        tokens = [(value >> shift) & end for shift in shifts]
        return None if end in tokens else (token, *tokens)

    def bounds(self, ngram: tuple[int, ...]) -> tuple[int, int]:
        """The smallest record that begins with the n-gram's second and later tokens, and the
        smallest record that is behind all of these.
        """
        value = 0
        for token in ngram[1:]:
            value = value << self.bits | token
        shift = self.bits * (self.max_n - len(ngram))
        return value << shift, (value + 1) << shift


class Records(NamedTuple):
    """Records as columns."""

    low_R: np.ndarray
    """uint64, the lowest 64 bits."""
    high_R: np.ndarray | None = None
    """The bits above, in the type `Layout.high_dtype`."""

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The low words, and the high parts where there are some."""
        return (self.low_R,) if self.high_R is None else (self.low_R, self.high_R)

    def part(self, first: int, last: int) -> "Records":
        return Records(*(column[first:last] for column in self.columns))

    def copy(self) -> "Records":
        return Records(*(column.copy() for column in self.columns))

    def value(self, i: int) -> int:
        """Record i as a number."""
        return int(self.low_R[i]) | (0 if self.high_R is None else int(self.high_R[i]) << 64)


def sort_records(records: Records) -> None:
    """Sort in place."""
    if records.high_R is None:
        records.low_R.sort()
    else:
        sort_pairs(records.low_R, records.high_R, 0, len(records.low_R) - 1)


def find_value(records: Records, value: int) -> int:
    """The number of records that are smaller than `value`; `records` are sorted."""
    low, high = 0, len(records.low_R)
    while low < high:
        middle = (low + high) // 2
        if records.value(middle) < value:
            low = middle + 1
        else:
            high = middle
    return low
