"""Precompute: the vectors of a whole f-gram set by forest, against padded evaluation.

`make bench-precompute`. A table for people, one JSON line last. Times are CPU seconds of one
process that computes in float32 on two threads; the f-gram model has 6 layers of width 512. Both
ways take turns on the same blocks of f-grams, spread over the set.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks import train_corpus, train_peers
from benchmarks.bench_train import LAYERS, THREADS, TOLERANCE, WIDTH, awaken, config_for
from benchmarks.count_corpora import SHARED
from benchmarks.rounds import Metrics, interleaved_medians
from benchmarks.train_corpus import TrainingData
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.train.start import build_model
from scone_core.corpus.token_stream import TokenStream
from scone_core.fgrams.fgram_shards import depth_first_order, read_fgrams
from scone_core.machine.allocator import keep_freed_memory
from scone_core.model.forest import build_forest
from scone_core.model.forest_attention import ATTENTION
from scone_core.model.scone_lm import SconeLM
from scone_core.planning.estimate import flop_rates
from scone_core.table.blocks import embed_fgrams

ROUNDS = 7
FGRAMS_PER_FOREST: int = PrecomputeConfig.model_fields["fgrams_per_forest"].default
PADDED_BATCHES = (256, 1024, 4096)
"""F-grams of one padded forward pass; the fastest is the peer."""


class Block(NamedTuple):
    """F-grams that follow each other in depth-first order."""

    tokens_SK: np.ndarray
    n_S: np.ndarray


def main() -> None:
    if not SHARED.exists():
        sys.exit(f"bench-precompute: skipped, there is no {SHARED}")
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    folder = Path(os.environ.get("BENCH_FOLDER", f"{tempfile.gettempdir()}/scone-bench-train"))
    data = train_corpus.prepare(folder)
    model = awaken(
        build_model(config_for(data, fgrams=True), TokenStream.open(data.tokens))
    ).requires_grad_(False)
    metrics = measure(model, blocks_of(data))
    print(pd.Series(metrics).to_string(float_format="{:,.6g}".format))
    print(json.dumps({name: float(f"{value:.4g}") for name, value in metrics.items()}))


def blocks_of(data: TrainingData) -> list[Block]:
    """The whole set, in the forests of the precompute stage."""
    fgrams = read_fgrams(data.fgrams)
    order_S = depth_first_order(fgrams.tokens_MK, fgrams.n_M)
    tokens_SK, n_S = fgrams.tokens_MK[order_S], fgrams.n_M[order_S]
    parts = [
        slice(first, first + FGRAMS_PER_FOREST) for first in range(0, len(n_S), FGRAMS_PER_FOREST)
    ]
    return [Block(tokens_SK[part], n_S[part]) for part in parts]


def measure(model: SconeLM, blocks: list[Block]) -> Metrics:
    num_fgrams = sum(len(block.n_S) for block in blocks)
    num_nodes = sum(build_forest(*block).num_nodes for block in blocks)
    difference = compare(model, blocks[len(blocks) // 2])
    batch, attention = fastest_padded(model, blocks[0])
    places = np.linspace(0, len(blocks) - 2, ROUNDS).astype(int)  # the last block is a short one
    chosen = [blocks[place] for place in places]
    seconds = interleaved_medians(
        {
            "forest": partial(time_forest, model, iter(chosen)),
            "padded": partial(time_padded, model, iter(chosen), batch, attention),
            "gemm": time_gemm,
        },
        ROUNDS,
    )
    forward_flops = flop_rates(model, sequence_length=1).fgram / 3  # a step's are thrice as many
    nodes_timed = sum(build_forest(*block).num_nodes for block in chosen) / ROUNDS
    forest_rate = nodes_timed * forward_flops / 1e9 / seconds["forest"]
    gemm_rate = GEMM_FLOPS / 1e9 / seconds["gemm"]
    return {
        "fgrams": num_fgrams,
        "blocks": len(blocks),
        "forest_vs_padded": seconds["padded"] / seconds["forest"],
        "forward_tokens_per_fgram": num_nodes / num_fgrams,
        "fgrams_per_cpu_s": FGRAMS_PER_FOREST / seconds["forest"],
        "padded_fgrams_per_cpu_s": FGRAMS_PER_FOREST / seconds["padded"],
        "padded_batch": batch,
        "max_difference_of_vectors": difference,
        "gemm_gflops_per_cpu_s": gemm_rate,
        "forest_gflops_per_cpu_s": forest_rate,
        "share_of_gemm": forest_rate / gemm_rate,
    }


def embed_padded(model: SconeLM, block: Block, batch: int) -> Tensor:
    """float32 [S, D], the paper's way: each f-gram alone, padded to the longest of its batch."""
    parts = []
    with torch.inference_mode():
        for first in range(0, len(block.n_S), batch):
            tokens_SK, n_S = (column[first : first + batch].astype(np.int64) for column in block)
            tokens_SK = tokens_SK[:, : n_S.max()]
            tokens_SK[np.arange(tokens_SK.shape[1]) >= n_S[:, None]] = 0
            embedding_SKD = model.token_embedding(torch.from_numpy(tokens_SK))
            parts.append(
                train_peers.sequence_vectors(
                    model.fgram_model, embedding_SKD, torch.from_numpy(n_S - 1)
                )
            )
    return torch.cat(parts)


def compare(model: SconeLM, block: Block) -> float:
    """The largest difference between the vectors of the two ways, which are of RMS 1."""
    block = Block(*(column[:4096] for column in block))
    train_peers.set_attention(model, ATTENTION)
    vectors_SD = embed_fgrams(model, *block, FGRAMS_PER_FOREST)
    train_peers.set_attention(model, "sdpa")
    difference = (vectors_SD - embed_padded(model, block, 1024)).abs().max().item()
    assert difference <= TOLERANCE, f"vectors differ by {difference}"
    return difference


def fastest_padded(model: SconeLM, block: Block) -> tuple[int, str]:
    """Of batch sizes and of the attentions that transformers has for CPUs."""
    part = Block(*(column[: max(PADDED_BATCHES)] for column in block))
    found = {
        (batch, attention): min(
            time_padded(model, iter([part]), batch, attention) for _ in range(2)
        )
        for attention in ("sdpa", "eager")
        for batch in PADDED_BATCHES
    }
    for (batch, attention), seconds in found.items():
        print(f"padded, {attention}, {batch} f-grams a pass: {seconds:.2f} s")
    return min(found, key=lambda key: found[key])


def time_forest(model: SconeLM, blocks: Iterator[Block]) -> float:
    """CPU seconds of the next block, its forest included."""
    block = next(blocks)
    train_peers.set_attention(model, ATTENTION)
    started = process_time()
    embed_fgrams(model, *block, FGRAMS_PER_FOREST)
    return process_time() - started


def time_padded(model: SconeLM, blocks: Iterator[Block], batch: int, attention: str) -> float:
    block = next(blocks)
    train_peers.set_attention(model, attention)
    started = process_time()
    embed_padded(model, block, batch)
    return process_time() - started


GEMM_SHAPE = (FGRAMS_PER_FOREST, WIDTH, 4 * WIDTH)
GEMM_FLOPS = 2 * LAYERS * FGRAMS_PER_FOREST * WIDTH * 4 * WIDTH


def time_gemm() -> float:
    """CPU seconds of as many plain products as the model has layers, of rows of its width."""
    rows, width, columns = GEMM_SHAPE
    left, right = torch.randn(rows, width), torch.randn(width, columns)
    out = torch.empty(rows, columns)
    torch.mm(left, right, out=out)
    started = process_time()
    for _ in range(LAYERS):
        torch.mm(left, right, out=out)
    return process_time() - started


if __name__ == "__main__":
    main()
