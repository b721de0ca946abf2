"""tokens/v1 -> micro-batches: the same samples for any number of ranks, at any step, in any order.

The corpus is one virtual stream `separator document separator document ... separator`. Window w of
it holds the tokens [w * T, w * T + T]: T inputs and their T targets. Every epoch visits the
windows in its own order, a permutation that is computed and never stored. Sample g is window
`g % num_windows` in the order of epoch `g // num_windows`.

Legend: B windows of a batch, T sequence length.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scone_core.artifacts.manifests import ArtifactError
from scone_core.corpus.token_stream import TokenStream
from scone_core.model.micro_batch import (
    AttentionSpan,
    Matcher,
    MicroBatch,
    make_micro_batch,
    positions,
)


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

    A Feistel network permutes the numbers below the smallest 2^2k >= num_windows; a value that is
    no window is permuted again until it is one. So no permutation is stored (a terabyte-scale
    corpus has 10^9 windows) and the order does not depend on a library's random generator.
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
