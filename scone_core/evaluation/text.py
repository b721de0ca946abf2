"""tokens/v1 and a way to embed them -> perplexity, bits per byte, hit rate, per source.

Every token of every document is scored exactly once, separators never: windows of T + 1 tokens
overlap by one, so the last token of a window is the first input of the next. Sums are kept per
document: documents are what sources consist of and what confidence intervals are taken over.

Legend: B windows of a batch, T sequence length, D width, M hits, N documents, L tokens of a shard,
S sources, C the four sums of a score.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import map_shard
from scone_core.corpus.documents import file_number
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.scores import ALL_SOURCES, TextScore, ratio_interval
from scone_core.fgrams.index import FGramIndex
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.training.batches import (
    NOT_A_TARGET,
    AttentionSpan,
    Matcher,
    TokenStream,
    make_micro_batch,
    positions,
)


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
    """Sums over scored tokens."""

    loss_sum: float = 0.0
    """Negative log-likelihood, nats."""
    num_tokens: int = 0
    num_hits: int = 0
    match_len_sum: int = 0
    """A miss counts 1."""

    @classmethod
    def of(cls, sums_C: np.ndarray) -> Self:
        """From losses, tokens, hits and match lengths, float64."""
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


class DocumentSums(NamedTuple):
    """Sums over the scored tokens of documents; a document that was scored in parts may repeat."""

    document_N: np.ndarray
    """int64: its number in the order of the artifact."""
    loss_N: np.ndarray
    """float64: negative log-likelihood, nats."""
    tokens_N: np.ndarray
    """float64, as the next ones: counts below 2^53 are exact."""
    hits_N: np.ndarray
    match_len_N: np.ndarray
    """A miss counts 1."""

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """One row per document, in order; the parts are added in theirs."""
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        document_N, row_of = np.unique(columns[0], return_inverse=True)
        return cls(document_N, *(np.bincount(row_of, column) for column in columns[1:]))

    def select(self, is_chosen_N: np.ndarray) -> Self:
        return type(self)(*(column[is_chosen_N] for column in self))

    def total(self) -> Score:
        return Score.of(np.stack(self[1:]).sum(1))


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
    starts_N, parts = document_starts(stream), []
    for first in range(0, len(windows), batch_size):
        chosen_B = windows[first : first + batch_size]
        position_BT1 = chosen_B[:, None] * sequence_length + np.arange(sequence_length + 1)
        document_BT1 = np.searchsorted(starts_N, position_BT1, side="right") - 1
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
    """int64 [N]: where in the stream the separator before each document stands."""
    return np.concatenate(
        [
            start + offsets_D1[:-1] + np.arange(len(offsets_D1) - 1)
            for start, (_, offsets_D1) in zip(stream.starts[:-1], stream.shards, strict=True)
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


class Sources(NamedTuple):
    """Which source each document of a tokens/v1 artifact is from, and how much text it was."""

    names: tuple[str, ...]
    source_N: np.ndarray
    """int64, an index into `names`."""
    bytes_N: np.ndarray
    """float64, UTF-8 bytes. Exact for byte-level BPE; else in proportion to the tokens' own texts,
    so that the sum is the one in the manifest."""

    def add_up(self, sums: DocumentSums) -> np.ndarray:
        """float64 [S, C]: the sums of the documents of every source."""
        source_N = self.source_N[sums.document_N]
        columns = [np.bincount(source_N, column, len(self.names)) for column in sums[1:]]
        return np.stack(columns, axis=1)


def read_sources(folder: str) -> Sources:
    """The sources of the documents in `folder`: a document id tells its input file, and the
    manifest names the files.
    """
    stream = TokenStream.open(folder)
    manifest = stream.manifest
    local = storage.local_copy(storage.join(folder, "tokenizer.json"))
    bytes_V = Tokenizer(local).bytes_of_tokens()
    file_N, bytes_N = [], []
    for shard, (tokens_L, offsets_D1) in zip(manifest.shards, stream.shards, strict=True):
        doc_id_N = map_shard(folder, shard).column("doc_id").to_numpy()
        file_N.append(file_number(doc_id_N).astype(np.int64))
        ends_L = np.cumsum(np.concatenate([[0], bytes_V[tokens_L]]))
        bytes_N.append(np.diff(ends_L[offsets_D1]).astype(np.float64))
    total_N = np.concatenate(bytes_N)
    files = sorted(name for name in manifest.inputs if name != "tokenizer")
    names, source_of_file = np.unique([source_name(name) for name in files], return_inverse=True)
    return Sources(
        tuple(map(str, names)),
        source_of_file[np.concatenate(file_N)],
        total_N * (manifest.num_bytes_text / max(total_N.sum(), 1)),
    )


def source_name(file: str) -> str:
    """The source that an input file belongs to: the folder below the input that holds it, else the
    file itself without its suffixes and without a shard number like `-00003-of-00008`.
    """
    folder, _, inner = file.partition("/")
    return folder if inner else re.sub(r"([-._]\d+-of-\d+)?\.\w+(\.gz|\.zst)?$", "", file)


def text_scores(sums: DocumentSums, sources: Sources) -> dict[str, TextScore]:
    """The score of every source, and of `ALL_SOURCES` together."""
    source_N, bytes_N = sources.source_N[sums.document_N], sources.bytes_N[sums.document_N]
    scores = {ALL_SOURCES: text_score(sums, bytes_N)}
    for number, name in enumerate(sources.names):
        if (is_chosen_N := source_N == number).any():
            scores[name] = text_score(sums.select(is_chosen_N), bytes_N[is_chosen_N])
    return scores


def text_score(sums: DocumentSums, bytes_N: np.ndarray) -> TextScore:
    """The figures of some documents, every one of which has tokens."""
    total, num_bytes_text = sums.total(), round(bytes_N.sum())
    loss = ratio_interval(sums.loss_N, sums.tokens_N)
    bits = ratio_interval(sums.loss_N / math.log(2), bytes_N)
    return TextScore(
        num_documents=len(sums.document_N),
        num_tokens=total.num_tokens,
        num_bytes_text=num_bytes_text,
        perplexity_interval=loss and (math.exp(loss[0]), math.exp(loss[1])),
        bits_per_byte_interval=bits,
        **total.metrics(num_bytes_text=num_bytes_text),
    )
