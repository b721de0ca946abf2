"""tokens/v1 -> micro-batches: the same samples for any number of ranks, at any step, in any order.

The corpus is one virtual stream `separator document separator document ... separator`. Window w of
it holds the tokens [w * T, w * T + T]: T inputs and their T targets. Every epoch visits the
windows in its own order, a permutation that is computed and never stored. Sample g is window
`g % num_windows` in the order of epoch `g // num_windows`.

Legend: B windows of a batch, T sequence length, L tokens of a shard, D1 its documents + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

import numba
import numpy as np
import torch
from torch import Tensor

from scone_core.artifacts.manifests import ArtifactError, TokensManifest, load_manifest
from scone_core.corpus.token_shards import map_documents, map_targets
from scone_core.model.forest import BatchForest, build_batch_forest

NOT_A_TARGET = -100
"""PyTorch's cross entropy leaves such targets out."""


class Matcher(Protocol):
    """What training needs of an FGramIndex."""

    def match(self, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """fgram_ids_BT (-1: miss) and match_len_BT (1: miss); each row is its own sequence."""
        ...


class MicroBatch(NamedTuple):
    """What one forward pass takes."""

    tokens_BT: Tensor
    targets_BT: Tensor
    fgrams: BatchForest | None
    """None for a plain baseline."""
    match_len_BT: np.ndarray
    """Length of the longest f-gram that ends at the position, 1 for a miss."""
    positions_BT: Tensor | None = None
    """Counted from 0 in every document, where attention ends at document borders."""

    def to(self, device: torch.device | str) -> Self:
        """The batch with its tensors on `device`."""
        moved = {
            name: part.to(device)
            for name, part in self._asdict().items()
            if part is not None and name != "match_len_BT"
        }
        return self._replace(**moved)


AttentionSpan = Literal["sequence", "document"]
"""How far a position looks back: over the whole sequence, or to the beginning of its document."""


@dataclass(frozen=True)
class TokenStream:
    """The virtual stream of a tokens/v1 artifact, over its mapped shards."""

    manifest: TokensManifest
    shards: tuple[tuple[np.ndarray, np.ndarray], ...]
    """tokens_L and offsets_D1 of every shard."""
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
        lengths = [len(tokens_L) + len(offsets_D1) - 1 for tokens_L, offsets_D1 in shards]
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
        """bool [num]: which of these tokens are targets; separators are, unless some tokens are
        not.
        """
        if self.targets is None:
            return np.ones(num, np.bool_)
        marks = np.zeros(num, np.int64)
        offsets = (offsets_D1 for _, offsets_D1 in self.shards)
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
def _copy_documents(tokens_L, offsets_D1, start, out):
    """Fill `out` from position `start` of a shard's stream, leaving separators as they are."""
    low, high = 0, len(offsets_D1) - 1
    while high - low > 1:  # the last document whose separator is at or before `start`
        middle = (low + high) // 2
        if offsets_D1[middle] + middle <= start:
            low = middle
        else:
            high = middle
    document = low
    for i in range(len(out)):
        position = start + i
        while position >= offsets_D1[document + 1] + document + 1:
            document += 1
        if position > offsets_D1[document] + document:
            out[i] = tokens_L[position - document - 1]


@dataclass(frozen=True)
class TrainingBatches:
    """The micro-batches of a training run."""

    stream: TokenStream
    matcher: Matcher | None
    sequence_length: int
    global_batch: int
    """Sequences per optimizer step, all ranks together."""
    seed: int
    attention_span: AttentionSpan = "sequence"

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise ArtifactError(
                f"sequence_length={self.sequence_length}: the corpus has only "
                f"{self.stream.length} tokens; use a shorter sequence or more text"
            )

    @property
    def num_windows(self) -> int:
        return (self.stream.length - 1) // self.sequence_length

    def micro_batches(
        self, step: int, *, micro_batch: int, rank: int, num_ranks: int
    ) -> Iterator[MicroBatch]:
        """The part of `rank` in a step (counted from 0), as batches of `micro_batch` sequences."""
        for samples_B in split_step(step, self.global_batch, micro_batch, rank, num_ranks):
            windows_B = shuffle(samples_B, num_windows=self.num_windows, seed=self.seed)
            window_BT1 = self.stream.windows(windows_B, self.sequence_length)
            targets_BT = self.stream.targets_of(windows_B, self.sequence_length)
            batch = make_micro_batch(window_BT1[:, :-1], targets_BT, self.matcher)
            separator_id = self.stream.manifest.separator_id
            yield batch._replace(
                positions_BT=positions(batch.tokens_BT, separator_id, self.attention_span)
            )


def make_micro_batch(
    tokens_BT: np.ndarray, targets_BT: np.ndarray, matcher: Matcher | None
) -> MicroBatch:
    """Match the f-grams of `tokens_BT` and build their forest."""
    fgrams, match_len_BT = None, np.ones(tokens_BT.shape, np.uint8)
    if matcher is not None:
        _, match_len_BT = matcher.match(tokens_BT)
        fgrams = build_batch_forest(tokens_BT, match_len_BT)
    tokens, targets = (torch.from_numpy(np.ascontiguousarray(x)) for x in (tokens_BT, targets_BT))
    return MicroBatch(tokens, targets, fgrams, match_len_BT)


def positions(tokens_BT: Tensor, separator_id: int, span: AttentionSpan) -> Tensor | None:
    """int64 [B, T]: the distance to the separator that begins a position's document, or to the
    beginning of the sequence; None where attention spans the whole sequence.
    """
    if span == "sequence":
        return None
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    start_BT = torch.where(tokens_BT == separator_id, place_T, 0).cummax(1).values
    return place_T - start_BT


def split_step(
    step: int, global_batch: int, micro_batch: int, rank: int, num_ranks: int
) -> np.ndarray:
    """int64 [micro-steps, micro_batch]: the global sample numbers that `rank` takes in `step`.

    Raises:
        ValueError: the global batch does not divide into micro-batches.
    """
    if global_batch % (micro_batch * num_ranks):
        raise ValueError(
            f"global_batch={global_batch} must be a multiple of micro_batch * num_workers = "
            f"{micro_batch} * {num_ranks}"
        )
    samples = step * global_batch + np.arange(global_batch)
    return samples.reshape(-1, num_ranks, micro_batch)[:, rank]


def shuffle(samples_B: np.ndarray, *, num_windows: int, seed: int) -> np.ndarray:
    """int64 [B]: the window of every sample; each epoch is a permutation of its own.

    A Feistel network permutes the smallest 2^2k >= num_windows; values outside walk on until they
    are inside. So no permutation is stored (a terabyte-scale corpus has 10^9 windows) and the
    order does not depend on a library's random generator.
    """
    epoch_B, window_B = np.divmod(samples_B, num_windows)
    keys_B = _mix(_mix(np.full_like(epoch_B, seed).astype(np.uint64)) + epoch_B.astype(np.uint64))
    window_B = _permute(window_B.astype(np.uint64), keys_B, num_windows)
    while (outside_B := window_B >= num_windows).any():
        window_B[outside_B] = _permute(window_B[outside_B], keys_B[outside_B], num_windows)
    return window_B.astype(np.int64)


def _permute(x_B: np.ndarray, keys_B: np.ndarray, size: int) -> np.ndarray:
    """Six Feistel rounds on the halves of 2k-bit numbers."""
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))
    mask = np.uint64((1 << int(half)) - 1)
    left_B, right_B = x_B >> half, x_B & mask
    for turn in range(6):
        mixed_B = _mix(right_B ^ keys_B + np.uint64(turn))
        left_B, right_B = right_B, left_B ^ mixed_B & mask
    return left_B << half | right_B


def _mix(x_B: np.ndarray) -> np.ndarray:
    """splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""
    x_B = x_B + np.uint64(0x9E3779B97F4A7C15)
    x_B = (x_B ^ x_B >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x_B = (x_B ^ x_B >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x_B ^ x_B >> np.uint64(31)
