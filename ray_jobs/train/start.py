"""What a training starts from, on the driver for its plan and on every rank."""

import torch
from transformers import PreTrainedConfig

from ray_jobs.train.config import TrainConfig
from scone_core.artifacts import storage
from scone_core.corpus.token_stream import TokenStream
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import (
    build_causal_lm,
    hugging_face_config,
    load_causal_lm,
    load_config,
)
from scone_core.model.scone_lm import SconeLM
from scone_core.training.batches import TrainingBatches


def training_batches(config: TrainConfig, stream: TokenStream) -> TrainingBatches:
    """The micro-batches of a run, whose f-grams are matched by the mapped index."""
    return TrainingBatches(
        stream,
        FGramIndex.open(config.fgrams) if config.fgrams else None,
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        seed=config.seed,
        attention_span=config.attention_span,
    )


def main_model_config(config: TrainConfig, stream: TokenStream) -> PreTrainedConfig:
    """The architecture of the main model.

    Raises:
        ValueError: a pretrained model does not know all token ids.
    """
    manifest = stream.manifest
    if config.pretrained is not None:
        main = load_config(storage.local_copy(config.pretrained))
        if main.vocab_size < manifest.vocab_size:
            raise ValueError(
                f"pretrained={config.pretrained!r} knows {main.vocab_size} token ids, train_tokens "
                f"has {manifest.vocab_size}; tokenize the text with the model's own tokenizer"
            )
        return main
    return hugging_face_config(
        config.model, vocab_size=manifest.vocab_size, separator_id=manifest.separator_id
    )


def build_model(config: TrainConfig, stream: TokenStream) -> SconeLM:
    """The model at step 0; the same on every rank."""
    torch.manual_seed(config.seed)
    if config.pretrained is not None:
        main_model = load_causal_lm(storage.local_copy(config.pretrained))
    else:
        main_model = build_causal_lm(main_model_config(config, stream))
    return SconeLM.start(
        main_model, config.embedding_options(), separator_id=stream.manifest.separator_id
    )
