"""token ids and the forest of their f-grams -> loss: main model and input embeddings as one module.

Legend: B batch, T time, P positions (B x T), N forest nodes, D width of the main model.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import safetensors.torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import CheckpointManifest, FGramsManifest, load_manifest
from scone_core.model.decoders import build_fgram_body, load_causal_lm
from scone_core.model.fgram_model import FGramModel, FGramModelConfig
from scone_core.model.forest import BatchForest, Forest
from scone_core.model.head_loss import HeadLoss
from scone_core.model.input_embeddings import (
    FGramEmbedding,
    FGramMean,
    InputEmbedding,
    Method,
    OverEncoding,
    OverEncodingConfig,
    PlainEmbedding,
)

MAIN, FGRAM, OVER_ENCODING = "main_model", "fgram_model", "over_encoding"
WEIGHTS = "model.safetensors"
WARNING = "Without its own input embeddings (table) this is not the model that was trained."
EmbeddingOptions = FGramModelConfig | OverEncodingConfig | Literal["fgram_mean"] | None
"""What decides the method of a new model; None is the plain baseline."""


class SconeOutput(NamedTuple):
    """What one micro-batch yields; sums, so that micro-batches and ranks add up."""

    loss_sum: Tensor
    """Negative log-likelihood of the targets, nats."""
    num_targets: Tensor
    hit_square_sum: Tensor
    """Mean square of the input embedding, summed over the hits; without gradient."""
    miss_square_sum: Tensor


class SconeLM(nn.Module):
    """Main model and the method that makes its input embeddings; they share the token embedding."""

    def __init__(
        self, main_model: PreTrainedModel, input_embedding: InputEmbedding | None = None
    ) -> None:
        """Without `input_embedding` this is the plain baseline."""
        super().__init__()
        self.main_model = main_model
        self.input_embedding = PlainEmbedding() if input_embedding is None else input_embedding
        self.head_loss = HeadLoss.of(main_model)

    @classmethod
    def start(
        cls, main_model: PreTrainedModel, options: EmbeddingOptions, *, separator_id: int
    ) -> Self:
        """A model at the beginning of its training; draws from PyTorch's global generator."""
        if isinstance(options, FGramModelConfig):
            fgram_model = FGramModel.start(options, main_model)
            return cls(main_model, FGramEmbedding(fgram_model, "scone"))
        if isinstance(options, OverEncodingConfig):
            return cls(main_model, OverEncoding.start(options, main_model, separator_id))
        return cls(main_model, FGramEmbedding(FGramMean(), "fgram_mean") if options else None)

    @property
    def token_embedding(self) -> nn.Module:
        """The token embedding T. Call it instead of reading its weight: sharded training then sees
        the use.
        """
        return self.main_model.get_input_embeddings()

    @property
    def fgram_model(self) -> nn.Module | None:
        """What makes the vectors of f-grams; None for methods without f-grams."""
        embedding = self.input_embedding
        return embedding.fgram_model if isinstance(embedding, FGramEmbedding) else None

    def fgram_vectors(self, forest: Forest) -> Tensor:
        """The vector of every node, [N, D]: exactly what the embedding table stores for an f-gram.

        Raises:
            ValueError: a method without f-grams.
        """
        if self.fgram_model is None:
            raise ValueError(
                f"method={self.input_embedding.method!r}: this checkpoint has no f-grams"
            )
        return self.fgram_model(self.token_embedding(forest.tokens_N), forest)

    def input_embeddings(self, tokens_BT: Tensor, fgrams: BatchForest | None) -> Tensor:
        """The input embeddings, [B, T, D], by this model's method."""
        return self.input_embedding(tokens_BT, fgrams, self.token_embedding)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        fgrams: BatchForest | None = None,
        positions_BT: Tensor | None = None,
    ) -> SconeOutput:
        """Score `targets_BT` (-100: not a target) after `tokens_BT`.

        Args:
            positions_BT: int64, counted from 0 in every document; a position then attends to its
                own document alone. Without them it attends to all positions before it.
        """
        input_BTD = self.input_embeddings(tokens_BT, fgrams)
        loss_sum = self._loss_sum(
            targets_BT, inputs_embeds=input_BTD, position_ids=positions_BT, use_cache=False
        )
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

    def save(self, folder: Path, *, fgrams: FGramsManifest | None = None) -> None:
        """Write the Hugging Face folders `main_model/` and, where the method has weights of its
        own, `fgram_model/` or `over_encoding/`.

        Args:
            fgrams: the f-grams that the model was trained with, where its method has any.
        """
        scone = {"method": self.input_embedding.method}
        if fgrams is not None:
            scone |= {"fgrams_fingerprint": fgrams.fingerprint, "max_n": fgrams.max_n}
        if self.input_embedding.method != "plain":
            self.main_model.config.scone = {**scone, "warning": WARNING}
        if isinstance(self.fgram_model, FGramModel):
            config = self.fgram_model.body.config
            config.scone = {**scone, **self.fgram_model.config.model_dump(), "warning": WARNING}
            config.save_pretrained(folder / FGRAM)
            _save_weights(self.fgram_model, folder / FGRAM)
        if isinstance(self.input_embedding, OverEncoding):
            _save_weights(self.input_embedding, folder / OVER_ENCODING)
            options = {
                **self.input_embedding.config.model_dump(),
                "separator_id": self.input_embedding.separator_id,
            }
            (folder / OVER_ENCODING / "config.json").write_text(json.dumps(options, indent=2))
        self.main_model.save_pretrained(folder / MAIN)

    @classmethod
    def load(cls, folder: str, *, fgrams: FGramsManifest | None = None) -> Self:
        """The model of a checkpoint/v1 artifact, ready to evaluate.

        Args:
            fgrams: where given, they must be those of the training, or have grown from them.

        Raises:
            ArtifactError: no such artifact, other f-grams, or weights that do not fit.
        """
        manifest = load_manifest(CheckpointManifest, folder)
        if fgrams is not None:
            manifest.require_fgrams(fgrams, f"{folder}: fgrams")
        local = storage.local_folder(
            folder,
            [shard.name for shard in manifest.shards],
            version="".join(shard.sha256 for shard in manifest.shards),
        )
        main_model = load_causal_lm(local / MAIN)
        return cls(main_model, _load_embedding(manifest.method, local, main_model)).eval()


def _load_embedding(
    method: Method, folder: Path, main_model: PreTrainedModel
) -> InputEmbedding | None:
    if method == "scone":
        return FGramEmbedding(_load_fgram_model(folder / FGRAM, main_model), "scone")
    if method == "fgram_mean":
        return FGramEmbedding(FGramMean(), "fgram_mean")
    if method == "over_encoding":
        options = json.loads((folder / OVER_ENCODING / "config.json").read_text())
        separator_id = options.pop("separator_id")
        embedding = OverEncoding(
            OverEncodingConfig(**options),
            width=main_model.config.hidden_size,
            separator_id=separator_id,
        )
        safetensors.torch.load_model(embedding, folder / OVER_ENCODING / WEIGHTS, strict=True)
        return embedding
    return None


def _load_fgram_model(folder: Path, main_model: PreTrainedModel) -> FGramModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    fields = {name: config.scone[name] for name in FGramModelConfig.model_fields}
    fgram_model = FGramModel(
        FGramModelConfig(**fields), build_fgram_body(config), main=main_model.config
    )
    safetensors.torch.load_model(fgram_model, folder / WEIGHTS, strict=True)
    return fgram_model


def _save_weights(module: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(module.state_dict(), folder / WEIGHTS, {"format": "pt"})
