"""ids -> input embeddings, by the f-gram model or from its table."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scone_core.fgrams.index import FGramIndex
from scone_core.model.micro_batch import Matcher, make_micro_batch
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable


class Inputs(NamedTuple):
    """The input embeddings of a batch."""

    embeddings_BTD: Tensor
    match_len_BT: np.ndarray
    """1 for a miss."""


Embed = Callable[[np.ndarray], Inputs]
"""tokens_BT -> Inputs: the only thing that differs between a plain model, f-gram vectors computed
on the fly and f-gram vectors from the table.
"""


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
