"""fgrams/v1 <-> index/trie.npy: build, map, and match the longest f-gram ending at each position.

Shapes: B rows, T positions, K max_n, S f-grams, N buckets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, FGramsManifest, load_manifest
from scone_core.artifacts.shards import local_shard
from scone_core.fgrams import trie
from scone_core.machine.mapped_memory import expect_hits

INDEX = "index/trie.npy"


class Matches(NamedTuple):
    """The longest f-gram that ends at each position."""

    fgram_ids_BT: np.ndarray
    """int64, -1 for a miss."""
    match_len_BT: np.ndarray
    """uint8, tokens of the match; 1 for a miss."""


@dataclass(frozen=True)
class FGramIndex:
    """The mapped trie of a fgrams/v1 artifact; safe to share between threads."""

    buckets_N8: np.ndarray
    """uint64, the form that `match_rows` and `find_node` take."""
    max_n: int
    num_fgrams: int
    manifest: FGramsManifest | None = None

    @classmethod
    def open(cls, folder: str) -> Self:
        """Map the index of the fgrams/v1 artifact in `folder`.

        Raises:
            ArtifactError: no such artifact, or its index is missing, truncated or not its own.
        """
        return cls.map(folder, load_manifest(FGramsManifest, folder))

    @classmethod
    def map(cls, folder: str, manifest: FGramsManifest) -> Self:
        """`open` for whoever has the manifest already.

        Raises:
            ArtifactError: the index is missing, truncated or not its own.
        """
        path = storage.join(folder, manifest.index.name)
        if storage.file_size(path) != manifest.index.num_bytes:
            raise ArtifactError(f"{path}: missing or truncated; run the count stage again")
        local = local_shard(folder, manifest.index)
        try:
            buckets_N8 = np.load(local, mmap_mode="r")
        except ValueError as error:
            raise ArtifactError(f"{path}: not a trie index ({error}); rebuild {folder}") from error
        expected = (trie.num_buckets(manifest.num_fgrams), 8)
        if buckets_N8.dtype != np.uint64 or buckets_N8.shape != expected:
            raise ArtifactError(f"{path}: {buckets_N8.shape=}, expected uint64 {expected}")
        expect_hits(buckets_N8)
        return cls(buckets_N8.view(np.ndarray), manifest.max_n, manifest.num_fgrams, manifest)

    @classmethod
    def from_fgrams(cls, tokens_SK: np.ndarray, n_S: np.ndarray, *, vocab_size: int) -> Self:
        """An index in memory over f-grams in rank order (id = row).

        Args:
            tokens_SK: integer token ids, zero padded behind the n-th.
            n_S: integer, 2 <= n <= K.

        Raises:
            ValueError: a row repeats, or its prefix or suffix is not ranked before it, or a token
                is outside the vocabulary.
        """
        buckets_N8 = trie.clear(np.empty((trie.num_buckets(len(n_S)), 8), np.uint64))
        insert_fgrams(buckets_N8, tokens_SK, n_S, first_id=0, vocab_size=vocab_size)
        return cls(buckets_N8, tokens_SK.shape[1], len(n_S))

    def match(self, tokens_BT: np.ndarray, *, max_n: int | None = None) -> Matches:
        """The longest f-gram that ends at each position, of at most `max_n` tokens.

        Each row of `tokens_BT` (any integer dtype) is a sequence of its own; a negative id or one
        outside the vocabulary is in no f-gram.
        """
        fgram_ids_BT = np.empty(tokens_BT.shape, np.int64)
        match_len_BT = np.empty(tokens_BT.shape, np.uint8)
        limit = min(max_n or self.max_n, self.max_n)
        tokens_BT = np.ascontiguousarray(tokens_BT)
        trie.match_rows(tokens_BT, self.buckets_N8, limit, fgram_ids_BT, match_len_BT)
        return Matches(fgram_ids_BT, match_len_BT)


def write_index(
    path: str,
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    num_fgrams: int,
    vocab_size: int,
) -> tuple[int, str]:
    """Build the index of (tokens_SK, n_S) blocks in rank order and publish it as `path`.

    Returns:
        Size in bytes and sha256 (hex).

    Raises:
        ValueError: as `FGramIndex.from_fgrams`.
    """

    def write(file: Path) -> None:
        shape = (trie.num_buckets(num_fgrams), 8)
        buckets_N8 = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint64, shape=shape)
        trie.clear(buckets_N8)
        first_id = 0
        for tokens_SK, n_S in blocks:
            insert_fgrams(buckets_N8, tokens_SK, n_S, first_id=first_id, vocab_size=vocab_size)
            first_id += len(n_S)
        buckets_N8.flush()

    return storage.write_atomic(path, write)


def insert_fgrams(
    buckets_N8: np.ndarray,
    tokens_SK: np.ndarray,
    n_S: np.ndarray,
    *,
    first_id: int,
    vocab_size: int,
) -> None:
    """Insert f-grams of consecutive ranks, ids `first_id`, `first_id + 1`, ...

    Because the prefix and the suffix of an f-gram rank before it, one pass both builds the trie and
    proves closure.

    Raises:
        ValueError: as `FGramIndex.from_fgrams`.
    """
    if vocab_size > trie.MAX_VOCAB:
        raise ValueError(f"{vocab_size=}: the index holds token ids below {trie.MAX_VOCAB}")
    if first_id + len(n_S) > trie.MAX_FGRAMS:
        raise ValueError(f"num_fgrams > {trie.MAX_FGRAMS}: f-gram ids have 32 bits")
    if len(n_S) and not (2 <= n_S.min() and n_S.max() <= tokens_SK.shape[1]):
        raise ValueError(f"n from {n_S.min()} to {n_S.max()}, expected 2 to {tokens_SK.shape[1]}")
    bad = trie.insert_rows(buckets_N8, tokens_SK, n_S, first_id, vocab_size)
    if bad < len(n_S):
        fgram = tokens_SK[bad, : n_S[bad]].tolist()
        raise ValueError(
            f"f-gram {first_id + bad} {fgram}: listed twice, outside {vocab_size=}, "
            "or its prefix or suffix is not ranked before it"
        )
