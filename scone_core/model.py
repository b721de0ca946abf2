"""token ids and the forest of their f-grams -> loss: the main model and the f-gram model as one.

Legend: B batch, T time, P positions (B x T), N forest nodes, D width of the main model.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import safetensors.torch
import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel

from scone_core import storage
from scone_core.artifacts import CheckpointManifest, FgramsManifest, load_manifest, require_equal
from scone_core.config import Frozen
from scone_core.decoders import (
    build_fgram_body,
    fgram_body_config,
    load_causal_lm,
    silence_branches,
)
from scone_core.forest import BatchForest, Forest
from scone_core.head_loss import HeadLoss

MAIN, FGRAM = "main_model", "fgram_model"
WEIGHTS = "model.safetensors"
WARNING = "Without the embedding table of its f-grams this is not the model that was trained."


class FgramModelConfig(Frozen):
    """The f-gram model, relative to the main model whose architecture it copies."""

    num_layers: PositiveInt = 2
    width: PositiveInt | None = None
    """By default the width of the main model."""
    output: Literal["residual", "replace"] = "residual"
    """residual: the last token's embedding plus a correction that starts at zero. replace: the
    decoder's output alone (the paper), starting near the last token's embedding.
    """


class SconeOutput(NamedTuple):
    """What one micro-batch yields; sums, so that micro-batches and ranks add up."""

    loss_sum: Tensor
    """Negative log-likelihood of the targets, nats."""
    num_targets: Tensor
    hit_square_sum: Tensor
    """Mean square of the input embedding, summed over the hits; without gradient."""
    miss_square_sum: Tensor


class FgramModel(nn.Module):
    """A_fgram (paper, section 3): token embeddings of forest nodes -> one vector per node."""

    scale: Tensor
    """RMS of the token embedding at the start of training; `gain` is relative to it."""

    def __init__(self, config: FgramModelConfig, body: PreTrainedModel, *, width: int) -> None:
        """`width` is that of the main model; all weights are fresh."""
        super().__init__()
        self.config, self.body = config, body
        own_width = body.config.hidden_size
        is_same = own_width == width
        needs_output = config.output == "residual" or not is_same
        self.project_in = nn.Identity() if is_same else nn.Linear(width, own_width, bias=False)
        self.project_out = (
            nn.Linear(own_width, width, bias=False) if needs_output else nn.Identity()
        )
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, embedding_ND: Tensor, forest: Forest) -> Tensor:
        hidden_1NE = self.body(
            inputs_embeds=self.project_in(embedding_ND)[None],
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
        weights_out = list(self.project_out.parameters())
        if self.config.output == "residual":
            nn.init.zeros_(*weights_out)
            return
        silence_branches(self.body)
        for weight_in, weight_out in zip(self.project_in.parameters(), weights_out, strict=True):
            nn.init.orthogonal_(weight_in)
            weight_out.copy_(weight_in.T * (len(weight_out) / len(weight_in)) ** 0.5)


class SconeLM(nn.Module):
    """Main model and, unless this is a plain baseline, f-gram model; they share the token
    embedding.
    """

    def __init__(self, main_model: PreTrainedModel, fgram_model: FgramModel | None = None) -> None:
        super().__init__()
        self.main_model, self.fgram_model = main_model, fgram_model
        self.head_loss = HeadLoss.of(main_model)

    @classmethod
    def start(cls, main_model: PreTrainedModel, fgram: FgramModelConfig | None) -> Self:
        """A model at the beginning of its training; draws from PyTorch's global generator."""
        if fgram is None:
            return cls(main_model)
        config = fgram_body_config(
            main_model.config, num_layers=fgram.num_layers, width=fgram.width
        )
        width = main_model.config.hidden_size
        fgram_model = FgramModel(fgram, build_fgram_body(config), width=width)
        fgram_model.initialize(main_model.get_input_embeddings())
        return cls(main_model, fgram_model)

    @property
    def token_embedding(self) -> nn.Module:
        """T; call it, so that sharded training sees the use."""
        return self.main_model.get_input_embeddings()

    def fgram_vectors(self, forest: Forest) -> Tensor:
        """The vector [N, D] of every node: exactly what the embedding table stores for an f-gram.

        Raises:
            ValueError: this is a plain baseline.
        """
        if self.fgram_model is None:
            raise ValueError("fgram_model: this checkpoint is a plain baseline, it has no f-grams")
        return self.fgram_model(self.token_embedding(forest.tokens_N), forest)

    def input_embeddings(self, tokens_BT: Tensor, fgrams: BatchForest | None) -> Tensor:
        """[B, T, D]: the f-gram's vector at hits, the token embedding at misses.

        T is called once, on the positions and the nodes together.
        """
        if fgrams is None or self.fgram_model is None:
            return self.token_embedding(tokens_BT)
        num_positions = tokens_BT.numel()
        embedding_MD = self.token_embedding(
            torch.cat([tokens_BT.reshape(-1), fgrams.forest.tokens_N])
        )
        vector_ND = self.fgram_model(embedding_MD[num_positions:], fgrams.forest)
        input_PD = fgrams.inputs(torch.cat([embedding_MD[:num_positions], vector_ND]))
        return input_PD.view(*tokens_BT.shape, -1)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, fgrams: BatchForest | None = None
    ) -> SconeOutput:
        """Score `targets_BT` (-100: not a target) after `tokens_BT`."""
        input_BTD = self.input_embeddings(tokens_BT, fgrams)
        loss_sum = self._loss_sum(targets_BT, inputs_embeds=input_BTD, use_cache=False)
        square_P = input_BTD.detach().float().square().mean(-1).view(-1)
        hit_P = square_P.new_zeros(len(square_P)) if fgrams is None else fgrams.is_hit_P
        hit_square_sum = (square_P * hit_P).sum()
        return SconeOutput(
            loss_sum, (targets_BT >= 0).sum(), hit_square_sum, square_P.sum() - hit_square_sum
        )

    def _loss_sum(self, targets_BT: Tensor, **inputs: Any) -> Tensor:
        """The summed token loss of the main model on `inputs`."""
        targets_P = targets_BT.reshape(-1)
        if self.head_loss is None:
            logits_PV = self.main_model(**inputs).logits.flatten(0, 1)
            return F.cross_entropy(logits_PV.float(), targets_P, reduction="sum")
        hidden_BTD = self.main_model.base_model(**inputs).last_hidden_state
        return self.head_loss(hidden_BTD.flatten(0, 1), targets_P)

    def save(self, folder: Path, *, fgrams: FgramsManifest | None = None) -> None:
        """Write the Hugging Face folders `main_model/` and, with f-grams, `fgram_model/`.

        Args:
            fgrams: the f-grams that the model was trained with; None for a plain baseline.
        """
        if fgrams is not None and self.fgram_model is not None:
            scone = {
                "fgrams_fingerprint": fgrams.fingerprint,
                "max_n": fgrams.max_n,
                "fgram_output": self.fgram_model.config.output,
                "warning": WARNING,
            }
            self.main_model.config.scone = scone
            self.fgram_model.body.config.scone = {**scone, **self.fgram_model.config.model_dump()}
            self.fgram_model.body.config.save_pretrained(folder / FGRAM)
            safetensors.torch.save_file(
                self.fgram_model.state_dict(), folder / FGRAM / WEIGHTS, {"format": "pt"}
            )
        self.main_model.save_pretrained(folder / MAIN)

    @classmethod
    def load(cls, folder: str, *, fgrams: FgramsManifest | None = None) -> Self:
        """The model of a checkpoint/v1 artifact, ready to evaluate.

        Args:
            fgrams: where given, they must be those of the training.

        Raises:
            ArtifactError: no such artifact, other f-grams, or weights that do not fit.
        """
        manifest = load_manifest(CheckpointManifest, folder)
        if fgrams is not None:
            require_equal(
                f"{folder}: fgrams_fingerprint",
                fgrams.fingerprint,
                manifest.fgrams_fingerprint,
                "use the f-grams that this checkpoint was trained with",
            )
        local = storage.local_folder(
            folder,
            [shard.name for shard in manifest.shards],
            version="".join(shard.sha256 for shard in manifest.shards),
        )
        main_model = load_causal_lm(local / MAIN)
        if manifest.fgrams_fingerprint is None:
            return cls(main_model).eval()
        return cls(main_model, _load_fgram_model(local / FGRAM, main_model)).eval()


def _load_fgram_model(folder: Path, main_model: PreTrainedModel) -> FgramModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    fields = {name: config.scone[name] for name in FgramModelConfig.model_fields}
    fgram_model = FgramModel(
        FgramModelConfig(**fields), build_fgram_body(config), width=main_model.config.hidden_size
    )
    safetensors.torch.load_model(fgram_model, folder / WEIGHTS, strict=True)
    return fgram_model
