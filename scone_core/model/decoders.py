"""a few numbers or a folder -> Hugging Face decoders: the main model and the body of the f-gram
model.
"""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveInt, field_validator
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import ArtifactError
from scone_core.model.forest_attention import ATTENTION, register_forest_attention

MLP_WIDTHS = {"gpt2": "n_inner"}
"""Fields that hold the width of the MLP where it is not called intermediate_size."""


class DecoderConfig(Frozen):
    """The architecture of a main model, by the field names of its Hugging Face config."""

    model_type: str = "llama"
    hidden_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    intermediate_size: PositiveInt | None = None
    """Width of the MLP; by default 8/3 of hidden_size, rounded up to a multiple of 8."""
    tie_word_embeddings: bool = True
    """Token embedding and prediction head share their weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of that config, such as num_key_value_heads or rope_theta. By default heads
    are hidden_size / num_attention_heads wide, and each has its own keys.
    """

    @field_validator("options")
    @classmethod
    def _refuse_own_fields(cls, options: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(options.keys() & cls.model_fields.keys()):
            raise ValueError(f"options: {own} have fields of their own")
        return options


def hugging_face_config(
    decoder: DecoderConfig, *, vocab_size: int, separator_id: int
) -> PreTrainedConfig:
    """The full config; the separator ends a document, so it is the end-of-sequence token.

    Raises:
        ValueError: transformers does not know `decoder.model_type`.
    """
    known = AutoConfig.for_model(decoder.model_type)
    sizes = {
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_attention_heads,
        "head_dim": decoder.hidden_size // decoder.num_attention_heads,
        MLP_WIDTHS.get(decoder.model_type, "intermediate_size"): decoder.intermediate_size
        or -(-decoder.hidden_size // 3) * 8,
    }
    fields = {name: size for name, size in sizes.items() if hasattr(known, name)}
    return AutoConfig.for_model(
        decoder.model_type,
        vocab_size=vocab_size,
        tie_word_embeddings=decoder.tie_word_embeddings,
        bos_token_id=None,
        pad_token_id=None,  # its row would stay zero, without gradient
        eos_token_id=separator_id,
        use_cache=False,
        **fields | decoder.options,
    )


def build_causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    """A main model with fresh weights, drawn from PyTorch's global generator."""
    return AutoModelForCausalLM.from_config(config)


def fgram_body_config(
    config: PreTrainedConfig, *, num_layers: int, width: int | None
) -> PreTrainedConfig:
    """A copy of `config` with its own depth and width, without vocabulary and dropout.

    Heads keep their size, so `width` decides their number; the MLP is scaled by the same factor.

    Raises:
        ValueError: `width` is not a multiple of what the attention heads need.
    """
    body = copy.deepcopy(config)
    body.vocab_size, body.pad_token_id = 1, None
    body.num_hidden_layers = num_layers
    if kinds := getattr(body, "layer_types", None):
        body.layer_types = [kinds[i % len(kinds)] for i in range(num_layers)]
    for name, value in vars(body).items():
        if "drop" in name and isinstance(value, float):
            setattr(body, name, 0.0)
    if width is not None and width != config.hidden_size:
        _set_width(body, width)
    return body


def _set_width(config: PreTrainedConfig, width: int) -> None:
    query_heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    unit = head_width * (query_heads // key_heads)
    if width % unit:
        raise ValueError(
            f"fgram_model.width={width}: the attention heads need a multiple of {unit}"
        )
    mlp = MLP_WIDTHS.get(config.model_type, "intermediate_size")
    if mlp_width := getattr(config, mlp, None):
        setattr(config, mlp, round(mlp_width * width / config.hidden_size))
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = width // unit
    config.num_attention_heads = width // head_width
    config.hidden_size = width


def build_fgram_body(config: PreTrainedConfig) -> PreTrainedModel:
    """A decoder with fresh weights that takes embeddings and attends along forest paths."""
    register_forest_attention()
    body = AutoModel.from_config(config, attn_implementation=ATTENTION)
    body.set_input_embeddings(nn.Identity())
    return body


def silence_branches(body: PreTrainedModel) -> None:
    """Set the end of every residual branch to zero: the decoder starts as its final norm.

    Where a branch ends in a norm (OLMo 2), the norm's weight is set to zero and the projection's is
    not: a norm of a zero vector would multiply gradients by 1 / sqrt(eps).
    """
    names = [name for name, _ in body.named_parameters()]
    ends = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
    if any("post_feedforward_layernorm" in name for name in names):
        ends = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    for name in names:
        if name.endswith((*ends, "wpe.weight")):  # absolute positions (GPT-2) start at zero, too
            nn.init.zeros_(body.get_parameter(name))


def load_causal_lm(folder: Path) -> PreTrainedModel:
    """A pretrained main model in float32, from a Hugging Face folder.

    Raises:
        ArtifactError: a weight is missing, unexpected or of another shape.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    faults = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if faults:
        raise ArtifactError(f"{folder}: weights do not fit the model: {faults}")
    return model


def load_config(folder: Path) -> PreTrainedConfig:
    """The config of a Hugging Face folder."""
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def fingerprint_folder(folder: str) -> str:
    """sha256 (hex) over config and weights of a local Hugging Face folder.

    Raises:
        ArtifactError: no config.json or no safetensors in it.
    """
    files = sorted([*Path(folder).glob("config.json"), *Path(folder).glob("*.safetensors")])
    if len(files) < 2:
        raise ArtifactError(
            f"pretrained={folder!r}: needs config.json and *.safetensors in a local folder"
        )
    content = "".join(f"{file.name}:{storage.sha256_of(str(file))}\n" for file in files)
    return hashlib.sha256(content.encode()).hexdigest()
