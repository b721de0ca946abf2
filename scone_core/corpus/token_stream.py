"""tokens/v1 -> one virtual stream of ids: separator, document, separator, document, ... separator.

Legend: B windows of a batch, T their length; A documents of a shard, L its tokens.
"""

from dataclasses import dataclass
from typing import Self

import numba
import numpy as np

from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.corpus.token_shards import map_documents, map_targets

NOT_A_TARGET = -100
"""PyTorch's cross entropy ignores such targets."""


@dataclass(frozen=True)
class TokenStream:
    """The virtual stream of a tokens/v1 artifact, over its mapped shards."""

    manifest: TokensManifest
    shards: tuple[tuple[np.ndarray, np.ndarray], ...]
    """tokens_L and offsets_A1 of every shard."""
    targets: tuple[np.ndarray, ...] | None
    """is_target_L of every shard; None where every token is a target."""
    starts: np.ndarray
    """int64: the position at which each shard begins, and the position of the last separator."""

    @classmethod
    def open(cls, folder: str) -> Self:
        """Map the artifact in `folder`.

        Raises:
            ArtifactError: missing or damaged.
        """
        manifest = load_manifest(TokensManifest, folder)
        shards = tuple(map_documents(folder, shard) for shard in manifest.shards)
        marks = [map_targets(folder, shard) for shard in manifest.shards]
        targets = tuple(mark for mark in marks if mark is not None) or None
        lengths = [len(tokens_L) + len(offsets_A1) - 1 for tokens_L, offsets_A1 in shards]
        return cls(manifest, shards, targets, np.cumsum([0, *lengths]))

    @property
    def length(self) -> int:
        """Tokens of the stream, its separators included."""
        return int(self.starts[-1]) + 1

    def read(self, start: int, num: int) -> np.ndarray:
        """int64 [num]: the tokens from position `start`; separators follow the end."""
        tokens = np.full(num, self.manifest.separator_id, np.int64)
        self._copy(self.shards, start, tokens)
        return tokens

    def read_targets(self, start: int, num: int) -> np.ndarray:
        """bool [num]: which of these tokens are targets. Separators are targets only where all
        tokens are.
        """
        if self.targets is None:
            return np.ones(num, np.bool_)
        marks = np.zeros(num, np.int64)
        offsets = (offsets_A1 for _, offsets_A1 in self.shards)
        self._copy(tuple(zip(self.targets, offsets, strict=True)), start, marks)
        return marks > 0

    def _copy(
        self, shards: tuple[tuple[np.ndarray, np.ndarray], ...], start: int, out: np.ndarray
    ) -> None:
        """Fill `out` from position `start` on, leaving separators as they are."""
        first = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        for shard, shard_start, shard_end in zip(
            shards[first:], self.starts[first:-1], self.starts[first + 1 :], strict=True
        ):
            lo, hi = max(start, shard_start), min(start + len(out), shard_end)
            if lo >= hi:
                break
            _copy_documents(*shard, lo - shard_start, out[lo - start : hi - start])

    def windows(self, windows_B: np.ndarray, sequence_length: int) -> np.ndarray:
        """int64 [B, T + 1]: the given windows of the stream."""
        return np.stack([self.read(w * sequence_length, sequence_length + 1) for w in windows_B])

    def targets_of(self, windows_B: np.ndarray, sequence_length: int) -> np.ndarray:
        """int64 [B, T]: the targets of the given windows, NOT_A_TARGET where there is none."""
        tokens_BT1 = self.windows(windows_B, sequence_length)
        is_target_BT = np.stack(
            [self.read_targets(w * sequence_length + 1, sequence_length) for w in windows_B]
        )
        return np.where(is_target_BT, tokens_BT1[:, 1:], NOT_A_TARGET)


@numba.njit(cache=True, nogil=True)
def _copy_documents(
    tokens_L: np.ndarray, offsets_A1: np.ndarray, start: int, out: np.ndarray
) -> None:
    """Fill `out` from position `start` of a shard's stream, leaving separators as they are."""
    low, high = 0, len(offsets_A1) - 1
    while high - low > 1:  # the last document whose separator is at or before `start`
        middle = (low + high) // 2
        if offsets_A1[middle] + middle <= start:
            low = middle
        else:
            high = middle
    document = low
    for i in range(len(out)):
        position = start + i
        while position >= offsets_A1[document + 1] + document + 1:
            document += 1
        if position > offsets_A1[document] + document:
            out[i] = tokens_L[position - document - 1]
