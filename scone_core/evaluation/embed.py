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
from scone_core.table.row_lookup import RowLookup


class Inputs(NamedTuple):
    """The input embeddings of a batch."""

    embeddings_BTD: Tensor
    match_len_BT: np.ndarray
    """1 for a miss."""


Embed = Callable[[np.ndarray], Inputs]
"""Maps tokens_BT to Inputs. A plain model, f-gram vectors from the f-gram model and f-gram vectors
from the table differ in this function alone.
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
    embeddings_BTD = model.token_embedding(torch.from_numpy(np.ascontiguousarray(tokens_BT)))
    match_len_BT = RowLookup(index, table).put_rows_of_sequences(tokens_BT, embeddings_BTD)
    return Inputs(embeddings_BTD, match_len_BT)
