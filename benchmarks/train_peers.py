"""Other ways to evaluate the f-grams of a micro-batch, and another loop that trains a model.

All ways give the vectors of the micro-batch's hits, in the order of their positions.

Legend: B batch, T time, P positions (B x T), H hits, S sequences of an f-gram model, K max_n,
D width.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from scone_core.model.fgram_model import FGramModel
from scone_core.model.forest import BatchForest, build_batch_forest
from scone_core.model.input_embeddings import FGramEmbedding
from scone_core.model.scone_lm import SconeLM

HitVectors = Callable[[SconeLM, np.ndarray, np.ndarray], Tensor]
"""(model, tokens_BT, match_len_BT) -> [H, D]."""


def forest(model: SconeLM, tokens_BT: np.ndarray, match_len_BT: np.ndarray) -> Tensor:
    """Ours: every distinct prefix once."""
    batch = build_batch_forest(tokens_BT, match_len_BT)
    vector_ND = model.fgram_vectors(batch.forest)
    return vector_ND[batch.forest.node_of_S]


def padded(model: SconeLM, tokens_BT: np.ndarray, match_len_BT: np.ndarray) -> Tensor:
    """The paper's way: the f-gram of every hit, padded to the longest one."""
    tokens_SK, n_S, _ = map(torch.from_numpy, hit_fgrams(tokens_BT, match_len_BT))
    return sequence_vectors(model.fgram_model, model.token_embedding(tokens_SK), n_S - 1)


def unique_bucketed(model: SconeLM, tokens_BT: np.ndarray, match_len_BT: np.ndarray) -> Tensor:
    """Every distinct f-gram once, those of equal length together, so nothing is padded."""
    tokens_SK, n_S, _ = hit_fgrams(tokens_BT, match_len_BT)
    vectors, places_H, num_before = [], np.empty(len(n_S), np.int64), 0
    for n in np.unique(n_S):
        fgrams_Un, place_S = np.unique(tokens_SK[n_S == n, :n], axis=0, return_inverse=True)
        places_H[n_S == n] = num_before + place_S
        num_before += len(fgrams_Un)
        embedding_UnD = model.token_embedding(torch.from_numpy(fgrams_Un))
        last_U = torch.full((len(fgrams_Un),), int(n) - 1)
        vectors.append(sequence_vectors(model.fgram_model, embedding_UnD, last_U))
    return torch.cat(vectors)[torch.from_numpy(places_H)]


class PaddedEmbedding(FGramEmbedding):
    """The input embeddings of a SCONE model, the paper's way."""

    def forward(
        self, tokens_BT: Tensor, fgrams: BatchForest | None, token_embedding: nn.Module
    ) -> Tensor:
        assert fgrams is not None
        tokens_SK, n_S, hits_S = map(
            torch.from_numpy, hit_fgrams(tokens_BT.numpy(), match_lengths(fgrams))
        )
        embedding_MD = token_embedding(torch.cat([tokens_BT.reshape(-1), tokens_SK.reshape(-1)]))
        embedding_PD, embedding_SKD = embedding_MD.split([tokens_BT.numel(), tokens_SK.numel()])
        embedding_SKD = embedding_SKD.view(*tokens_SK.shape, -1)
        vector_SD = sequence_vectors(self.fgram_model, embedding_SKD, n_S - 1)
        return embedding_PD.index_copy(0, hits_S, vector_SD).view(*tokens_BT.shape, -1)


def match_lengths(fgrams: BatchForest) -> np.ndarray:
    """match_len_P, from which the forest was made."""
    match_len_P = np.ones(len(fgrams.is_hit_P), np.int64)
    match_len_P[fgrams.is_hit_P.numpy()] += fgrams.forest.depth_N[fgrams.forest.node_of_S].numpy()
    return match_len_P


def hit_fgrams(
    tokens_BT: np.ndarray, match_len_BT: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens_SK (int64, zero behind the last token), n_S and position of every hit."""
    tokens_P, match_len_P = tokens_BT.reshape(-1), match_len_BT.reshape(-1).astype(np.int64)
    hits_S = np.flatnonzero(match_len_P > 1)
    n_S = match_len_P[hits_S]
    path_SK = hits_S[:, None] - n_S[:, None] + 1 + np.arange(n_S.max())
    tokens_SK = tokens_P[np.minimum(path_SK, hits_S[:, None])].astype(np.int64)
    tokens_SK[np.arange(n_S.max()) >= n_S[:, None]] = 0
    return tokens_SK, n_S, hits_S


def sequence_vectors(
    fgram_model: nn.Module | None, embedding_SKD: Tensor, last_S: Tensor
) -> Tensor:
    """FGramModel.forward on plain sequences. It is causal and filling stands behind an f-gram, so
    no mask is needed, which leaves Hugging Face its fastest attention.
    """
    assert isinstance(fgram_model, FGramModel)
    hidden_SKE = fgram_model.body(
        inputs_embeds=fgram_model.project_in(embedding_SKD), use_cache=False
    ).last_hidden_state
    rows_S = torch.arange(len(last_S))
    gain_D = fgram_model.scale * fgram_model.gain
    vector_SD = fgram_model.project_out(hidden_SKE[rows_S, last_S]) * gain_D
    is_residual = fgram_model.config.output == "residual"
    return embedding_SKD[rows_S, last_S] + vector_SD if is_residual else vector_SD


def fgram_model_of(model: SconeLM) -> FGramModel:
    assert isinstance(model.fgram_model, FGramModel)
    return model.fgram_model


def set_attention(model: SconeLM, name: str) -> SconeLM:
    """The attention of the f-gram model, by its Hugging Face name."""
    fgram_model_of(model).body.set_attn_implementation(name)
    return model


class AfterStep(TrainerCallback):
    """Calls a function after each step of transformers' loop."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._function()


def run_hugging_face_loop(
    model: PreTrainedModel,
    windows_BT1: np.ndarray,
    *,
    micro_batch: int,
    learning_rate: float,
    out: str,
    after_step: Callable[[], None],
) -> float:
    """transformers.Trainer over the windows in their order, with the targets of our loop; AdamW,
    fused by default, and clipping at norm 1. The mean loss.
    """
    rows = [
        {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}
        for row in torch.from_numpy(windows_BT1)
    ]
    options = TrainingArguments(
        out,
        per_device_train_batch_size=micro_batch,
        max_steps=len(rows) // micro_batch,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=rows, callbacks=[AfterStep(after_step)])
    return trainer.train().training_loss
