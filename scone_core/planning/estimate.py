"""a model and a batch shape -> what a training costs, before it starts: parameters, memory, FLOPs.

FLOPs of a training step are 6 per weight and token (forward 2, backward 4; Kaplan et al.,
arXiv 2001.08361) plus 12 x layers x width x context / 2 for causal attention. The rows of an
embedding are looked up and cost none, the prediction head does.
"""

import time
from typing import NamedTuple

import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import nn

from scone_core.artifacts.config import Frozen
from scone_core.model.fgram_model import FGramModel
from scone_core.model.scone_lm import SconeLM

GIB = 2**30


class FlopRates(NamedTuple):
    """Training FLOPs of the two models."""

    main: float
    """FLOPs of the main model per position."""
    fgram: float
    """FLOPs of the f-gram model per forest node."""


def flop_rates(model: SconeLM, *, sequence_length: int, max_n: int = 5) -> FlopRates:
    """What a position and a forest node cost; the model may be on the device `meta`."""
    main = model.main_model.config
    weights = num_weights(model.main_model)
    if not main.tie_word_embeddings:
        weights -= num_weights(model.token_embedding)
    main_flops = 6.0 * weights + 6.0 * main.num_hidden_layers * main.hidden_size * sequence_length
    fgram = model.fgram_model
    if not isinstance(fgram, FGramModel):
        return FlopRates(main_flops, 0.0)
    body, own = fgram.body.config, fgram.own_embedding
    weights = num_weights(fgram) - (num_weights(own) if own is not None else 0)
    attention = 6.0 * body.num_hidden_layers * body.hidden_size * max_n
    return FlopRates(main_flops, 6.0 * weights + attention)


def num_weights(module: nn.Module) -> int:
    """Parameters, tied ones once; a sharded one counts as a whole."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())


class TrainPlan(Frozen):
    """The costs of a training run."""

    main_parameters: NonNegativeInt
    embedding_parameters: NonNegativeInt
    """Parameters of the method's own: the f-gram model, or hashed rows."""
    tokens: NonNegativeInt
    nodes_per_position: NonNegativeFloat
    flops: NonNegativeFloat
    fgram_flops_share: NonNegativeFloat
    state_gib_per_rank: dict[str, float]
    """Weights, gradients and optimizer state of one rank, by ZeRO stage."""
    activation_gib_per_rank: NonNegativeFloat
    """A rough figure; in small models most of it is the logits and their gradient."""
    flops_per_second_per_rank: NonNegativeFloat
    hours: NonNegativeFloat

    def lines(self) -> list[str]:
        """The plan as lines of text, for people."""
        states = ", ".join(f"ZeRO-{z} {gib:.2f}" for z, gib in self.state_gib_per_rank.items())
        return [
            f"parameters        main model {self.main_parameters:,}, "
            f"input embeddings {self.embedding_parameters:,}",
            f"tokens            {self.tokens:,}; {self.nodes_per_position:.2f} forest nodes each",
            f"FLOPs             {self.flops:.3g}, {self.fgram_flops_share:.0%} of them in the "
            "f-gram model",
            f"GiB per rank      {states}; activations about {self.activation_gib_per_rank:.2f}",
            f"hours             {self.hours:.2f} at {self.flops_per_second_per_rank / 1e9:,.0f} "
            "GFLOP/s per rank",
        ]


def plan_training(
    model: SconeLM,
    *,
    sequence_length: int,
    global_batch: int,
    micro_batch: int,
    steps: int,
    num_ranks: int,
    nodes_per_position: float,
    bytes_per_weight: int,
    flops_per_second: float,
) -> TrainPlan:
    """The costs of a run of `model`, whose weights are only counted (device `meta` will do).

    Args:
        bytes_per_weight: 4 in fp32; 2 in bf16, beside which fp32 master weights are kept.
        flops_per_second: what one rank does.
    """
    rates = flop_rates(model, sequence_length=sequence_length)
    tokens = steps * global_batch * sequence_length
    fgram_flops = rates.fgram * nodes_per_position * tokens
    flops = rates.main * tokens + fgram_flops
    return TrainPlan(
        main_parameters=num_weights(model.main_model),
        embedding_parameters=num_weights(model.input_embedding),
        tokens=tokens,
        nodes_per_position=nodes_per_position,
        flops=flops,
        fgram_flops_share=fgram_flops / flops,
        state_gib_per_rank=_state_gib(num_weights(model), bytes_per_weight, num_ranks),
        activation_gib_per_rank=_activation_bytes(
            model, micro_batch * sequence_length, nodes_per_position, bytes_per_weight
        )
        / GIB,
        flops_per_second_per_rank=flops_per_second,
        hours=flops / (flops_per_second * num_ranks) / 3600,
    )


def _state_gib(weights: int, bytes_per_weight: int, num_ranks: int) -> dict[str, float]:
    """GiB of one rank by ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also
    weights.
    """
    optimizer = 8 + (4 if bytes_per_weight == 2 else 0)
    parts = [optimizer, 4, bytes_per_weight]
    return {
        str(stage): weights * (sum(parts[:stage]) / num_ranks + sum(parts[stage:])) / GIB
        for stage in range(4)
    }


def _activation_bytes(
    model: SconeLM, positions: int, nodes_per_position: float, bytes_per_weight: int
) -> float:
    """17 widths per layer and token (Korthikanti et al., arXiv 2205.05198, without the attention
    matrix, which fused kernels do not keep), and three fp32 copies of the logits.
    """
    parts = [(model.main_model.config, 1.0)]
    if isinstance(model.fgram_model, FGramModel):
        parts.append((model.fgram_model.body.config, nodes_per_position))
    layers = sum(c.num_hidden_layers * c.hidden_size * share for c, share in parts)
    logits = 3 * 4 * model.main_model.config.vocab_size
    return positions * (17 * layers * bytes_per_weight + logits)


def measured_flops_per_second(num_threads: int, *, size: int = 1024, rounds: int = 5) -> float:
    """The rate of matrix products of this machine in fp32, the best of some rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x = torch.randn(size, size)
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            torch.mm(x, x)
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / min(seconds)
