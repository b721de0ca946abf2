"""checkpoint/v1 + fgrams/v1 -> embeddings/v1: the f-gram model's output for every f-gram."""

from functools import partial

import matplotlib.figure
import numpy as np
import ray

from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.precompute.worker import BlockActor
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.runtime.units import run_units, units_dataset
from scone_core.artifacts import storage
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import (
    ArtifactError,
    CheckpointManifest,
    EmbeddingsManifest,
    FGramsManifest,
    Shard,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.shards import map_shard
from scone_core.artifacts.units import read_receipt, read_receipts
from scone_core.table.build import BuildPlan, assemble_rows, sort_fgrams
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import STORAGE, table_rows, width_of

SAME_BITS_FOR_ANY_THREADS = {"MKL_CBWR": "AUTO,STRICT"}
"""Without it, MKL splits long dot products by thread count: a [333, 8192] x [8192, 64] product
differed between 1 and 2 threads.
"""


def run(config: PrecomputeConfig) -> EmbeddingsManifest:
    """Precompute the embedding of every f-gram."""
    checkpoint, fgrams, earlier = _load_inputs(config)
    inputs = {"checkpoint": checkpoint.fingerprint, "fgrams": fgrams.fingerprint}
    if earlier is not None:
        inputs["grow"] = earlier.fingerprint
    build = partial(_precompute, config, checkpoint, fgrams, earlier)
    return run_stage(EmbeddingsManifest, config, inputs, build, stage="precompute")


def _precompute(
    config: PrecomputeConfig,
    checkpoint: CheckpointManifest,
    fgrams: FGramsManifest,
    earlier: EmbeddingsManifest | None,
    shared: SharedFields,
    log: RunLog,
) -> EmbeddingsManifest:
    connect(config.cluster)
    shards = _take_over(config, fgrams, earlier)
    plan = _plan(config, fgrams, earlier)
    shards += _write_shards(config, plan)
    manifest = _manifest(config, fgrams, checkpoint, shards, shared)
    storage.remove_folder(plan.block_folder)
    _log(config, manifest, log)
    return manifest


def _plan(
    config: PrecomputeConfig, fgrams: FGramsManifest, earlier: EmbeddingsManifest | None
) -> BuildPlan:
    return BuildPlan(
        checkpoint=config.checkpoint,
        fgrams=config.fgrams,
        out=config.out,
        row_format=config.row_format,
        first_id=earlier.num_rows if earlier else 0,
        last_id=fgrams.num_fgrams,
        num_shards_before=len(earlier.shards) if earlier else 0,
        rows_per_shard=config.rows_per_shard,
        fgrams_per_block=config.fgrams_per_block,
        fgrams_per_forest=config.fgrams_per_forest,
    )


def _load_inputs(
    config: PrecomputeConfig,
) -> tuple[CheckpointManifest, FGramsManifest, EmbeddingsManifest | None]:
    """The manifests of the checkpoint, its f-grams and the table that grows.

    Raises:
        ArtifactError: they do not belong together.
    """
    checkpoint = load_manifest(CheckpointManifest, config.checkpoint)
    if checkpoint.fgrams_fingerprint is None:
        raise ArtifactError(
            f"checkpoint={config.checkpoint!r}: a plain baseline has no f-gram model to precompute"
        )
    fgrams = load_manifest(FGramsManifest, config.fgrams)
    checkpoint.require_fgrams(fgrams, f"fgrams={config.fgrams!r}")
    if config.grow is None:
        return checkpoint, fgrams, None
    earlier = load_manifest(EmbeddingsManifest, config.grow)
    for field, found, expected in (
        ("checkpoint_fingerprint", earlier.checkpoint_fingerprint, checkpoint.fingerprint),
        ("row_format", earlier.row_format, config.row_format),
    ):
        remedy = "grow a table of the same checkpoint and format, or leave grow away"
        require_equal(f"grow={config.grow!r}: {field}", found, expected, remedy)
    if earlier.fgrams_fingerprint not in {g.fingerprint for g in fgrams.earlier}:
        raise ArtifactError(
            f"grow={config.grow!r}: its f-grams {earlier.fgrams_fingerprint!r} are no earlier "
            f"generation of fgrams={config.fgrams!r}; leave grow away to compute all rows"
        )
    return checkpoint, fgrams, earlier


def _take_over(
    config: PrecomputeConfig, fgrams: FGramsManifest, earlier: EmbeddingsManifest | None
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


def _write_shards(config: PrecomputeConfig, plan: BuildPlan) -> tuple[Shard, ...]:
    """Sort, compute blocks, assemble shards; no block is needed once every shard is there."""
    do_units = partial(run_units, kind=Shard, folder=plan.out)
    blocks: list[Shard] = []
    if None in _receipts(plan, plan.shard_names):
        (order,) = do_units("precompute: sort", ["sorted"], lambda _: sort_fgrams(plan))
        blocks = _write_blocks(config, plan, order)
    assemble = partial(assemble_rows, plan, blocks)
    return tuple(do_units("precompute: assemble", plan.shard_names, assemble))


def _write_blocks(config: PrecomputeConfig, plan: BuildPlan, sorted_fgrams: Shard) -> list[Shard]:
    receipts = _receipts(plan, plan.block_names)
    if todo := [n for n, receipt in enumerate(receipts) if receipt is None]:
        computed = units_dataset(todo).map_batches(
            BlockActor,
            fn_constructor_args=(
                plan,
                sorted_fgrams,
                "cuda" if config.gpus_per_actor else "cpu",
                config.cpus_per_actor,
            ),
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
            total=plan.num_fgrams,
            done=sum(receipt.num_rows for receipt in receipts if receipt is not None),
        )
        for block in computed.iter_rows():
            progress.advance(block["num_fgrams"])
    return read_receipts("precompute: compute", plan.block_names, kind=Shard, folder=plan.out)


def _manifest(
    config: PrecomputeConfig,
    fgrams: FGramsManifest,
    checkpoint: CheckpointManifest,
    shards: tuple[Shard, ...],
    shared: SharedFields,
) -> EmbeddingsManifest:
    rows_ND = table_rows(map_shard(config.out, shards[0]))
    width = width_of(rows_ND, config.row_format)
    return EmbeddingsManifest(
        **shared,
        shards=shards,
        fgrams_fingerprint=fgrams.fingerprint,
        checkpoint_fingerprint=checkpoint.fingerprint,
        tokenizer_sha256=fgrams.tokenizer_sha256,
        max_n=fgrams.max_n,
        num_rows=fgrams.num_fgrams,
        width=width,
        row_format=config.row_format,
        ranks=fgrams.ranks,
        bytes_per_row=STORAGE[config.row_format].num_bytes(width),
    )


def _log(config: PrecomputeConfig, manifest: EmbeddingsManifest, log: RunLog) -> None:
    """Log the size of the table and a plot: the RMS of rows, the most frequent f-gram first."""
    ids_M = np.unique(np.geomspace(1, manifest.num_rows, 2000).astype(np.int64)) - 1
    rms_M = EmbeddingTable.map(config.out, manifest).vectors(ids_M).float().square().mean(1).sqrt()
    figure = matplotlib.figure.Figure()
    axes = figure.subplots()
    axes.loglog(ids_M + 1, rms_M, ".", markersize=2)
    axes.set(xlabel="rank of the f-gram", ylabel="RMS of its row", title="Rows of the table")
    log.log_figure(figure, "row_rms.png")
    log.log_metrics(
        {
            "rows": manifest.num_rows,
            "table_bytes": manifest.num_rows * manifest.bytes_per_row,
            "row_rms_mean": float(rms_M.mean()),
        }
    )


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


def _receipts(plan: BuildPlan, names: list[str]) -> list[Shard | None]:
    return [read_receipt(plan.out, name, Shard) for name in names]
