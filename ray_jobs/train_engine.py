"""SconeLM + options -> the one DeepSpeed engine of a worker."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ray_jobs.train_config import OptimizerConfig, TrainConfig
from scone_core.model import SconeLM

if TYPE_CHECKING:  # its import takes seconds and picks the accelerator: workers only
    from deepspeed import DeepSpeedEngine


def start_engine(model: SconeLM, config: TrainConfig) -> "DeepSpeedEngine":
    """Wrap `model` for the workers of this process group; fp32, gradients averaged over ranks."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Gloo does all, in place of a C++ operator that DeepSpeed would compile first (102 s).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options), betas=(0.9, options.beta2), eps=1e-8, fused=True
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_engine_config(config), dist_init_required=False
    )
    return engine


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
    parts = [(model.main_model, options.learning_rate), (model.fgram_model, fgram_rate)]
    groups = []
    for part, rate in parts:
        weights = list(part.parameters()) if part is not None else []
        decayed = [w for w in weights if w.ndim > 1 and w not in embeddings]
        others = [w for w in weights if w.ndim <= 1 or w in embeddings]
        for params, decay in ((decayed, options.weight_decay), (others, 0.0)):
            if params:
                groups.append(
                    {"params": params, "lr": rate, "peak_lr": rate, "weight_decay": decay}
                )
    return groups


def set_learning_rate(engine: "DeepSpeedEngine", factor: float) -> None:
    """Set every group to `factor` times its highest learning rate."""
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]


def _engine_config(config: TrainConfig) -> dict[str, Any]:
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization": {"stage": config.zero_stage},
        "steps_per_print": 1 << 62,
    }
