"""token embeddings of forest nodes -> one vector per node: the f-gram model.

Legend: N forest nodes, D width of the main model, E width of the f-gram model.
"""

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from scone_core.artifacts.config import Frozen
from scone_core.model.decoders import build_fgram_body, fgram_body_config, silence_branches
from scone_core.model.forest import Forest


class FGramModelConfig(Frozen):
    """The f-gram model, relative to the main model whose architecture it copies."""

    num_layers: PositiveInt = 2
    width: PositiveInt | None = None
    """By default the width of the main model."""
    output: Literal["residual", "replace"] = "residual"
    """residual: the last token's embedding plus a correction that starts at zero. replace: the
    decoder's output alone (the paper), starting near the last token's embedding.
    """
    token_embedding: Literal["shared", "own"] = "shared"
    """shared: the f-gram model reads the main model's token embedding (the paper). own: a copy of
    it that is trained apart.
    """


class FGramModel(nn.Module):
    """The f-gram model, A_fgram in the paper (section 3)."""

    scale: Tensor
    """RMS of the token embedding at the start of training; `gain` is relative to it."""

    def __init__(
        self, config: FGramModelConfig, body: PreTrainedModel, *, main: PreTrainedConfig
    ) -> None:
        """`main` is the config of the main model; all weights are fresh."""
        super().__init__()
        self.config, self.body = config, body
        width, own_width = main.hidden_size, body.config.hidden_size
        is_same = own_width == width
        needs_output = config.output == "residual" or not is_same
        is_own = config.token_embedding == "own"
        self.own_embedding = nn.Embedding(main.vocab_size, width) if is_own else None
        self.project_in = nn.Identity() if is_same else nn.Linear(width, own_width, bias=False)
        self.project_out = (
            nn.Linear(own_width, width, bias=False) if needs_output else nn.Identity()
        )
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("scale", torch.ones(()))

    @classmethod
    def start(cls, config: FGramModelConfig, main_model: PreTrainedModel) -> "FGramModel":
        """The model at the beginning of a training; its weights are drawn from PyTorch's global
        generator.
        """
        body = fgram_body_config(
            main_model.config, num_layers=config.num_layers, width=config.width
        )
        model = cls(config, build_fgram_body(body), main=main_model.config)
        model.initialize(main_model.get_input_embeddings())
        return model

    def forward(self, embedding_ND: Tensor, forest: Forest) -> Tensor:
        """One vector per node, [N, D].

        Args:
            embedding_ND: the main model's token embedding of every node's last token.
        """
        input_ND = embedding_ND
        if self.own_embedding is not None:
            input_ND = self.own_embedding(forest.tokens_N)
        hidden_1NE = self.body(
            inputs_embeds=self.project_in(input_ND)[None],
            position_ids=forest.depth_N[None],
            use_cache=False,
            forest=forest,
        ).last_hidden_state
        vector_ND = self.project_out(hidden_1NE[0]) * (self.scale * self.gain)
        return embedding_ND + vector_ND if self.config.output == "residual" else vector_ND

    @torch.no_grad()
    def initialize(self, token_embedding: nn.Module) -> None:
        """Start at (residual) or near (replace) the token embedding, at its scale."""
        (weight_VD,) = token_embedding.parameters()
        self.scale.copy_(weight_VD.float().square().mean().sqrt())
        if self.own_embedding is not None:
            self.own_embedding.weight.copy_(weight_VD)
        weights_out = list(self.project_out.parameters())
        if self.config.output == "residual":
            nn.init.zeros_(*weights_out)
            return
        silence_branches(self.body)
        for weight_in, weight_out in zip(self.project_in.parameters(), weights_out, strict=True):
            nn.init.orthogonal_(weight_in)
            weight_out.copy_(weight_in.T * (len(weight_out) / len(weight_in)) ** 0.5)
