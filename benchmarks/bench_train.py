"""Training: the matcher, the forest against other ways to evaluate f-grams, whole steps, peers.

`make bench-train`. A table for people, one JSON line last. Times are CPU seconds of the process,
which trains in float32 on two threads; a micro-batch has 8 x 1024 GPT-2 tokens, main and f-gram
model have 6 layers of width 512. Whole steps are those of a training worker: matching, the forest,
the DeepSpeed engine of a process group of one, clipping, AdamW; what is left out is Ray Train
around them. They take turns with the steps of transformers.Trainer, inside its own loop.

`python -m benchmarks.bench_train matching fgram_model steps` measures the named parts alone.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks import train_corpus, train_peers
from benchmarks.count_corpora import SHARED
from benchmarks.rounds import Metrics, interleaved_medians
from benchmarks.train_corpus import TrainingData
from benchmarks.train_peers import HitVectors, PaddedEmbedding
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.start import build_model
from ray_jobs.train.worker import Worker
from scone_core.corpus.token_stream import TokenStream
from scone_core.fgrams.index import FGramIndex
from scone_core.machine.allocator import keep_freed_memory
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.forest import build_batch_forest
from scone_core.model.forest_attention import ATTENTION
from scone_core.model.micro_batch import MicroBatch
from scone_core.model.scone_lm import SconeLM
from scone_core.training.batches import TrainingBatches
from scone_core.training.optimizer import OptimizerConfig

ROUNDS = 7
THREADS = 2
MICRO_BATCH, SEQUENCE, WIDTH, LAYERS = 8, 1024, 512, 6
LEARNING_RATE = 3e-4
TOLERANCE = 1e-5
"""Largest difference between the vectors of two ways, which are of RMS 1."""
WAYS: dict[str, HitVectors] = {
    "forest": train_peers.forest,
    "padded": train_peers.padded,
    "unique_bucketed": train_peers.unique_bucketed,
}


def main() -> None:
    if not SHARED.exists():
        sys.exit(f"bench-train: skipped, there is no {SHARED}")
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    parts = {"matching": measure_matching, "fgram_model": measure_fgram_model}
    parts |= {"steps": measure_steps}
    folder = Path(os.environ.get("BENCH_FOLDER", f"{tempfile.gettempdir()}/scone-bench-train"))
    data = train_corpus.prepare(folder)
    metrics: Metrics = {}
    for name in sys.argv[1:] or parts:
        metrics |= parts[name](data)
    print(pd.Series(metrics).to_string(float_format="{:,.6g}".format))
    print(json.dumps({name: float(f"{value:.4g}") for name, value in metrics.items()}))


def config_for(data: TrainingData, *, fgrams: bool) -> TrainConfig:
    """The configuration of a training worker, with or without f-grams."""
    return TrainConfig(
        out=str(Path(data.tokens).parent / "run"),
        train_tokens=data.tokens,
        validation_tokens=data.tokens,
        fgrams=data.fgrams if fgrams else None,
        model=DecoderConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8),
        fgram_model=FGramModelConfig(num_layers=LAYERS),
        sequence_length=SEQUENCE,
        global_batch=MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, warmup_steps=0, final_learning_rate=1
        ),
        num_workers=1,
        cpus_per_worker=THREADS,
    )


def open_batches(config: TrainConfig) -> TrainingBatches:
    return TrainingBatches(
        TokenStream.open(config.train_tokens),
        FGramIndex.open(config.fgrams) if config.fgrams else None,
        sequence_length=SEQUENCE,
        global_batch=MICRO_BATCH,
        seed=config.seed,
    )


def micro_batch(batches: TrainingBatches, step: int) -> MicroBatch:
    """The one micro-batch of a step, matched and with its forest."""
    (batch,) = batches.micro_batches(step, micro_batch=MICRO_BATCH, rank=0, num_ranks=1)
    return batch


def measure_matching(data: TrainingData, num_batches: int = 100) -> Metrics:
    """Tokens matched per CPU second, one thread; what a micro-batch's forest costs to build."""
    index, batches = FGramIndex.open(data.fgrams), open_batches(config_for(data, fgrams=True))
    tokens = [micro_batch(batches, step).tokens_BT.numpy() for step in range(num_batches)]
    lengths = [index.match(tokens_BT).match_len_BT for tokens_BT in tokens]

    def match() -> float:
        started = process_time()
        for tokens_BT in tokens:
            index.match(tokens_BT)
        return num_batches * MICRO_BATCH * SEQUENCE / 1e6 / (process_time() - started)

    def build() -> float:
        started = process_time()
        for tokens_BT, match_len_BT in zip(tokens, lengths, strict=True):
            build_batch_forest(tokens_BT, match_len_BT)
        return 1000 * (process_time() - started) / num_batches

    found = interleaved_medians({"match Mtok/s": match, "build forest ms": build}, ROUNDS)
    return {
        "match_mtok_s_per_core": found["match Mtok/s"],
        "forest_build_ms": found["build forest ms"],
    }


def measure_fgram_model(data: TrainingData) -> Metrics:
    """Forward and backward of the f-gram model over a micro-batch, from token ids to the vectors
    of its hits and back to the gradient of the token embedding.
    """
    config = config_for(data, fgrams=True)
    batches = open_batches(config)
    chosen = [micro_batch(batches, step) for step in range(ROUNDS)]
    model = awaken(build_model(config, batches.stream))
    difference = compare_ways(model, chosen[0])
    attention = {name: fastest_attention(model, name, chosen[0]) for name in WAYS}
    runs = {
        name: partial(time_pass, model, way, attention[name], iter(chosen))
        for name, way in WAYS.items()
    }
    seconds = interleaved_medians(runs, ROUNDS)
    lengths = np.concatenate([batch.match_len_BT.reshape(-1) for batch in chosen])
    num_nodes = sum(batch.fgrams.forest.num_nodes for batch in chosen if batch.fgrams)
    return {
        "forest_vs_padded_speedup": seconds["padded"] / seconds["forest"],
        "forest_vs_unique_bucketed": seconds["unique_bucketed"] / seconds["forest"],
        "forest_cpu_s": seconds["forest"],
        "max_difference_of_vectors": difference,
        "nodes_per_position": num_nodes / len(lengths),
        "hit_rate": float((lengths > 1).mean()),
        "mean_match_length": float(lengths.mean()),
    }


@torch.no_grad()
def awaken(model: SconeLM) -> SconeLM:
    """Vectors of RMS 1 that depend on every weight: the residual form starts at zero."""
    fgram_model = train_peers.fgram_model_of(model)
    nn.init.orthogonal_(*fgram_model.project_out.parameters())
    fgram_model.scale.fill_(1)
    return model


@torch.no_grad()
def compare_ways(model: SconeLM, batch: MicroBatch) -> float:
    """The largest difference between the forest's vectors and those of any other way."""
    inputs = batch.tokens_BT.numpy(), batch.match_len_BT
    vectors = {
        name: way(
            train_peers.set_attention(model, ATTENTION if name == "forest" else "sdpa"), *inputs
        )
        for name, way in WAYS.items()
    }
    difference = max(
        (vectors["forest"] - vectors_HD).abs().max().item() for vectors_HD in vectors.values()
    )
    assert difference <= TOLERANCE, f"vectors differ by {difference}"
    return difference


def fastest_attention(model: SconeLM, name: str, batch: MicroBatch) -> str:
    """Of those that transformers has for CPUs, on sequences; the forest has its own."""
    if name == "forest":
        time_pass(model, WAYS[name], ATTENTION, iter([batch]))
        return ATTENTION
    part = batch._replace(tokens_BT=batch.tokens_BT[:2], match_len_BT=batch.match_len_BT[:2])
    found = {
        attention: min(time_pass(model, WAYS[name], attention, iter([part])) for _ in range(2))
        for attention in ("sdpa", "eager")
    }
    print(f"{name}: " + ", ".join(f"{key} {value:.2f} s" for key, value in found.items()))
    return min(found, key=lambda key: found[key])


def time_pass(
    model: SconeLM, way: HitVectors, attention: str, batches: Iterator[MicroBatch]
) -> float:
    """CPU seconds of forward and backward over the next micro-batch."""
    batch = next(batches)
    train_peers.set_attention(model, attention)
    model.zero_grad()
    started = process_time()
    way(model, batch.tokens_BT.numpy(), batch.match_len_BT).square().sum().backward()
    return process_time() - started


class Loop:
    """A training worker, which is all ranks; the losses of its steps, and the f-gram model's share
    of their time.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.worker = Worker(config, "benchmark", rank=0, num_ranks=1, send=lambda report: None)
        self.losses: list[float] = []
        self.fgram_shares: list[float] = []

    def evaluate_padded(self, attention: str) -> "Loop":
        """From now on f-grams are evaluated the paper's way."""
        model = self.worker.model
        fgram_model = train_peers.fgram_model_of(train_peers.set_attention(model, attention))
        model.input_embedding = PaddedEmbedding(fgram_model, "scone")
        return self

    def step(self) -> None:
        """Take the next step."""
        before, started = float(self.worker.tally.sums[0]), perf_counter()
        self.worker.train_step(len(self.losses))
        if self.worker.fgram_timer is not None:
            seconds = perf_counter() - started
            self.fgram_shares.append(self.worker.fgram_timer.take() / seconds)
        loss_sum = float(self.worker.tally.sums[0]) - before
        self.losses.append(loss_sum / (MICRO_BATCH * SEQUENCE))


def measure_steps(data: TrainingData) -> Metrics:
    """Whole steps: each of transformers' loop is followed by one of ours in every form."""
    start_group_of_one()
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    plain, scone = (config_for(data, fgrams=fgrams) for fgrams in (False, True))
    batches = open_batches(scone)
    apart = build_model(scone, batches.stream)
    attention = fastest_attention(apart, "padded", micro_batch(batches, 0))
    loops = {
        "baseline": Loop(plain),
        "scone": Loop(scone),
        "padded": Loop(scone).evaluate_padded(attention),
    }
    del os.environ["LOCAL_RANK"]  # transformers would wrap its model for several processes
    turns = Turns({name: loop.step for name, loop in loops.items()})
    rows = np.concatenate([windows_of(batches, step) for step in range(ROUNDS + 1)])
    mean_loss = train_peers.run_hugging_face_loop(
        build_model(plain, batches.stream).main_model,
        rows,
        micro_batch=MICRO_BATCH,
        learning_rate=LEARNING_RATE,
        out=plain.out,
        after_step=turns.take,
    )
    check_losses(statistics.mean(loops["baseline"].losses), mean_loss)
    seconds = turns.medians()
    return {
        "scone_vs_baseline_step": seconds["scone"] / seconds["baseline"],
        "padded_vs_baseline_step": seconds["padded"] / seconds["baseline"],
        "vs_hf_trainer": seconds["transformers"] / seconds["baseline"],
        "fgram_time_share": statistics.median(loops["scone"].fgram_shares),
        "baseline_tokens_per_cpu_s": MICRO_BATCH * SEQUENCE / seconds["baseline"],
    }


def start_group_of_one() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


def windows_of(batches: TrainingBatches, step: int) -> np.ndarray:
    batch = micro_batch(batches, step)
    return np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1)


def check_losses(ours: float, theirs: float) -> None:
    assert abs(ours - theirs) < 1e-2, f"mean loss of the baseline {ours}, of transformers {theirs}"


class Turns:
    """CPU seconds of transformers' steps and of ours, which are taken after each of them."""

    def __init__(self, steps: dict[str, Callable[[], None]]) -> None:
        self._steps = steps
        self._seconds: dict[str, list[float]] = {name: [] for name in ("transformers", *steps)}
        self._started = process_time()

    def take(self) -> None:
        """One turn for each; the time since the last turn was that of transformers."""
        self._seconds["transformers"].append(process_time() - self._started)
        for name, step in self._steps.items():
            started = process_time()
            step()
            self._seconds[name].append(process_time() - started)
        turn = (f"{name} {values[-1]:.2f} s" for name, values in self._seconds.items())
        print("step: " + ", ".join(turn), flush=True)
        self._started = process_time()

    def medians(self) -> dict[str, float]:
        """Without the first turn, in which everything is new."""
        return {name: statistics.median(values[1:]) for name, values in self._seconds.items()}


if __name__ == "__main__":
    main()
