"""TrainConfig -> trained weights: what each data-parallel worker does.

Every rank takes its part of each step (scone_core/batches.py), and the loss is the summed token
loss over the targets of the whole step, whatever the numbers of ranks and micro-batches are.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray.train
import torch

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.engine import gather_weights, set_learning_rate, start_engine, step_engine
from ray_jobs.train.export import export
from ray_jobs.train.resume import (
    ResumePoint,
    drop_universal,
    find_resume_point,
    load_resume_state,
    make_universal,
    needs_universal,
    save_resume_state,
)
from ray_jobs.train.start import build_model, training_batches
from ray_jobs.train.tally import Report, Tally, sum_over_ranks
from scone_core.corpus.token_stream import TokenStream
from scone_core.evaluation.embed import embed_on_the_fly
from scone_core.evaluation.sources import read_sources
from scone_core.evaluation.sums import Score
from scone_core.evaluation.text import evaluate_documents, num_windows
from scone_core.machine.allocator import keep_freed_memory
from scone_core.model.micro_batch import MicroBatch
from scone_core.planning.estimate import flop_rates
from scone_core.training.module_timer import ModuleTimer

PER_SOURCE = ("perplexity", "bits_per_byte")
"""Held-out metrics that are reported for every source."""


def train_worker(settings: dict[str, Any]) -> None:
    """The train loop of Ray Train.

    Args:
        settings: "config" (a TrainConfig as JSON) and "fingerprint" (of the training).
    """
    keep_freed_memory()
    context = ray.train.get_context()
    worker = Worker(
        TrainConfig.model_validate(settings["config"]),
        settings["fingerprint"],
        rank=context.get_world_rank(),
        num_ranks=context.get_world_size(),
        send=ray.train.report,
    )
    worker.train()


class Worker:
    """One rank: its engine, its data, and what it has counted since its last report.

    It needs PyTorch's process group, and nothing of Ray.
    """

    def __init__(
        self,
        config: TrainConfig,
        fingerprint: str,
        *,
        rank: int,
        num_ranks: int,
        send: Callable[[Report], None],
    ) -> None:
        """`send` takes every report, on every rank."""
        torch.set_num_threads(config.cpus_per_worker)
        self.config, self.fingerprint, self.send = config, fingerprint, send
        self.rank, self.num_ranks = rank, num_ranks
        self.validation = TokenStream.open(config.validation_tokens)
        self.sources = read_sources(config.validation_tokens)
        self.batches = training_batches(config, TokenStream.open(config.train_tokens))
        self.model = build_model(config, self.batches.stream)
        self.rates = flop_rates(self.model, sequence_length=config.sequence_length)
        self.reports: list[Report] = []
        self.gradient_norm = 0.0
        self.first_step = self._start_engine()
        fgram_model = self.model.fgram_model
        self.fgram_timer = ModuleTimer(fgram_model) if fgram_model is not None else None
        self.steps_since_report, self.tally = 0, Tally(self.rates, self.fgram_timer)

    def _start_engine(self) -> int:
        """Begin, or go on from the newest state; the first step to do."""
        folder = self.config.local_resume_folder()
        point = find_resume_point(
            folder, fingerprint=self.fingerprint, zero_stage=self.config.zero_stage
        )
        is_universal = needs_universal(point, num_workers=self.num_ranks)
        self.engine = start_engine(self.model, self.config, load_universal=is_universal)
        if point is None:
            return 0
        tag = point.universal_tag if is_universal else point.tag
        if is_universal and self.rank == 0:
            make_universal(folder, point)
        torch.distributed.barrier()
        load_resume_state(self.engine, folder, tag)
        torch.distributed.barrier()
        if is_universal and self.rank == 0:
            drop_universal(folder, point)
        self.reports = point.reports
        return point.step

    def train(self) -> None:
        """All steps that are left, then the export by rank 0."""
        for step in range(self.first_step, self.config.steps):
            self.train_step(step)
            self.finish_step(step + 1)
        with gather_weights(self.model):
            if self.rank == 0:
                export(self.model, self.config, self.reports)
        torch.distributed.barrier()

    def train_step(self, step: int) -> None:
        """One optimizer step over the micro-batches of this rank."""
        config = self.config
        torch.manual_seed(hash((config.seed, step, self.rank)))  # dropout, if the model has any
        set_learning_rate(self.engine, config.optimizer.rate(step, num_steps=config.steps))
        batches = list(
            self.batches.micro_batches(
                step, micro_batch=config.micro_batch, rank=self.rank, num_ranks=self.num_ranks
            )
        )
        # DeepSpeed averages over ranks and micro-steps; the product is the plain sum.
        scale = len(batches) * self.num_ranks / max(1, self._num_targets(batches))
        for batch in batches:
            on_device = batch.to(self.engine.device)
            output = self.engine(
                on_device.tokens_BT,
                on_device.targets_BT,
                on_device.fgrams,
                on_device.positions_BT,
            )
            self.engine.backward(output.loss_sum * scale)
            self.gradient_norm = step_engine(self.engine)
            self.tally.add(output, batch)
        self.steps_since_report += 1

    def _num_targets(self, batches: list[MicroBatch]) -> float:
        """Of this step, on all ranks."""
        (total,) = sum_over_ranks([sum(int((b.targets_BT >= 0).sum()) for b in batches)])
        return total

    def finish_step(self, step: int) -> None:
        """After `step` steps: evaluate, report and save where they are due."""
        config = self.config
        is_last = step == config.steps
        evaluates = is_last or step % config.eval_every == 0
        saves = not is_last and step % config.checkpoint_every == 0
        if evaluates or saves or step % config.report_every == 0:
            self._report(step, self._evaluate() if evaluates else {})
        if saves:
            point = ResumePoint(
                step=step,
                samples_seen=step * config.global_batch,
                fingerprint=self.fingerprint,
                num_workers=self.num_ranks,
                zero_stage=config.zero_stage,
                reports=self.reports,
            )
            save_resume_state(
                self.engine,
                config.local_resume_folder(),
                point,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
            )

    def _report(self, step: int, scores: dict[str, float]) -> None:
        num_sequences = self.steps_since_report * self.config.global_batch
        report = {
            "step": step,
            "learning_rate": self.engine.get_lr()[0],
            "gradient_norm": self.gradient_norm,
            **self.tally.metrics(num_sequences * self.config.sequence_length),
            **scores,
        }
        self.reports.append(report)
        self.send(report)
        self.steps_since_report, self.tally = 0, Tally(self.rates, self.fgram_timer)

    def _evaluate(self) -> dict[str, float]:
        """Held-out metrics; every rank scores its part of the windows, all ranks as many (under
        ZeRO-3 they would wait for each other), the last ones beyond the end of the text.
        """
        started = time.monotonic()
        self.model.eval()
        length = self.config.sequence_length
        num_turns = -(-num_windows(self.validation, length) // self.num_ranks)
        sums = evaluate_documents(
            self.model.main_model,
            partial(embed_on_the_fly, model=self.model, matcher=self.batches.matcher),
            self.validation,
            windows=np.arange(self.rank, num_turns * self.num_ranks, self.num_ranks),
            sequence_length=length,
            attention_span=self.config.attention_span,
        )
        self.model.train()
        of_rank_JC = self.sources.add_up(sums)
        sums_JC = np.reshape(sum_over_ranks(of_rank_JC.reshape(-1).tolist()), of_rank_JC.shape)
        self.tally.started += time.monotonic() - started
        return self._held_out_metrics(sums_JC)

    def _held_out_metrics(self, sums_JC: np.ndarray) -> dict[str, float]:
        """Of all sources together, and perplexity and bits per byte of each where there are two."""
        num_bytes_text = self.validation.manifest.num_bytes_text
        total = Score.of(sums_JC.sum(0)).metrics(num_bytes_text=num_bytes_text)
        metrics = {f"validation_{name}": value for name, value in total.items()}
        bytes_J = np.bincount(self.sources.source_A, self.sources.bytes_A, len(sums_JC))
        for source, sums_C, num_bytes in zip(self.sources.names, sums_JC, bytes_J, strict=True):
            score = Score.of(sums_C)
            if len(sums_JC) > 1 and score.num_tokens:
                found = score.metrics(num_bytes_text=float(num_bytes))
                metrics |= {f"validation_{key}/{source}": found[key] for key in PER_SOURCE}
        return metrics
