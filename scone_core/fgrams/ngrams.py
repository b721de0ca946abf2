"""n-grams with their counts, and what is done with rows of them.

Shapes: M n-grams, K max_n.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class NGrams(NamedTuple):
    """n-grams with their counts."""

    tokens_MK: np.ndarray
    """uint32, zero padded behind the n-th token."""
    n_M: np.ndarray
    """uint8."""
    counts_M: np.ndarray
    """uint64."""


NGram = tuple[int, ...]


def without(found: NGrams, ngrams: Iterable[NGram]) -> NGrams:
    """`found` less some n-grams."""
    keep_M = np.ones(len(found.n_M), bool)
    for ngram in ngrams:
        same_M = (found.tokens_MK[:, : len(ngram)] == ngram).all(axis=1)
        keep_M &= ~same_M | (found.n_M != len(ngram))
    return found if keep_M.all() else NGrams(*(column[keep_M] for column in found))


def exclude(found: NGrams, tokens: Sequence[int]) -> NGrams:
    """`found` less all n-grams that hold one of `tokens`."""
    if not tokens:
        return found
    inside_MK = np.arange(found.tokens_MK.shape[1]) < found.n_M[:, None]
    keep_M = ~(np.isin(found.tokens_MK, tokens) & inside_MK).any(axis=1)
    return NGrams(*(column[keep_M] for column in found))


def ngrams_from(counts: dict[NGram, int], max_n: int) -> NGrams:
    """Rows of n-grams given as tuples with their counts, in that order."""
    tokens_MK = np.zeros((len(counts), max_n), np.uint32)
    for row, ngram in enumerate(counts):
        tokens_MK[row, : len(ngram)] = ngram
    n_M = np.array([len(ngram) for ngram in counts], np.uint8)
    return NGrams(tokens_MK, n_M, np.array(list(counts.values()), np.uint64))


def ngram_batch(ngrams: NGrams) -> pa.RecordBatch:
    """n-grams as Arrow columns n, tokens, count."""
    tokens_MK = np.ascontiguousarray(ngrams.tokens_MK)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(tokens_MK.reshape(-1)), tokens_MK.shape[1])
    columns = {"n": pa.array(ngrams.n_M), "tokens": tokens, "count": pa.array(ngrams.counts_M)}
    return pa.RecordBatch.from_pydict(columns)


def ngrams_of(batch: pa.RecordBatch) -> NGrams:
    """The inverse of `ngram_batch`, without a copy; other columns are left out."""
    tokens = batch.column("tokens")
    max_n = tokens.type.list_size
    values = tokens.values.to_numpy()[tokens.offset * max_n : (tokens.offset + len(tokens)) * max_n]
    return NGrams(
        values.reshape(-1, max_n),
        batch.column("n").to_numpy(),
        batch.column("count").to_numpy(),
    )
