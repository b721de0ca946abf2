"""rows of n-grams with their counts -> other rows: select, reorder, join, convert.

Shapes: M n-grams, K max_n.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

NGram = tuple[int, ...]
"""The token ids of one n-gram."""


class NGrams(NamedTuple):
    """Rows of n-grams with their counts. No verb changes its rows; `part`, `to_batch` and
    `from_batch` share memory with what they are given.
    """

    tokens_MK: np.ndarray
    """uint32, zero padded behind the n-th token."""
    n_M: np.ndarray
    """uint8."""
    counts_M: np.ndarray
    """uint64."""

    @property
    def num(self) -> int:
        """M, the number of rows."""
        return len(self.n_M)

    @property
    def is_token_MK(self) -> np.ndarray:
        """bool, where a row has a token and no padding."""
        return np.arange(self.tokens_MK.shape[1]) < self.n_M[:, None]

    def where(self, keep_M: np.ndarray) -> Self:
        """The rows at which `keep_M` (bool) is true, in their order."""
        return self.take(np.flatnonzero(keep_M))

    def take(self, rows_M: np.ndarray) -> Self:
        """The rows with the numbers `rows_M` (int64), in that order. `np.take` copies a row of five
        tokens in 22 ns, indexing in 85.
        """
        return type(self)(*(np.take(column, rows_M, axis=0) for column in self))

    def part(self, first: int, last: int) -> Self:
        """The rows `first` to `last - 1`, without a copy."""
        return type(self)(*(column[first:last] for column in self))

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """The rows of all parts, of which there is at least one, one part behind the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def without(self, ngrams: Iterable[NGram]) -> Self:
        """The rows that are none of `ngrams`."""
        keep_M = np.ones(self.num, bool)
        for ngram in ngrams:
            same_M = (self.tokens_MK[:, : len(ngram)] == ngram).all(axis=1)
            keep_M &= ~same_M | (self.n_M != len(ngram))
        return self if keep_M.all() else self.where(keep_M)

    def without_tokens(self, tokens: Sequence[int]) -> Self:
        """The rows that hold none of the token ids `tokens`."""
        if not tokens:
            return self
        excluded_MK = np.isin(self.tokens_MK, tokens) & self.is_token_MK
        return self.where(~np.logical_or.reduce(excluded_MK, axis=1))

    def tuples(self) -> list[NGram]:
        """The token ids of every row."""
        rows = zip(self.tokens_MK.tolist(), self.n_M.tolist(), strict=True)
        return [tuple(tokens[:n]) for tokens, n in rows]

    @classmethod
    def from_counts(cls, counts: Mapping[NGram, int], *, max_n: int) -> Self:
        """One row for every n-gram of a mapping to counts, in its order."""
        tokens_MK = np.zeros((len(counts), max_n), np.uint32)
        for row, ngram in enumerate(counts):
            tokens_MK[row, : len(ngram)] = ngram
        n_M = np.array([len(ngram) for ngram in counts], np.uint8)
        return cls(tokens_MK, n_M, np.array(list(counts.values()), np.uint64))

    def to_batch(self) -> pa.RecordBatch:
        """Arrow columns `n uint8, tokens fixed_size_list<uint32>[K], count uint64`."""
        tokens_MK = np.ascontiguousarray(self.tokens_MK)
        values = pa.array(tokens_MK.reshape(-1))
        tokens = pa.FixedSizeListArray.from_arrays(values, tokens_MK.shape[1])
        columns = {"n": pa.array(self.n_M), "tokens": tokens, "count": pa.array(self.counts_M)}
        return pa.RecordBatch.from_pydict(columns)

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> Self:
        """The inverse of `to_batch`; other columns of `batch` are left out."""
        tokens = batch.column("tokens")
        max_n = tokens.type.list_size
        first, last = tokens.offset * max_n, (tokens.offset + len(tokens)) * max_n
        tokens_MK = tokens.values.to_numpy()[first:last].reshape(-1, max_n)
        return cls(tokens_MK, batch.column("n").to_numpy(), batch.column("count").to_numpy())
