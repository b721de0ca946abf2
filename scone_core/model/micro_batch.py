"""windows of token ids -> the arguments of one forward pass: match f-grams, build their forest.

Legend: B batch, T time.
"""

from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from scone_core.model.forest import BatchForest, build_batch_forest


class Matcher(Protocol):
    """What training needs of an FGramIndex."""

    def match(self, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """fgram_ids_BT (-1: miss) and match_len_BT (1: miss); each row is its own sequence."""
        ...


class MicroBatch(NamedTuple):
    """The arguments of one forward pass."""

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
