"""vLLM's decoders with f-gram rows as input embeddings."""

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from ray_jobs.serve.lookup import open_row_source
from scone_core.serving.served_folder import SconeSection
from scone_core.table.row_lookup import RowLookup
from scone_core.table.tiers import Tiers


class SconeMixin:
    """Put before a vLLM model class: opens the f-gram set and the table that config.json names.

    The rows go into the input embeddings outside of the model's forward, because they depend on
    more tokens than the forward sees: `runner.py` calls `lookup.put_rows` before every step.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # pyrefly: ignore
        model = vllm_config.model_config
        section = SconeSection.parse(model.hf_config.scone, folder=model.model)
        section.require_tokenizer(os.path.join(model.tokenizer, "tokenizer.json"))
        index = section.open_index()
        options: Any = vllm_config.additional_config
        tiers = Tiers.model_validate(options.get("tiers", {}))
        source = open_row_source(section, options.get("placement", "local"), tiers)
        self.lookup = RowLookup(index, source)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if inputs_embeds is None and intermediate_tensors is None:
            raise ValueError(
                "a SCONE model needs its own worker, else f-grams are ignored without a word: "
                "start vLLM with --worker-cls ray_jobs.serve.vllm_plugin.runner.SconeCPUWorker "
                "(SconeGPUWorker on a GPU)"
            )
        return super().forward(  # pyrefly: ignore
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )


class SconeLlamaForCausalLM(SconeMixin, LlamaForCausalLM):
    pass
