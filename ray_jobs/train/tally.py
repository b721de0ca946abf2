"""What micro-batches yield -> the metrics of a report, over all ranks."""

import resource
import time

import torch
from torch import Tensor

from scone_core.model.micro_batch import MicroBatch
from scone_core.model.scone_lm import SconeOutput
from scone_core.planning.estimate import FlopRates
from scone_core.training.module_timer import ModuleTimer

Report = dict[str, float]
"""Metrics by name, with the number of steps done as "step"."""


class Tally:
    """Sums over the micro-batches since the last report."""

    def __init__(self, rates: FlopRates, fgram_timer: ModuleTimer | None) -> None:
        """`fgram_timer` watches the f-gram model, if there is one."""
        self.started = time.monotonic()
        self.rates, self.fgram_timer = rates, fgram_timer
        self.sums: Tensor = torch.zeros(7, dtype=torch.float64)

    def add(self, output: SconeOutput, batch: MicroBatch) -> None:
        num_nodes = 0 if batch.fgrams is None else batch.fgrams.forest.num_nodes
        counts = [(batch.match_len_BT > 1).sum(), batch.match_len_BT.sum(), num_nodes]
        self.sums += torch.tensor([*(x.detach() for x in output), *counts], dtype=torch.float64)

    def metrics(self, num_positions: int) -> dict[str, float]:
        """Means over all ranks. Every rank calls it.

        Args:
            num_positions: of all ranks together; not each has a target.
        """
        seconds = time.monotonic() - self.started
        fgram_seconds = self.fgram_timer.take() if self.fgram_timer else 0.0
        *sums, fgram_seconds, all_seconds = sum_over_ranks(
            [*self.sums.tolist(), fgram_seconds, seconds]
        )
        loss, targets, hit_square, miss_square, hits, lengths, nodes = sums
        flops = self.rates.main * num_positions + self.rates.fgram * nodes
        return {
            "loss": loss / max(targets, 1),
            "tokens_per_second": num_positions / seconds,
            "gflops_per_second": flops / seconds / 1e9,
            "fgram_flops_share": self.rates.fgram * nodes / flops,
            "fgram_time_share": fgram_seconds / all_seconds,
            "peak_memory_mb": peak_memory_bytes() / 1e6,
            "hit_rate": hits / num_positions,
            "mean_match_length": lengths / num_positions,
            "forest_nodes_per_position": nodes / num_positions,
            "rms_hit_inputs": (hit_square / max(hits, 1)) ** 0.5,
            "rms_miss_inputs": (miss_square / max(num_positions - hits, 1)) ** 0.5,
        }


def peak_memory_bytes() -> float:
    """Of this rank: the GPU's where one is used, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sum_over_ranks(values: Tensor | list[float]) -> list[float]:
    """Element-wise sums; every rank calls it with as many values."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    total = torch.as_tensor(values, dtype=torch.float64).to(device, copy=True)
    torch.distributed.all_reduce(total)
    return total.tolist()
