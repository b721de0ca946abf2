"""OptimizerConfig -> what AdamW is told: the learning rate of every step, and groups of weights."""

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
    """Learning rate of the f-gram model, or of hashed rows; by default the main model's."""
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
    """Weight decay of matrices; embeddings, norms and gains have none."""
    fgram_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the f-gram model's matrices; by default the main model's."""
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
    """The weights of the main model and those of the input embeddings, each with their own learning
    rate; matrices decay, other weights do not.

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
    return [
        *_groups(model.main_model, embeddings, options.learning_rate, options.weight_decay),
        *_groups(model.input_embedding, embeddings, fgram_rate, fgram_decay),
    ]


def _groups(
    part: nn.Module, embeddings: set[nn.Parameter], rate: float, decay: float
) -> list[dict[str, Any]]:
    """The matrices of `part`, which decay, and its other weights; no group is empty."""
    weights = list(part.parameters())
    matrices = [w for w in weights if w.ndim > 1 and w not in embeddings]
    others = [w for w in weights if w.ndim <= 1 or w in embeddings]
    return [
        {"params": chosen, "lr": rate, "peak_lr": rate, "weight_decay": weight_decay}
        for chosen, weight_decay in ((matrices, decay), (others, 0.0))
        if chosen
    ]
