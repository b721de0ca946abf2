"""f-grams of a batch -> prefix forest -> one decoder pass over its nodes.

The distinct prefixes of a batch's f-grams are the nodes of a forest. A causal decoder computes one
hidden state for a prefix, whichever f-grams share it, so each node costs one token of forward.
Nodes are numbered depth-first, hence every subtree is a range of nodes.

Legend: B batch, T time, P positions (B x T), S f-grams, K max_n, N forest nodes, D width;
M gathered rows, R source rows.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class OnDevice:
    """A dataclass of tensors that moves to a device as a whole."""

    def to(self, device: torch.device | str) -> Self:
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}  # pyrefly: ignore
        return replace(self, **moved)  # pyrefly: ignore


@dataclass(frozen=True)
class RowGather(OnDevice):
    """`x_RD -> x_RD[index_M]`, with a backward pass that adds rows in one fixed order.

    The backward pass of plain indexing adds to shared rows in the order in which threads happen to
    run. Here one thread sums the gradients of all readers of a source row, so results are bit-equal
    at any thread count.
    """

    index_M: Tensor
    """int64 [M]: source row of every gathered row."""
    readers_M: Tensor
    """int64: the gathered rows that carry a gradient, grouped by source row in ascending order."""
    offsets_R1: Tensor
    """int64 [R + 1]: the readers of row r are `readers_M[offsets[r]:offsets[r + 1]]`."""

    def __call__(self, x_RD: Tensor) -> Tensor:
        return _GatherRows.apply(x_RD, self.index_M, self.readers_M, self.offsets_R1)

    @classmethod
    def of(cls, index_M: np.ndarray, *, num_rows: int, used_M: np.ndarray | None = None) -> Self:
        """Plan a gather from `num_rows` rows; entries outside `used_M` (bool) carry no gradient."""
        used_M = np.ones(len(index_M), np.bool_) if used_M is None else used_M
        readers_M, offsets_R1 = _group_readers(index_M, used_M, num_rows)
        return cls(*map(torch.from_numpy, (index_M, readers_M, offsets_R1)))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, index_M: Tensor, readers_M: Tensor, offsets_R1: Tensor
    ) -> Tensor:
        ctx.save_for_backward(readers_M, offsets_R1)
        return x_RD.index_select(0, index_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad_MD = grads[0].contiguous()
        readers_M, offsets_R1 = ctx.saved_tensors
        grad_RD = F.embedding_bag(
            readers_M, grad_MD, offsets_R1, mode="sum", include_last_offset=True
        )
        return grad_RD, None, None, None


@dataclass(frozen=True)
class Forest(OnDevice):
    """The distinct prefixes of some f-grams, in depth-first (lexicographic) order."""

    tokens_N: Tensor
    """int64: the last token of each node's prefix."""
    depth_N: Tensor
    """int64: tokens before it in the prefix, 0..K-1."""
    ancestors: RowGather
    """Gathers, for each node, the rows of its path (root first, itself last, then itself again as
    filling): N rows -> N * K rows.
    """
    ancestor_mask_NK: Tensor
    """bool: True where an ancestor is real."""
    node_of_S: Tensor
    """int64: the node of each f-gram, in the order in which the f-grams were given."""

    @property
    def num_nodes(self) -> int:
        return len(self.tokens_N)


@dataclass(frozen=True)
class BatchForest(OnDevice):
    """The forest of a micro-batch and the way back to its positions."""

    forest: Forest
    inputs: RowGather
    """Rows [T of all positions; vectors of all nodes] -> the input embedding of every position."""
    is_hit_P: Tensor
    """bool: the position reads a node."""


def build_forest(fgram_tokens_SK: np.ndarray, n_S: np.ndarray) -> Forest:
    """The prefix forest of `S >= 1` f-grams; duplicates are allowed.

    Args:
        fgram_tokens_SK: unsigned or non-negative integers, row s holds `n_S[s]` tokens and filling.
        n_S: lengths, 1..K.
    """
    n_S = n_S.astype(np.int64)
    max_n = int(n_S.max())
    rows_SK = fgram_tokens_SK[:, :max_n].astype(np.int64) + 1
    rows_SK[np.arange(max_n) >= n_S[:, None]] = 0  # shorter sorts before longer
    order_S = np.lexsort(_pack(rows_SK)[::-1])
    tokens_N, depth_N, ancestors_NK, node_of_S = _grow(rows_SK, n_S, order_S)
    is_real_NK = np.arange(max_n) <= depth_N[:, None]
    return Forest(
        tokens_N=torch.from_numpy(tokens_N),
        depth_N=torch.from_numpy(depth_N),
        ancestors=RowGather.of(
            ancestors_NK.reshape(-1), num_rows=len(tokens_N), used_M=is_real_NK.reshape(-1)
        ),
        ancestor_mask_NK=torch.from_numpy(is_real_NK),
        node_of_S=torch.from_numpy(node_of_S),
    )


def build_batch_forest(tokens_BT: np.ndarray, match_len_BT: np.ndarray) -> BatchForest:
    """The forest of the f-grams that end at the hits of a micro-batch.

    Without any hit it is one dummy node that no position reads: the f-gram model then still runs
    once, and its parameters get zero gradients.

    Args:
        tokens_BT: integers; each row is its own sequence.
        match_len_BT: length of the longest f-gram that ends at the position, 1 for a miss.
    """
    tokens_P, match_len_P = tokens_BT.reshape(-1), match_len_BT.reshape(-1).astype(np.int64)
    hits_S = np.flatnonzero(match_len_P > 1)
    ends_S, n_S = (hits_S, match_len_P[hits_S]) if len(hits_S) else (np.array([0]), np.array([1]))
    path_SK = ends_S[:, None] - n_S[:, None] + 1 + np.arange(n_S.max())
    forest = build_forest(tokens_P[np.minimum(path_SK, ends_S[:, None])], n_S)
    index_P = np.arange(len(tokens_P))
    index_P[hits_S] = len(tokens_P) + forest.node_of_S.numpy()[: len(hits_S)]
    return BatchForest(
        forest=forest,
        inputs=RowGather.of(index_P, num_rows=len(tokens_P) + forest.num_nodes),
        is_hit_P=torch.from_numpy(match_len_P > 1),
    )


def _pack(rows_SK: np.ndarray) -> list[np.ndarray]:
    """The columns of `rows_SK` in as few 64-bit sort keys as hold them, most significant first."""
    bits = int(rows_SK.max()).bit_length()
    keys = []
    for first in range(0, rows_SK.shape[1], 64 // bits):
        key_S = np.zeros(len(rows_SK), np.uint64)
        for column_S in rows_SK[:, first : first + 64 // bits].T:
            key_S = key_S << np.uint64(bits) | column_S.astype(np.uint64)
        keys.append(key_S)
    return keys


@numba.njit(cache=True, nogil=True)
def _grow(
    rows_SK: np.ndarray, n_S: np.ndarray, order_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes of the sorted rows: each row adds what it does not share with the row before it."""
    max_n = rows_SK.shape[1]
    tokens_N = np.empty(n_S.sum(), np.int64)
    depth_N = np.empty(len(tokens_N), np.int64)
    ancestors_NK = np.empty((len(tokens_N), max_n), np.int64)
    node_of_S = np.empty(len(n_S), np.int64)
    path_K = np.empty(max_n, np.int64)
    num_nodes, before = 0, order_S[0]
    for rank, s in enumerate(order_S):
        shared = 0
        while rank and shared < n_S[s] and rows_SK[s, shared] == rows_SK[before, shared]:
            shared += 1
        for depth in range(shared, n_S[s]):
            path_K[depth] = num_nodes
            tokens_N[num_nodes] = rows_SK[s, depth] - 1
            depth_N[num_nodes] = depth
            ancestors_NK[num_nodes, :depth] = path_K[:depth]
            ancestors_NK[num_nodes, depth:] = num_nodes
            num_nodes += 1
        node_of_S[s] = path_K[n_S[s] - 1]
        before = s
    return tokens_N[:num_nodes], depth_N[:num_nodes], ancestors_NK[:num_nodes], node_of_S


@numba.njit(cache=True, nogil=True)
def _group_readers(
    index_M: np.ndarray, used_M: np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counting sort of the used entries by source row."""
    offsets_R1 = np.zeros(num_rows + 1, np.int64)
    for m in range(len(index_M)):
        offsets_R1[index_M[m] + 1] += used_M[m]
    offsets_R1 = np.cumsum(offsets_R1)
    next_R = offsets_R1[:-1].copy()
    readers_M = np.empty(offsets_R1[-1], np.int64)
    for m in range(len(index_M)):
        if used_M[m]:
            readers_M[next_R[index_M[m]]] = m
            next_R[index_M[m]] += 1
    return readers_M, offsets_R1
