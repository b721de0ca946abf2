"""losses, hits and match lengths of tokens -> sums per document, which ranks and units add up.

Shapes: A documents, C the four sums of a score.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from scone_core.artifacts.config import Frozen


class Score(Frozen):
    """Sums over scored tokens."""

    loss_sum: float = 0.0
    """Negative log-likelihood, nats."""
    num_tokens: int = 0
    num_hits: int = 0
    match_len_sum: int = 0
    """A miss counts 1."""

    @classmethod
    def of(cls, sums_C: np.ndarray) -> Self:
        """The score whose loss, tokens, hits and match lengths, float64, are `sums_C`."""
        loss, tokens, hits, match_len = sums_C.tolist()
        return cls(
            loss_sum=loss,
            num_tokens=int(tokens),
            num_hits=int(hits),
            match_len_sum=int(match_len),
        )

    def metrics(self, *, num_bytes_text: float) -> dict[str, float]:
        """perplexity (per token), bits_per_byte, hit_rate and mean_match_length (per token)."""
        return {
            "perplexity": math.exp(self.loss_sum / self.num_tokens),
            "bits_per_byte": self.loss_sum / math.log(2) / num_bytes_text,
            "hit_rate": self.num_hits / self.num_tokens,
            "mean_match_length": self.match_len_sum / self.num_tokens,
        }


class DocumentSums(NamedTuple):
    """Sums over the scored tokens of documents. A document that was scored in parts may have
    several rows.
    """

    document_A: np.ndarray
    """int64: its number in the order of the artifact."""
    loss_A: np.ndarray
    """float64: negative log-likelihood, nats."""
    tokens_A: np.ndarray
    """float64, as the next ones: counts below 2^53 are exact."""
    hits_A: np.ndarray
    match_len_A: np.ndarray
    """A miss counts 1."""

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """One row per document, in order; the parts are added in theirs."""
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        document_A, row_of = np.unique(columns[0], return_inverse=True)
        return cls(document_A, *(np.bincount(row_of, column) for column in columns[1:]))

    def select(self, is_chosen_A: np.ndarray) -> Self:
        return type(self)(*(column[is_chosen_A] for column in self))

    def total(self) -> Score:
        return Score.of(np.stack(self[1:]).sum(1))
