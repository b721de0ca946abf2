"""tokens -> number of n-grams, n = 2 .. 5, at `min_count`: the engine and its peers.

Every peer gets the same tokens; each docstring says what a peer leaves out.
"""

import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import polars as pl

from benchmarks.peers import apriori
from scone_core.counting.one_scan import Piece, count_ngrams
from scone_core.counting.records import Layout

MAX_N, MIN_COUNT, VOCAB_SIZE = 5, 5, 50_257
Peer = Callable[[Piece], int]


def one_scan(piece: Piece) -> int:
    layout = Layout(MAX_N, VOCAB_SIZE)
    return count_ngrams([piece], layout, min_count=MIN_COUNT).num


def a_priori(piece: Piece) -> int:
    """The method of the SCONE paper."""
    layout = Layout(MAX_N, VOCAB_SIZE)
    return apriori.count_ngrams([piece], layout, min_count=MIN_COUNT).num


def polars(piece: Piece) -> int:
    """A lazy streaming pipeline as one would write it: shift, filter at boundaries, group."""
    tokens_L = piece.tokens_L[piece.first : piece.last]
    document_L = np.searchsorted(piece.offsets_D1, np.arange(len(tokens_L)), side="right")
    frame = pl.LazyFrame({"t0": tokens_L, "document": document_L.astype(np.uint32)})
    shifted = [pl.col("t0").shift(-k).alias(f"t{k}") for k in range(1, MAX_N)]
    num = 0
    for n in range(2, MAX_N + 1):
        found = (
            frame.with_columns(shifted[: n - 1])
            .filter(pl.col("document") == pl.col("document").shift(1 - n))
            .group_by([f"t{k}" for k in range(n)])
            .len()
            .filter(pl.col("len") >= MIN_COUNT)
            .collect(engine="streaming")
        )
        num += found.height
    return num


def tokengrams(piece: Piece) -> int:
    """The time of the suffix array alone; counts would still have to be read from it."""
    from tokengrams import MemmapIndex  # the compiled module alone: the package wants datasets

    with tempfile.TemporaryDirectory() as folder:
        piece.tokens_L[piece.first : piece.last].tofile(f"{folder}/tokens.bin")
        MemmapIndex.build(f"{folder}/tokens.bin", f"{folder}/index", vocab=1 << 16)
    return 0


def kenlm(piece: Piece) -> float:
    """CPU seconds of `count_ngrams`, a part of KenLM's `lmplz`; order 5 alone, ids as words."""
    ends_D = piece.offsets_D1[(piece.offsets_D1 > 0) & (piece.offsets_D1 <= piece.last)]
    documents = np.split(piece.tokens_L[: piece.last], ends_D)
    text = "\n".join(" ".join(map(str, document)) for document in map(np.ndarray.tolist, documents))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [os.environ["KENLM_COUNT"], "-o", "5", "-S", "2G", "-T", f"{folder}/"]
            + ["--write_vocab_list", f"{folder}/vocab"],
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def find_peers() -> dict[str, Peer]:
    """The engine and the peers that are installed; prints what the others need."""
    peers: dict[str, Peer] = {"one_scan": one_scan, "a_priori": a_priori, "polars": polars}
    if folder := os.environ.get("TOKENGRAMS"):
        sys.path.append(folder)
    if importlib.util.find_spec("tokengrams"):
        peers["tokengrams"] = tokengrams
    else:
        print("tokengrams: skipped (TOKENGRAMS=<folder of its compiled module>)")
    if Path(os.environ.get("KENLM_COUNT", "")).is_file():
        peers["kenlm"] = kenlm
    else:
        print("KenLM: skipped (KENLM_COUNT=<its binary count_ngrams>)")
    return peers


def mtok_s(peer: Peer, piece: Piece) -> float:
    """Million tokens per CPU second of one run."""
    started = process_time()
    result = peer(piece)
    seconds = result if peer is kenlm else process_time() - started
    return (piece.last - piece.first) / seconds / 1e6
