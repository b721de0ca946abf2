"""The optimizer's options, its learning rate at every step, its groups of parameters."""

import math
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import nn

from scone_core.artifacts.config import Frozen
from scone_core.model.scone_lm import SconeLM


class OptimizerConfig(Frozen):
    """AdamW, with linear warm-up and a decay of the learning rates."""

    learning_rate: PositiveFloat = 3e-3
    fgram_learning_rate: PositiveFloat | None = None
    """Of the f-gram model (or of hashed rows); by default as the main model's."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the learning rates fall: cosine and linear from the end of the warm-up on, wsd (warm-up,
    stable, decay) linearly over the last part of the steps.
    """
    wsd_decay: float = Field(default=0.2, gt=0, le=1)
    """Part of the steps in which wsd decays."""
    warmup_steps: NonNegativeInt = 20
    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a part of the highest."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices; embeddings, norms and gains have none."""
    fgram_weight_decay: float | None = Field(default=None, ge=0)
    """Of the f-gram model's matrices; by default as the main model's."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    clip_norm: PositiveFloat = 1.0
    """Largest norm of the gradient of all parameters together."""

    def rate(self, step: int, *, num_steps: int) -> float:
        """The part of the learning rates that applies to `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        num_decaying = max(1, num_steps - self.warmup_steps)
        if self.schedule == "wsd":
            num_decaying = min(num_decaying, max(1, round(self.wsd_decay * num_steps)))
        done = max(0.0, (step - (num_steps - num_decaying)) / num_decaying)
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.final_learning_rate + (1 - self.final_learning_rate) * left


def parameter_groups(model: SconeLM, options: OptimizerConfig) -> list[dict[str, Any]]:
    """Main and f-gram model, each with its own learning rate; matrices decay, other weights not.

    Every group keeps its highest learning rate as `peak_lr`.
    """
    embeddings = {
        weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    fgram_rate = options.fgram_learning_rate or options.learning_rate
    fgram_decay = options.fgram_weight_decay
    fgram_decay = options.weight_decay if fgram_decay is None else fgram_decay
    parts = [
        (model.main_model, options.learning_rate, options.weight_decay),
        (model.input_embedding, fgram_rate, fgram_decay),
    ]
    groups = []
    for part, rate, weight_decay in parts:
        weights = list(part.parameters())
        decayed = [w for w in weights if w.ndim > 1 and w not in embeddings]
        others = [w for w in weights if w.ndim <= 1 or w in embeddings]
        for params, decay in ((decayed, weight_decay), (others, 0.0)):
            if params:
                groups.append(
                    {"params": params, "lr": rate, "peak_lr": rate, "weight_decay": decay}
                )
    return groups
