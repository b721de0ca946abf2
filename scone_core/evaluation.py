"""tokens/v1 and a way to embed them -> perplexity, bits per byte, hit rate.

Every token of every document is scored exactly once, separators never: windows of T + 1 tokens
overlap by one, so the last token of a window is the first input of the next.

Legend: B windows of a batch, T sequence length, D width, M hits.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scone_core.batches import (
    NOT_A_TARGET,
    AttentionSpan,
    Matcher,
    TokenStream,
    make_micro_batch,
    positions,
)
from scone_core.config import Frozen
from scone_core.fgram_index import FGramIndex
from scone_core.model import SconeLM
from scone_core.table import EmbeddingTable


class Inputs(NamedTuple):
    """The input embeddings of a batch."""

    embeddings_BTD: Tensor
    match_len_BT: np.ndarray
    """1 for a miss."""


Embed = Callable[[np.ndarray], Inputs]
"""tokens_BT -> Inputs: the only thing that differs between a plain model, f-gram vectors computed
on the fly and f-gram vectors from the table.
"""


class Score(Frozen):
    """Sums over scored tokens; scores of parts add up to the score of the whole."""

    loss_sum: float = 0.0
    """Negative log-likelihood, nats."""
    num_tokens: int = 0
    num_hits: int = 0
    match_len_sum: int = 0
    """A miss counts 1."""

    def __add__(self, other: Self) -> Self:
        mine, theirs = self.model_dump(), other.model_dump()
        return type(self)(**{name: mine[name] + theirs[name] for name in mine})

    def metrics(self, *, num_bytes_text: int) -> dict[str, float]:
        """perplexity (per token), bits_per_byte, hit_rate and mean_match_length (per token)."""
        return {
            "perplexity": math.exp(self.loss_sum / self.num_tokens),
            "bits_per_byte": self.loss_sum / math.log(2) / num_bytes_text,
            "hit_rate": self.num_hits / self.num_tokens,
            "mean_match_length": self.match_len_sum / self.num_tokens,
        }


def embed_on_the_fly(tokens_BT: np.ndarray, *, model: SconeLM, matcher: Matcher | None) -> Inputs:
    """Vectors from the f-gram model; without `matcher`, token embeddings alone."""
    device = model.main_model.device
    batch = make_micro_batch(tokens_BT, tokens_BT, matcher).to(device)
    return Inputs(model.input_embeddings(batch.tokens_BT, batch.fgrams), batch.match_len_BT)


def embed_from_table(
    tokens_BT: np.ndarray, *, model: SconeLM, index: FGramIndex, table: EmbeddingTable
) -> Inputs:
    """Vectors from the rows of the embedding table; the f-gram model is not used."""
    fgram_ids_BT, match_len_BT = index.match(tokens_BT)
    embeddings_BTD = model.token_embedding(torch.from_numpy(np.ascontiguousarray(tokens_BT)))
    is_hit_BT = fgram_ids_BT >= 0
    vectors_MD = table.vectors(fgram_ids_BT[is_hit_BT])
    embeddings_BTD[torch.from_numpy(is_hit_BT)] = vectors_MD.to(embeddings_BTD.dtype)
    return Inputs(embeddings_BTD, match_len_BT)


def num_windows(stream: TokenStream, sequence_length: int) -> int:
    """Windows that score every token of `stream`; separators fill up the last one."""
    return math.ceil((stream.length - 1) / sequence_length)


@torch.no_grad()  # not inference_mode: its tensors may not enter training, where this is called
def evaluate(
    main_model: nn.Module,
    embed: Embed,
    stream: TokenStream,
    *,
    windows: Iterable[int],
    sequence_length: int,
    batch_size: int = 8,
    attention_span: AttentionSpan = "sequence",
) -> Score:
    """The score of `main_model` on some windows of `stream`, `batch_size` at a time."""
    score, chosen = Score(), np.fromiter(windows, np.int64)
    for first in range(0, len(chosen), batch_size):
        window_BT1 = stream.windows(chosen[first : first + batch_size], sequence_length)
        score += score_windows(
            main_model, embed, window_BT1, stream.manifest.separator_id, attention_span
        )
    return score


def score_windows(
    main_model: nn.Module,
    embed: Embed,
    window_BT1: np.ndarray,
    separator_id: int,
    attention_span: AttentionSpan = "sequence",
) -> Score:
    """Score every target that is not a separator. A token's match belongs to the position at which
    it is an input.
    """
    tokens_BT, targets_BT = window_BT1[:, :-1], window_BT1[:, 1:].copy()
    is_token_BT = tokens_BT != separator_id
    targets_BT[targets_BT == separator_id] = NOT_A_TARGET
    inputs = embed(tokens_BT)
    device = inputs.embeddings_BTD.device
    logits_BTV = main_model(
        inputs_embeds=inputs.embeddings_BTD,
        position_ids=positions(
            torch.from_numpy(tokens_BT).to(device), separator_id, attention_span
        ),
        use_cache=False,
    ).logits
    loss_P = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        torch.from_numpy(targets_BT).view(-1).to(device),
        reduction="none",
    )
    match_len = inputs.match_len_BT[is_token_BT].astype(np.int64)
    return Score(
        loss_sum=loss_P.double().sum().item(),
        num_tokens=int((targets_BT >= 0).sum()),
        num_hits=int((match_len > 1).sum()),
        match_len_sum=int(match_len.sum()),
    )
