"""checkpoint/v1 + fgrams/v1 -> embeddings/v1: run the f-gram model once over the forest of V_fgram.

F-grams sorted by their tokens are the prefix forest in depth-first order. A block is a range of
that order: a forest whose only foreign nodes are the ancestors of its first f-gram. Blocks spill
their rows by f-gram id, shards collect ranges of ids, both as units with receipts.

Shapes: S f-grams of one block or shard, K max_n, D width.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import matplotlib.figure
import mlflow
import numpy as np
import pyarrow as pa
import ray
import torch
from pydantic import Field

from ray_jobs.runtime import JobConfig, Progress, connect, run_units
from ray_jobs.tracking import log_manifest, stage_run
from scone_core import artifacts, storage
from scone_core.artifacts import (
    ArtifactError,
    CheckpointManifest,
    EmbeddingsManifest,
    FgramsManifest,
    RowFormat,
    Shard,
)
from scone_core.config import InputPath, Resource, Role
from scone_core.fgrams import depth_first_order, read_fgrams
from scone_core.forest import build_forest
from scone_core.model import SconeLM
from scone_core.row_formats import STORAGE, embedding_batch, table_rows, to_storage, width_of
from scone_core.table import EmbeddingTable

BLOCKS = "_blocks"
"""Folder of the sorted f-grams and the spilled blocks; removed when every shard is published."""

SAME_BITS_FOR_ANY_THREADS = {"MKL_CBWR": "AUTO,STRICT"}
"""Without it, MKL splits long dot products by thread count: a [333, 8192] x [8192, 64] product
differed between 1 and 2 threads.
"""


class PrecomputeConfig(JobConfig):
    """Options of the precompute stage."""

    checkpoint: InputPath
    """Folder or URI of a checkpoint/v1 artifact that was trained with f-grams."""
    fgrams: InputPath
    """Folder or URI of the fgrams/v1 artifact it was trained with, or of a later generation."""
    grow: Annotated[str | None, Role("input")] = None
    """Folder or URI of this checkpoint's table for an earlier generation of the f-grams: its shards
    are taken over as they are, and only the rows of newer f-grams are computed."""
    rows: RowFormat = "bf16"
    """Format of the stored rows; int8 and fp8 take half the bytes of bf16, with one scale per row.
    """
    rows_per_shard: int = Field(default=1 << 18, ge=1)
    """Rows of one published shard, which a task assembles in memory."""
    fgrams_per_block: int = Field(default=1 << 16, ge=1)
    """F-grams of one resumable unit."""
    fgrams_per_forest: int = Field(default=1 << 14, ge=1)
    """F-grams of one forward pass; decides its memory and, by its shapes, the last bits of rows."""
    num_actors: Resource[int | None] = Field(default=None, ge=1)
    """Copies of the model; by default as many as the cluster's CPUs (or GPUs) hold."""
    cpus_per_actor: Resource[int] = Field(default=1, ge=1)
    gpus_per_actor: Resource[float] = Field(default=0, ge=0)


def run(config: PrecomputeConfig) -> EmbeddingsManifest:
    """Precompute the embedding of every f-gram."""
    checkpoint, fgrams, earlier = _load_inputs(config)
    inputs = {"checkpoint": checkpoint.fingerprint, "fgrams": fgrams.fingerprint}
    if earlier is not None:
        inputs["grow"] = earlier.fingerprint
    if done := artifacts.claim(EmbeddingsManifest, config.out, config, inputs):
        print(f"precompute: {config.out} is up to date")
        return done
    common = artifacts.plan_fields(EmbeddingsManifest, config, inputs)
    connect(config.cluster)
    with stage_run(config, stage="precompute", fingerprint=common["fingerprint"]):
        shards = _take_over(config, fgrams, earlier)
        new = NewRows(fgrams, first_id=earlier.num_rows if earlier else 0)
        shards += _write_shards(config, new, num_before=len(shards))
        manifest = _manifest(config, fgrams, checkpoint, shards, common)
        storage.remove_folder(storage.join(config.out, BLOCKS))
        artifacts.publish(config.out, manifest)
        _log(config, manifest)
    return manifest


class NewRows(NamedTuple):
    """The f-grams whose rows are to be computed."""

    fgrams: FgramsManifest
    first_id: int

    @property
    def num(self) -> int:
        return self.fgrams.num_fgrams - self.first_id


def _load_inputs(
    config: PrecomputeConfig,
) -> tuple[CheckpointManifest, FgramsManifest, EmbeddingsManifest | None]:
    """Of the checkpoint, the f-grams and the table that grows, which belong together."""
    checkpoint = artifacts.load_manifest(CheckpointManifest, config.checkpoint)
    if checkpoint.fgrams_fingerprint is None:
        raise ArtifactError(
            f"checkpoint={config.checkpoint!r}: a plain baseline has no f-gram model to precompute"
        )
    fgrams = artifacts.load_manifest(FgramsManifest, config.fgrams)
    checkpoint.require_fgrams(fgrams, f"fgrams={config.fgrams!r}")
    if config.grow is None:
        return checkpoint, fgrams, None
    earlier = artifacts.load_manifest(EmbeddingsManifest, config.grow)
    for field, found, expected in (
        ("checkpoint_fingerprint", earlier.checkpoint_fingerprint, checkpoint.fingerprint),
        ("row_format", earlier.row_format, config.rows),
    ):
        remedy = "grow a table of the same checkpoint and format, or leave grow away"
        artifacts.require_equal(f"grow={config.grow!r}: {field}", found, expected, remedy)
    if earlier.fgrams_fingerprint not in {g.fingerprint for g in fgrams.earlier}:
        raise ArtifactError(
            f"grow={config.grow!r}: its f-grams {earlier.fgrams_fingerprint!r} are no earlier "
            f"generation of fgrams={config.fgrams!r}; leave grow away to compute all rows"
        )
    return checkpoint, fgrams, earlier


def _take_over(
    config: PrecomputeConfig, fgrams: FgramsManifest, earlier: EmbeddingsManifest | None
) -> tuple[Shard, ...]:
    """The shards of the table that grows, which are now in `out`, too; and the ranks."""
    copies = []
    if fgrams.ranks is not None:
        copies.append((config.fgrams, fgrams.ranks.name))
    if config.grow is not None and earlier is not None:
        copies += [(config.grow, shard.name) for shard in earlier.shards]
    for folder, name in copies:
        storage.copy_file(storage.join(folder, name), storage.join(config.out, name))
    return earlier.shards if earlier else ()


def embed_fgrams(
    model: SconeLM, tokens_SK: np.ndarray, n_S: np.ndarray, fgrams_per_forest: int
) -> torch.Tensor:
    """The vectors of f-grams in depth-first order, float32 [S, D] on the CPU."""
    device = next(model.parameters()).device
    parts = []
    with torch.inference_mode():
        for first in range(0, len(n_S), fgrams_per_forest):
            part = slice(first, first + fgrams_per_forest)
            forest = build_forest(tokens_SK[part], n_S[part]).to(device)
            parts.append(model.fgram_vectors(forest)[forest.node_of_S].cpu())
    return torch.cat(parts)


def _write_shards(config: PrecomputeConfig, new: NewRows, *, num_before: int) -> tuple[Shard, ...]:
    """Sort, compute blocks, assemble shards; blocks are not needed once every shard is there."""
    num_shards = -(-new.num // config.rows_per_shard)
    names = [f"embeddings-{num_before + n:06d}" for n in range(num_shards)]
    blocks: list[Shard] = []
    if None in _receipts(config, names):
        (order,) = run_units(
            "precompute: sort",
            ["sorted"],
            partial(_sort_fgrams, config=config, new=new),
            folder=config.out,
        )
        blocks = _write_blocks(config, new, Shard.model_validate(order))
    receipts = run_units(
        "precompute: assemble",
        names,
        partial(_assemble, names=names, config=config, new=new, blocks=blocks),
        folder=config.out,
    )
    return tuple(Shard.model_validate(receipt) for receipt in receipts)


def _sort_fgrams(_: int, *, config: PrecomputeConfig, new: NewRows) -> dict[str, Any]:
    """Write the f-grams in depth-first order as one mapped file."""
    fgram_set = read_fgrams(config.fgrams, first_id=new.first_id)
    order_S = depth_first_order(fgram_set.tokens_MK, fgram_set.n_M)
    tokens_SK, n_S = fgram_set.tokens_MK[order_S], fgram_set.n_M[order_S]
    tokens = pa.FixedSizeListArray.from_arrays(tokens_SK.reshape(-1), new.fgrams.max_n)
    batch = pa.record_batch({"fgram_id": new.first_id + order_S, "n": n_S, "tokens": tokens})
    folder = storage.join(config.out, BLOCKS)
    return artifacts.write_shard(folder, "sorted.arrow", batch).model_dump()


def _write_blocks(config: PrecomputeConfig, new: NewRows, sorted_fgrams: Shard) -> list[Shard]:
    names = [f"block-{n:06d}" for n in range(-(-new.num // config.fgrams_per_block))]
    receipts = _receipts(config, names)
    if todo := [n for n, receipt in enumerate(receipts) if receipt is None]:
        blocks = ray.data.from_items([{"block": n} for n in todo], override_num_blocks=len(todo))
        computed = blocks.map_batches(
            BlockWriter,
            fn_constructor_args=(config, sorted_fgrams, names),
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=min(len(todo), _num_actors(config))
            ),
            num_cpus=config.cpus_per_actor,
            num_gpus=config.gpus_per_actor,
            runtime_env={"env_vars": SAME_BITS_FOR_ANY_THREADS},
        )
        progress = Progress(
            "precompute: compute",
            unit="f-grams",
            total=new.num,
            done=sum(receipt["num_rows"] for receipt in receipts if receipt is not None),
        )
        for block in computed.iter_rows():
            progress.advance(block["num_fgrams"])
    return [Shard.model_validate(receipt) for receipt in _receipts(config, names)]


class BlockWriter:
    """Holds the model; computes blocks and spills each, sorted by f-gram id, with its receipt."""

    def __init__(self, config: PrecomputeConfig, sorted_fgrams: Shard, names: list[str]) -> None:
        torch.set_num_threads(config.cpus_per_actor)
        device = "cuda" if config.gpus_per_actor else "cpu"
        self._config, self._names = config, names
        self._folder = storage.join(config.out, BLOCKS)
        self._fgrams = artifacts.map_shard(self._folder, sorted_fgrams)
        self._model = SconeLM.load(config.checkpoint).to(device)

    def __call__(self, batch: pa.Table) -> pa.Table:
        block = batch["block"][0].as_py()
        size = self._config.fgrams_per_block
        ids_S, tokens_SK, n_S = _columns(self._fgrams.slice(block * size, size))
        vectors_SD = embed_fgrams(self._model, tokens_SK, n_S, self._config.fgrams_per_forest)
        by_id_S = np.argsort(ids_S)
        rows_SD = to_storage(vectors_SD[by_id_S], self._config.rows)
        spilled = embedding_batch(rows_SD, self._config.rows).append_column(
            "fgram_id", pa.array(ids_S[by_id_S])
        )
        shard = artifacts.write_shard(self._folder, f"{self._names[block]}.arrow", spilled)
        artifacts.write_receipt(self._config.out, self._names[block], shard.model_dump())
        return pa.table({"num_fgrams": [len(ids_S)]})


def _assemble(
    number: int,
    *,
    names: list[str],
    config: PrecomputeConfig,
    new: NewRows,
    blocks: list[Shard],
) -> dict[str, Any]:
    """Collect the rows of one range of ids from all blocks and publish them in id order."""
    first_id = new.first_id + number * config.rows_per_shard
    last_id = min(first_id + config.rows_per_shard, new.fgrams.num_fgrams)
    ids, rows = [], []
    for block in blocks:
        spilled = artifacts.map_shard(storage.join(config.out, BLOCKS), block)
        ids_S = spilled["fgram_id"].to_numpy()
        part = slice(*np.searchsorted(ids_S, [first_id, last_id]))
        ids.append(ids_S[part])
        rows.append(table_rows(spilled)[part])
    rows_SD = np.empty((last_id - first_id, rows[0].shape[1]), rows[0].dtype)
    for ids_M, rows_MD in zip(ids, rows, strict=True):
        rows_SD[ids_M - first_id] = rows_MD
    batch = embedding_batch(rows_SD, config.rows)
    shard = artifacts.write_shard(config.out, f"{names[number]}.arrow", batch, first_id=first_id)
    return shard.model_dump()


def _manifest(
    config: PrecomputeConfig,
    fgrams: FgramsManifest,
    checkpoint: CheckpointManifest,
    shards: tuple[Shard, ...],
    common: dict[str, Any],
) -> EmbeddingsManifest:
    rows_ND = table_rows(artifacts.map_shard(config.out, shards[0]))
    width = width_of(rows_ND, config.rows)
    return EmbeddingsManifest(
        **common,
        shards=shards,
        fgrams_fingerprint=fgrams.fingerprint,
        checkpoint_fingerprint=checkpoint.fingerprint,
        tokenizer_sha256=fgrams.tokenizer_sha256,
        max_n=fgrams.max_n,
        num_rows=fgrams.num_fgrams,
        width=width,
        row_format=config.rows,
        ranks=fgrams.ranks,
        bytes_per_row=STORAGE[config.rows].num_bytes(width),
    )


def _log(config: PrecomputeConfig, manifest: EmbeddingsManifest) -> None:
    """Size of the table and, as a plot, the RMS of rows from the most to the least frequent."""
    ids_M = np.unique(np.geomspace(1, manifest.num_rows, 2000).astype(np.int64)) - 1
    rms_M = EmbeddingTable.open(config.out).vectors(ids_M).float().square().mean(1).sqrt()
    figure = matplotlib.figure.Figure()
    axes = figure.subplots()
    axes.loglog(ids_M + 1, rms_M, ".", markersize=2)
    axes.set(xlabel="rank of the f-gram", ylabel="RMS of its row", title="Rows of the table")
    mlflow.log_figure(figure, "row_rms.png")
    mlflow.log_metrics(
        {
            "rows": manifest.num_rows,
            "table_bytes": manifest.num_rows * manifest.bytes_per_row,
            "row_rms_mean": float(rms_M.mean()),
        }
    )
    log_manifest(manifest)


def _columns(fgrams: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids_S, tokens_SK and n_S of a range of the sorted f-grams."""
    tokens = fgrams["tokens"]
    tokens_SK = tokens.flatten().to_numpy().reshape(len(tokens), -1)
    return fgrams["fgram_id"].to_numpy(), tokens_SK, fgrams["n"].to_numpy()


def _num_actors(config: PrecomputeConfig) -> int:
    """Copies of the model that fit the cluster.

    Raises:
        ValueError: not even one fits.
    """
    resources = ray.cluster_resources()
    fitting = resources.get("CPU", 0) // config.cpus_per_actor
    if config.gpus_per_actor:
        fitting = min(fitting, resources.get("GPU", 0) // config.gpus_per_actor)
    if fitting == 0:
        raise ValueError(
            f"cpus_per_actor={config.cpus_per_actor}, gpus_per_actor={config.gpus_per_actor}: "
            f"the cluster has {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
        )
    return int(min(fitting, config.num_actors or fitting))


def _receipts(config: PrecomputeConfig, names: list[str]) -> list[dict[str, Any] | None]:
    return [artifacts.read_receipt(config.out, name) for name in names]
