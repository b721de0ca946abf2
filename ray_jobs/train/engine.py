"""SconeLM + options -> the one DeepSpeed engine of a worker."""

import logging
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch

from ray_jobs.train.config import TrainConfig
from scone_core.model.scone_lm import SconeLM
from scone_core.training.optimizer import parameter_groups

if TYPE_CHECKING:  # its import takes seconds and picks the accelerator: workers only
    from deepspeed import DeepSpeedEngine


def start_engine(
    model: SconeLM, config: TrainConfig, *, load_universal: bool = False
) -> "DeepSpeedEngine":
    """Wrap `model` for the workers of this process group; gradients are averaged over ranks."""
    if config.recompute_activations == "layers":
        for part in (model.main_model, getattr(model.fgram_model, "body", None)):
            if part is not None:
                part.gradient_checkpointing_enable({"use_reentrant": False})
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if config.zero_stage == 3 and model.fgram_model is not None:
        # Its weights come as a whole, whichever parts of it a rank runs.
        deepspeed.utils.set_z3_leaf_module(model.fgram_model, True)
    # Gloo does all, in place of a C++ operator that DeepSpeed would compile first (102 s).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options), betas=(0.9, options.beta2), eps=1e-8, fused=True
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=_engine_config(config, load_universal=load_universal),
        dist_init_required=False,
    )
    return engine


def step_engine(engine: "DeepSpeedEngine") -> float:
    """Close a micro-step; after the last one of a step, the norm of its gradient before clipping
    (0 before). Without ZeRO, DeepSpeed does not keep it.
    """
    norm = None
    if engine.is_gradient_accumulation_boundary() and engine.zero_optimization_stage() == 0:
        gradients = [weight.grad for weight in engine.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
    engine.step()
    norm = engine.get_global_grad_norm() if norm is None else norm
    return 0.0 if norm is None else float(norm)


def gather_weights(model: SconeLM) -> AbstractContextManager[None]:
    """A context in which rank 0 reads whole weights, also under ZeRO-3. Every rank enters it."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def set_learning_rate(engine: "DeepSpeedEngine", factor: float) -> None:
    """Set every group to `factor` times its highest learning rate."""
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]


def _engine_config(config: TrainConfig, *, load_universal: bool) -> dict[str, Any]:
    is_bf16 = chosen_precision(config) == "bf16"
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization": {"stage": config.zero_stage},
        "bf16": {"enabled": is_bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "checkpoint": {"load_universal": load_universal},
        "steps_per_print": 1 << 62,
    }


def chosen_precision(config: TrainConfig) -> Literal["fp32", "bf16"]:
    """What `precision` means on this worker."""
    if config.precision == "auto":
        return "bf16" if config.gpus_per_worker else "fp32"
    return config.precision
