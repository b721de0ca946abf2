"""tokens of a step + f-grams + rows -> input embeddings: every hit's embedding becomes its row.

vLLM's worker, the transformers wrapper, evaluation and `bench-lookup` all run `RowLookup.put_rows`.
What a token matches depends on the last K token ids alone. A scheduler's own table of tokens has
them, whatever chunked prefill, prefix caching or preemption did to the KV cache, so a lookup keeps
no state of any sequence.

Shapes: R requests, L positions of a token table, T tokens of one step, B sequences, M hits,
D width, K max_n.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from scone_core.fgrams import trie
from scone_core.fgrams.index import FGramIndex


class RowSource(Protocol):
    """Where the rows of f-grams come from: an `EmbeddingTable`, or processes that have one."""

    def put_rows(self, ids_M: np.ndarray, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
        """Row `ids_M[m]` (int64) becomes `inputs_TD[places_M[m]]` (int64, distinct); other rows of
        `inputs_TD`, which may be of any floating dtype and on any device, stay.

        Raises:
            ValueError: an id has no row; nothing is written.
            ArtifactError: a row cannot be read.
        """
        ...


class Hits(NamedTuple):
    """The tokens of a step at which an f-gram ends, in order; valid until the next step."""

    fgram_ids_M: np.ndarray
    """int64, the longest f-gram that ends there."""
    places_M: np.ndarray
    """int64, which token of the step."""
    match_len_M: np.ndarray
    """int64, tokens of the f-gram, 2 to K."""


class RowLookup:
    """Matches the tokens of a step and puts the rows of the hits in place. For one thread."""

    def __init__(self, index: FGramIndex, source: RowSource) -> None:
        self.index, self.source = index, source
        self._buckets_N8, self._max_n = index.buckets_N8, index.max_n
        self._hits_3T = np.empty((3, 0), np.int64)

    def put_rows(
        self,
        tokens_RL: np.ndarray,
        num_computed_R: np.ndarray,
        starts_R1: np.ndarray,
        inputs_TD: torch.Tensor,
    ) -> Hits:
        """Overwrite the input embeddings of the hits of one step with their rows.

        Args:
            tokens_RL: integer, all tokens of each request so far. A negative id, or one outside the
                vocabulary, is in no f-gram.
            num_computed_R: integer, tokens of each request before the step.
            starts_R1: integer, request r has the tokens starts[r]..starts[r + 1] - 1 of the step:
                one in decoding, more in prefill. Rows of `tokens_RL` behind the last are not read.
            inputs_TD: at least starts[-1] token embeddings, written in place.

        Returns:
            What was hit.

        Raises:
            ValueError: an f-gram has no row.
            ArtifactError: a row cannot be read.
        """
        assert len(inputs_TD) >= starts_R1[-1], "an input embedding for every token of the step"
        hits = self.match(tokens_RL, num_computed_R, starts_R1)
        if len(hits.places_M):
            self.source.put_rows(hits.fgram_ids_M, hits.places_M, inputs_TD)
        return hits

    def put_rows_of_sequences(self, tokens_BT: np.ndarray, inputs_BTD: torch.Tensor) -> np.ndarray:
        """`put_rows` for whole sequences: one step in which every sequence has all of its tokens.

        Args:
            tokens_BT: integer; padding is -1, which is in no f-gram.
            inputs_BTD: their token embeddings, contiguous, written in place.

        Returns:
            Tokens of the longest f-gram that ends at each position, uint8 [B, T], 1 for a miss.

        Raises:
            ValueError: an f-gram has no row.
            ArtifactError: a row cannot be read.
        """
        num_sequences, length = tokens_BT.shape
        tokens_BT = np.ascontiguousarray(tokens_BT, np.int64)
        starts_B1 = np.arange(num_sequences + 1) * length
        inputs_LD = inputs_BTD.view(-1, inputs_BTD.shape[-1])
        hits = self.put_rows(tokens_BT, np.zeros(num_sequences, np.int64), starts_B1, inputs_LD)
        match_len_L = np.ones(tokens_BT.size, np.uint8)
        match_len_L[hits.places_M] = hits.match_len_M
        return match_len_L.reshape(tokens_BT.shape)

    def match(
        self, tokens_RL: np.ndarray, num_computed_R: np.ndarray, starts_R1: np.ndarray
    ) -> Hits:
        """The hits of one step; arguments as for `put_rows`."""
        found, buckets_N8, max_n = self._hits_3T, self._buckets_N8, self._max_n
        num = trie.match_step(tokens_RL, num_computed_R, starts_R1, buckets_N8, max_n, found)
        if num < 0:
            self._hits_3T = np.empty((3, 2 * int(starts_R1[-1])), np.int64)
            return self.match(tokens_RL, num_computed_R, starts_R1)
        return Hits(found[0, :num], found[1, :num], found[2, :num])
