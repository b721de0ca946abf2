"""TrainConfig -> trained weights: what each data-parallel worker does.

Every rank takes its part of each step (scone_core/batches.py), and the loss is the summed token
loss over the targets of the whole step, whatever the numbers of ranks and micro-batches are.
"""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import Tensor

from ray_jobs.resume import ResumePoint, find_resume_point, load_resume_state, save_resume_state
from ray_jobs.train_config import TrainConfig
from ray_jobs.train_engine import set_learning_rate, start_engine
from ray_jobs.train_reports import Report
from scone_core import storage
from scone_core.artifacts import FgramsManifest, Shard, load_manifest, write_receipt
from scone_core.batches import MicroBatch, TokenStream, TrainingBatches
from scone_core.decoders import build_causal_lm, hugging_face_config, load_causal_lm
from scone_core.evaluation import Score, embed_on_the_fly, evaluate, num_windows
from scone_core.fgram_index import FGramIndex
from scone_core.model import MAIN, SconeLM, SconeOutput

EXPORT = "export"
"""Receipt of the exported model: its files, for the manifest."""


def train_worker(settings: dict[str, Any]) -> None:
    """The train loop of Ray Train.

    Args:
        settings: "config" (a TrainConfig as JSON) and "fingerprint" (of the training).
    """
    config = TrainConfig.model_validate(settings["config"])
    torch.set_num_threads(config.cpus_per_worker)
    worker = Worker(config, settings["fingerprint"])
    for step in range(worker.first_step, config.steps):
        worker.train_step(step)
        worker.finish_step(step + 1)
    if worker.rank == 0:
        export(worker.model, config)
    torch.distributed.barrier()


class Worker:
    """One rank: its engine, its data, and what it has counted since its last report."""

    def __init__(self, config: TrainConfig, fingerprint: str) -> None:
        context = ray.train.get_context()
        self.config, self.fingerprint = config, fingerprint
        self.rank, self.num_ranks = context.get_world_rank(), context.get_world_size()
        self.index = FGramIndex.open(config.fgrams) if config.fgrams else None
        self.validation = TokenStream.open(config.validation_tokens)
        self.batches = TrainingBatches(
            TokenStream.open(config.train_tokens),
            self.index,
            sequence_length=config.sequence_length,
            global_batch=config.global_batch,
            seed=config.seed,
        )
        self.model = build_model(config, self.batches.stream)
        self.engine = start_engine(self.model, config)
        self.reports: list[Report] = []
        self.first_step = self._resume()
        self.tally = Tally()

    def _resume(self) -> int:
        folder = self.config.local_resume_folder()
        point = find_resume_point(folder, fingerprint=self.fingerprint, num_workers=self.num_ranks)
        if point is None:
            return 0
        load_resume_state(self.engine, folder, point)
        self.reports = point.reports
        return point.step

    def train_step(self, step: int) -> None:
        """One optimizer step over the micro-batches of this rank."""
        config = self.config
        set_learning_rate(self.engine, config.optimizer.schedule(step, num_steps=config.steps))
        # DeepSpeed averages over ranks and micro-steps; the product is the plain sum.
        num_micro_batches = config.global_batch // config.micro_batch
        scale = num_micro_batches / (config.global_batch * config.sequence_length)
        for batch in self.batches.micro_batches(
            step, micro_batch=config.micro_batch, rank=self.rank, num_ranks=self.num_ranks
        ):
            output = self.engine(batch.tokens_BT, batch.targets_BT, batch.fgrams)
            self.engine.backward(output.loss_sum * scale)
            self.engine.step()
            self.tally.add(output, batch)

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
                fingerprint=self.fingerprint,
                num_workers=self.num_ranks,
                reports=self.reports,
            )
            save_resume_state(self.engine, config.local_resume_folder(), point)

    def _report(self, step: int, scores: dict[str, float]) -> None:
        norm = self.engine.get_global_grad_norm()
        assert norm is not None, "a step was done"
        report = {
            "step": step,
            "learning_rate": self.engine.get_lr()[0],
            "gradient_norm": float(norm),
            **self.tally.metrics(),
            **scores,
        }
        self.reports.append(report)
        ray.train.report(report)
        self.tally = Tally()

    def _evaluate(self) -> dict[str, float]:
        """Held-out metrics; every rank scores its part of the windows."""
        started = time.monotonic()
        self.model.eval()
        length = self.config.sequence_length
        score = evaluate(
            self.model.main_model,
            partial(embed_on_the_fly, model=self.model, matcher=self.index),
            self.validation,
            windows=range(self.rank, num_windows(self.validation, length), self.num_ranks),
            sequence_length=length,
        )
        self.model.train()
        names = list(Score.model_fields)
        sums = sum_over_ranks([getattr(score, name) for name in names])
        total = Score.model_validate(dict(zip(names, sums, strict=True)))
        metrics = total.metrics(num_bytes_text=self.validation.manifest.num_bytes_text)
        self.tally.started += time.monotonic() - started
        return {f"validation_{name}": value for name, value in metrics.items()}


class Tally:
    """Sums over the micro-batches since the last report."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.sums: Tensor = torch.zeros(7, dtype=torch.float64)

    def add(self, output: SconeOutput, batch: MicroBatch) -> None:
        num_nodes = 0 if batch.fgrams is None else batch.fgrams.forest.num_nodes
        counts = [(batch.match_len_BT > 1).sum(), batch.match_len_BT.sum(), num_nodes]
        self.sums += torch.tensor([*(x.detach() for x in output), *counts], dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """Means over all ranks. Every rank calls it."""
        loss, targets, hit_square, miss_square, hits, lengths, nodes = sum_over_ranks(self.sums)
        seconds = time.monotonic() - self.started
        return {
            "loss": loss / targets,
            "tokens_per_second": targets / seconds,
            "hit_rate": hits / targets,
            "mean_match_length": lengths / targets,
            "forest_nodes_per_position": nodes / targets,
            "rms_hit_inputs": (hit_square / max(hits, 1)) ** 0.5,
            "rms_miss_inputs": (miss_square / max(targets - hits, 1)) ** 0.5,
        }


def sum_over_ranks(values: Tensor | list[float]) -> list[float]:
    """Element-wise sums; every rank calls it with as many values."""
    total = torch.as_tensor(values, dtype=torch.float64).clone()
    torch.distributed.all_reduce(total)
    return total.tolist()


def build_model(config: TrainConfig, stream: TokenStream) -> SconeLM:
    """The model at step 0; the same on every rank."""
    torch.manual_seed(config.seed)
    if config.pretrained is not None:
        main_model = load_causal_lm(storage.local_copy(config.pretrained))
    else:
        decoder = hugging_face_config(
            config.model,
            vocab_size=stream.manifest.vocab_size,
            separator_id=stream.manifest.separator_id,
        )
        main_model = build_causal_lm(decoder)
    return SconeLM.start(main_model, config.fgram_model if config.fgrams else None)


def export(model: SconeLM, config: TrainConfig) -> None:
    """Publish the model's folders file by file, with the tokenizer in `main_model/`."""
    fgrams = load_manifest(FgramsManifest, config.fgrams) if config.fgrams else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save(folder, fgrams=fgrams)
        tokenizer = storage.join(config.train_tokens, "tokenizer.json")
        (folder / MAIN / "tokenizer.json").write_bytes(storage.read_bytes(tokenizer))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        shards = [_publish_file(config.out, folder, path) for path in files]
    write_receipt(config.out, EXPORT, {"shards": [shard.model_dump() for shard in shards]})


def _publish_file(out: str, folder: Path, path: Path) -> Shard:
    name = str(path.relative_to(folder))
    num_bytes, sha256 = storage.write_atomic(
        storage.join(out, name), lambda target: shutil.copyfile(path, target)
    )
    return Shard(name=name, num_rows=0, num_bytes=num_bytes, sha256=sha256)
