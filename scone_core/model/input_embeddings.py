"""token ids (and the forest of their f-grams) -> input embeddings: four methods side by side.

| method        | at a hit                    | at a miss | trained         | at inference     |
|---------------|-----------------------------|-----------|-----------------|------------------|
| plain         | T(token)                    | T(token)  | T               | T                |
| scone         | f-gram model of the f-gram  | T(token)  | T, f-gram model | T, one table row |
| fgram_mean    | mean of T over the f-gram   | T(token)  | T               | T, one table row |
| over_encoding | mean of T(token) and hashed rows, anywhere | T, rows         | T, rows          |

Every method is called with T itself, the main model's token embedding, and calls it once: so
sharded training sees every use, and gradients of T come from one place.

Legend: B batch, T time, P positions (B x T), N forest nodes, D width, K max_n.
"""

from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedModel

from scone_core.artifacts.config import Frozen
from scone_core.model.forest import BatchForest, Forest

Method = Literal["plain", "scone", "fgram_mean", "over_encoding"]


class PlainEmbedding(nn.Module):
    """The token embedding alone: the baseline of every comparison."""

    method: Method = "plain"

    def forward(
        self, tokens_BT: Tensor, fgrams: BatchForest | None, token_embedding: nn.Module
    ) -> Tensor:
        """[B, T, D], as in every class of this module."""
        return token_embedding(tokens_BT)


class FGramEmbedding(nn.Module):
    """The f-gram's vector at hits, the token embedding at misses: method scone, and fgram_mean,
    which it must beat.
    """

    def __init__(self, fgram_model: nn.Module, method: Literal["scone", "fgram_mean"]) -> None:
        """`fgram_model(embedding_ND, forest)` gives one vector [N, D] per node."""
        super().__init__()
        self.fgram_model, self.method = fgram_model, method

    def forward(
        self, tokens_BT: Tensor, fgrams: BatchForest | None, token_embedding: nn.Module
    ) -> Tensor:
        if fgrams is None:
            return token_embedding(tokens_BT)
        num_positions = tokens_BT.numel()
        embedding_MD = token_embedding(torch.cat([tokens_BT.reshape(-1), fgrams.forest.tokens_N]))
        vector_ND = self.fgram_model(embedding_MD[num_positions:], fgrams.forest)
        input_PD = fgrams.inputs(torch.cat([embedding_MD[:num_positions], vector_ND]))
        return input_PD.view(*tokens_BT.shape, -1)


class FGramMean(nn.Module):
    """Mean of the token embeddings of an f-gram (NGM, arXiv 2605.16893): rows that cost no
    training, which any trained table must beat.
    """

    def forward(self, embedding_ND: Tensor, forest: Forest) -> Tensor:
        mask_NK1 = forest.ancestor_mask_NK[..., None]
        path_NKD = forest.ancestors(embedding_ND).view(*mask_NK1.shape[:2], -1)
        return (path_NKD * mask_NK1).sum(1) / mask_NK1.sum(1)


class OverEncodingConfig(Frozen):
    """Hashed n-gram rows (Over-Encoding, arXiv 2501.16975)."""

    rows_per_n: PositiveInt = 100_000
    """Rows for every n; n-grams share them by their hash."""
    max_n: int = Field(default=3, ge=2, le=5)
    """Longest n-gram that has rows."""


class OverEncoding(nn.Module):
    """The mean of the token embedding and the rows of the n-grams that end at the token, n = 2 ..
    max_n; every n-gram has a row, which it shares with others.
    """

    method: Method = "over_encoding"

    def __init__(self, config: OverEncodingConfig, *, width: int, separator_id: int) -> None:
        super().__init__()
        self.config, self.separator_id = config, separator_id
        self.rows = nn.ModuleList(
            nn.Embedding(config.rows_per_n, width) for _ in range(2, config.max_n + 1)
        )

    @classmethod
    def start(
        cls, config: OverEncodingConfig, main_model: PreTrainedModel, separator_id: int
    ) -> "OverEncoding":
        """Rows at the scale of the token embedding, drawn from PyTorch's global generator."""
        embedding = cls(config, width=main_model.config.hidden_size, separator_id=separator_id)
        (weight_VD,) = main_model.get_input_embeddings().parameters()
        with torch.no_grad():
            for rows_RD in embedding.rows.parameters():
                rows_RD.normal_().mul_(weight_VD.square().mean().sqrt())
        return embedding

    def forward(
        self, tokens_BT: Tensor, fgrams: BatchForest | None, token_embedding: nn.Module
    ) -> Tensor:
        sum_BTD = token_embedding(tokens_BT)
        for rows, hash_BT in zip(self.rows, self.hashes(tokens_BT), strict=True):
            sum_BTD = sum_BTD + rows(hash_BT % self.config.rows_per_n)
        return sum_BTD / self.config.max_n

    def hashes(self, tokens_BT: Tensor) -> list[Tensor]:
        """A hash >= 0 [B, T] of the n tokens that end at every position, for n = 2 .. max_n.

        A token before the sequence, or before the last separator, is hashed as no token.
        """
        hash_BT, before_BT, hashes = _mix(tokens_BT + 1), tokens_BT, []
        open_BT = tokens_BT != self.separator_id
        for _ in self.rows:
            before_BT = nn.functional.pad(before_BT[:, :-1], (1, 0), value=-1)
            hash_BT = _mix(hash_BT + torch.where(open_BT, before_BT + 1, 0))
            open_BT = open_BT & (before_BT != self.separator_id) & (before_BT >= 0)
            hashes.append(hash_BT & 0x7FFF_FFFF_FFFF_FFFF)
        return hashes


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 that scatters (multiply and fold of MurmurHash3's finalizer)."""
    x = x * -0x61C8_8646_80B5_83EB
    return x ^ (x >> 32)


InputEmbedding = PlainEmbedding | FGramEmbedding | OverEncoding
"""What SconeLM puts before the main model."""
