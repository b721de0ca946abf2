"""served/v1 -> a transformers model whose `generate` and `forward` take f-gram rows from the table.

Shapes: B sequences, T their tokens, N the last of them that the model is about to see, D width.
"""

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, load_manifest
from scone_core.serving.served_folder import ARCHITECTURE_PREFIX, ServedManifest, read_section
from scone_core.table.row_lookup import RowLookup

AnyBase: Any = object
"""Stands for the Hugging Face model class that the mixin is put before."""


class TableInputs(AnyBase):
    """Put before a causal LM of transformers: input embeddings come from the table at hits."""

    lookup: RowLookup

    def embed(self, tokens_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Input embeddings [B, T, D] of whole sequences; padding is in no f-gram."""
        if attention_mask is not None:
            tokens_BT = tokens_BT.masked_fill(attention_mask == 0, -1)
        inputs_BTD = self.get_input_embeddings()(tokens_BT.clamp(min=0))
        self.lookup.put_rows_of_sequences(tokens_BT.cpu().numpy(), inputs_BTD)
        return inputs_BTD

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What `generate` gives to `forward`: it knows the whole sequence, the cache does not."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, **kwargs
        )
        if inputs.get("input_ids") is None:
            return inputs
        num_new, cache = inputs["input_ids"].shape[1], inputs.get("past_key_values")
        num_cached = 0 if cache is None else cache.get_seq_length()
        if num_cached + num_new != input_ids.shape[1]:
            raise ValueError(
                f"input_ids: {input_ids.shape[1]} tokens after {num_cached} cached ones; f-grams "
                "reach back into those, so give the whole sequence"
            )
        needed = num_new + self.lookup.index.max_n - 1
        mask = None if attention_mask is None else attention_mask[:, -needed:]
        inputs["inputs_embeds"] = self.embed(input_ids[:, -needed:], mask)[:, -num_new:]
        inputs["input_ids"] = None
        return inputs


def embed_whole_sequences(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward hook: `input_ids` [B, T] of whole sequences become `inputs_embeds`.

    Raises:
        ValueError: `input_ids` continue a cache: what stands before them is unknown here.
    """
    if args:
        kwargs, args = {"input_ids": args[0], **kwargs}, (None, *args[1:])
    tokens_BT, cache = kwargs.pop("input_ids", None), kwargs.get("past_key_values")
    if tokens_BT is None or kwargs.get("inputs_embeds") is not None:
        return args, kwargs
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values: f-grams reach back into the cached tokens; use generate, or pass "
            "inputs_embeds=model.embed(whole sequence)[:, -num_new:]"
        )
    inputs_BTD = model.embed(tokens_BT, kwargs.get("attention_mask"))
    return args, {**kwargs, "inputs_embeds": inputs_BTD}


def load_served_model(folder: str, **options: Any) -> PreTrainedModel:
    """The model of a served/v1 artifact for use with transformers.

    Args:
        folder: folder or URI.
        options: for `from_pretrained`, e.g. `dtype`.

    Returns:
        A model in evaluation mode; a plain baseline is an ordinary transformers model.

    Raises:
        ArtifactError: the artifact, its f-grams, table or tokenizer are missing or not its own.
    """
    manifest = load_manifest(ServedManifest, folder)
    section = read_section(folder)
    version = manifest.fingerprint
    names = [shard.name for shard in manifest.shards]
    local = storage.local_folder(folder, names, version=version)
    if section is None:
        return transformers.AutoModelForCausalLM.from_pretrained(local, **options).eval()
    model = _scone_class(local).from_pretrained(local, **options).eval()
    model.lookup = RowLookup(section.open_index(), section.open_table())
    model.register_forward_pre_hook(embed_whole_sequences, with_kwargs=True)
    return model


def _scone_class(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    (name,) = config.architectures or ("",)
    base = getattr(transformers, name.removeprefix(ARCHITECTURE_PREFIX), None)
    if base is None:
        raise ArtifactError(f"{folder}/config.json: transformers has no architecture for {name!r}")
    return type(name, (TableInputs, base), {})
