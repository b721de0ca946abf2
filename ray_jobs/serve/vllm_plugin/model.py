"""vLLM's decoders with f-gram rows as input embeddings.

Shapes: T tokens of one engine step, M of them hits, D width.
"""

import os
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from ray_jobs.serve.lookup import open_lookup
from scone_core.serving.served_folder import SconeSection
from scone_core.table.tiers import Tiers


class SconeMixin:
    """Put before a vLLM model class: opens the f-gram set and the table that config.json names.

    The rows go into the input embeddings outside of the model's forward, because they depend on
    more tokens than the forward sees: `runner.py` calls `insert_rows` before every step.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # pyrefly: ignore
        model = vllm_config.model_config
        section = SconeSection.parse(model.hf_config.scone, folder=model.model)
        section.require_tokenizer(os.path.join(model.tokenizer, "tokenizer.json"))
        self.fgram_index = section.open_index()
        options: Any = vllm_config.additional_config
        tiers = Tiers.model_validate(options.get("tiers", {}))
        self.lookup = open_lookup(section, options.get("placement", "local"), tiers)

    def insert_rows(self, fgram_ids_T: np.ndarray, inputs_TD: torch.Tensor) -> None:
        """Overwrite the input embeddings of hits (id >= 0) with their rows, in one gather."""
        hits_M = np.flatnonzero(fgram_ids_T >= 0)
        if len(hits_M) == 0:
            return
        rows_MD = self.lookup.rows(fgram_ids_T[hits_M])
        rows_MD = rows_MD.to(inputs_TD.device, inputs_TD.dtype)
        inputs_TD.index_copy_(0, torch.from_numpy(hits_M).to(inputs_TD.device), rows_MD)

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
