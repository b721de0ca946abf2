"""tokens/v1 and a way to embed them -> perplexity, bits per byte, hit rate, per source.

Every token of every document is scored exactly once, separators never: windows of T + 1 tokens
overlap by one, so the last token of a window is the first input of the next. Sums are kept per
document: documents are what sources consist of and what confidence intervals are taken over.

Legend: B windows of a batch, T sequence length, V vocabulary, D width, P positions; A documents,
M tokens that are scored (as targets) or counted (as inputs).
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scone_core.corpus.token_stream import NOT_A_TARGET, TokenStream
from scone_core.evaluation.embed import Embed
from scone_core.evaluation.scores import ALL_SOURCES, TextScore, ratio_interval
from scone_core.evaluation.sources import DocumentSources
from scone_core.evaluation.sums import DocumentSums
from scone_core.model.micro_batch import AttentionSpan, positions


def num_windows(stream: TokenStream, sequence_length: int) -> int:
    """Windows that score every token of `stream`; separators fill up the last one."""
    return math.ceil((stream.length - 1) / sequence_length)


@torch.no_grad()  # not inference_mode: its tensors may not enter training, where this is called
def evaluate_documents(
    main_model: nn.Module,
    embed: Embed,
    stream: TokenStream,
    *,
    windows: np.ndarray,
    sequence_length: int,
    batch_size: int = 8,
    attention_span: AttentionSpan = "sequence",
) -> DocumentSums:
    """The sums of `main_model` on some windows of `stream`, by document, `batch_size` at a time.

    Args:
        windows: int64, at least one; those beyond the end of the stream hold nothing to score.
    """
    starts_A, parts = document_starts(stream), []
    for first in range(0, len(windows), batch_size):
        chosen_B = windows[first : first + batch_size]
        position_BT1 = chosen_B[:, None] * sequence_length + np.arange(sequence_length + 1)
        document_BT1 = np.searchsorted(starts_A, position_BT1, side="right") - 1
        parts.append(
            score_windows(
                main_model,
                embed,
                stream.windows(chosen_B, sequence_length)[:, :-1],
                stream.targets_of(chosen_B, sequence_length),
                document_BT1,
                stream.manifest.separator_id,
                attention_span,
            )
        )
    return DocumentSums.join(parts)


def document_starts(stream: TokenStream) -> np.ndarray:
    """int64 [A]: where in the stream the separator before each document stands."""
    return np.concatenate(
        [
            start + offsets_A1[:-1] + np.arange(len(offsets_A1) - 1)
            for start, (_, offsets_A1) in zip(stream.starts[:-1], stream.shards, strict=True)
        ]
    )


def score_windows(
    main_model: nn.Module,
    embed: Embed,
    tokens_BT: np.ndarray,
    targets_BT: np.ndarray,
    document_BT1: np.ndarray,
    separator_id: int,
    attention_span: AttentionSpan = "sequence",
) -> DocumentSums:
    """Score every target that is not a separator. A token's match belongs to the position at which
    it is an input.
    """
    is_token_BT = tokens_BT != separator_id
    is_target_BT = (targets_BT != separator_id) & (targets_BT != NOT_A_TARGET)
    targets_BT = np.where(is_target_BT, targets_BT, NOT_A_TARGET)
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
    loss_M = loss_P.cpu().numpy().reshape(is_target_BT.shape)[is_target_BT].astype(np.float64)
    match_len_M = inputs.match_len_BT[is_token_BT].astype(np.float64)
    zeros_M = np.zeros_like(loss_M)
    as_targets = (document_BT1[:, 1:][is_target_BT], loss_M, zeros_M + 1, zeros_M, zeros_M)
    zeros_M = np.zeros_like(match_len_M)
    hits_M = (match_len_M > 1).astype(np.float64)
    as_inputs = (document_BT1[:, :-1][is_token_BT], zeros_M, zeros_M, hits_M, match_len_M)
    return DocumentSums.join([DocumentSums(*as_targets), DocumentSums(*as_inputs)])


def text_scores(sums: DocumentSums, sources: DocumentSources) -> dict[str, TextScore]:
    """The score of every source, and of `ALL_SOURCES` together."""
    source_A, bytes_A = sources.source_A[sums.document_A], sources.bytes_A[sums.document_A]
    scores = {ALL_SOURCES: text_score(sums, bytes_A)}
    for number, name in enumerate(sources.names):
        if (is_chosen_A := source_A == number).any():
            scores[name] = text_score(sums.select(is_chosen_A), bytes_A[is_chosen_A])
    return scores


def text_score(sums: DocumentSums, bytes_A: np.ndarray) -> TextScore:
    """The figures of some documents, every one of which has tokens."""
    total, num_bytes_text = sums.total(), round(bytes_A.sum())
    loss = ratio_interval(sums.loss_A, sums.tokens_A)
    bits = ratio_interval(sums.loss_A / math.log(2), bytes_A)
    return TextScore(
        num_documents=len(sums.document_A),
        num_tokens=total.num_tokens,
        num_bytes_text=num_bytes_text,
        perplexity_interval=loss and (math.exp(loss[0]), math.exp(loss[1])),
        bits_per_byte_interval=bits,
        **total.metrics(num_bytes_text=num_bytes_text),
    )
