"""What a table costs in quality: quantised rows, and a table grown instead of trained anew.

`python -m benchmarks.bench_table <folder of a finished quickstart>`. A table for people, one JSON
line last. Every figure is the held-out perplexity of the quickstart's model, whose artifacts are
made by the stages themselves. The f-gram set grows by a fifth: those of the same text that rank
behind its last one.
"""

import json
import os
import sys

import pandas as pd

from benchmarks.rounds import Metrics
from pipelines.recipes import Recipe, quickstart
from ray_jobs.count import fgram_count, fgram_grow
from ray_jobs.count.fgram_grow import GrowConfig
from ray_jobs.evaluate import evaluate
from ray_jobs.precompute import convert_table, precompute, verify_table
from ray_jobs.precompute.config import ConvertConfig, VerifyConfig
from ray_jobs.train import train
from scone_core.artifacts.manifests import EmbeddingsManifest, RowFormat, load_manifest
from scone_core.evaluation.scores import ALL_SOURCES, TextScore

GROWTH = 1.2
FORMATS: tuple[RowFormat, ...] = ("fp32", "bf16", "int8", "fp8")


def main() -> None:
    root = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    if not os.path.exists(f"{root}/table/manifest.json"):
        sys.exit(f"bench-table: skipped, {root} is no finished quickstart (`make quickstart`)")
    recipe, out = quickstart(root), f"{root}/bench-table"
    metrics = measure_formats(recipe, out) | measure_growth(recipe, out)
    print(pd.Series(metrics).to_string(float_format="{:,.6g}".format))
    print(json.dumps({name: float(f"{value:.6g}") for name, value in metrics.items()}))


def measure_formats(recipe: Recipe, out: str) -> Metrics:
    """Perplexity with rows of every format, and their error against the model's own vectors."""
    exact = f"{out}/table-fp32"
    precompute.run(recipe.table.replace(row_format="fp32", out=exact))
    metrics: Metrics = {}
    for rows in FORMATS:
        table = f"{out}/table-{rows}"
        if rows != "fp32":
            config = ConvertConfig(
                table=exact, row_format=rows, out=table, cluster=recipe.table.cluster
            )
            convert_table.run(config)
        score = evaluated(recipe, f"{out}/evaluation-{rows}", table=table)
        metrics[f"perplexity_{rows}"] = score.perplexity
        if rows != "fp32":
            metrics[f"{rows}_perplexity_change"] = score.perplexity / metrics["perplexity_fp32"] - 1
        check = verify_table.run(
            VerifyConfig(
                table=table,
                checkpoint=recipe.table.checkpoint,
                fgrams=recipe.table.fgrams,
                num_rows=4096,
            )
        )
        metrics[f"{rows}_cosine_error_mean"] = check.mean_cosine_error
        metrics[f"{rows}_cosine_error_max"] = check.max_cosine_error
    return metrics


def measure_growth(recipe: Recipe, out: str) -> Metrics:
    """The model with a table that grew, and a model that was trained with the larger set."""
    counted, grown, table = (f"{out}/{name}" for name in ("counted", "fgrams", "table-grown"))
    num_fgrams = int(recipe.fgrams.num_fgrams * GROWTH)
    fgram_count.run(recipe.fgrams.replace(num_fgrams=num_fgrams, out=counted))
    fgram_grow.run(GrowConfig(fgrams=recipe.fgrams.out, counted=counted, out=grown))
    manifest = precompute.run(recipe.table.replace(fgrams=grown, grow=recipe.table.out, out=table))
    before = load_manifest(EmbeddingsManifest, recipe.table.out)
    untouched = manifest.shards[: len(before.shards)] == before.shards
    assert untouched, "the shards that were there have the same sha256"
    anew = recipe.scone.replace(fgrams=counted, out=f"{out}/scone")
    train.run(anew)
    scores = {
        "before": evaluated(recipe, f"{out}/evaluation-before", table=recipe.table.out),
        "grown": evaluated(recipe, f"{out}/evaluation-grown", table=table, fgrams=grown),
        "trained_anew": evaluated(
            recipe, f"{out}/evaluation-anew", table=None, fgrams=counted, checkpoint=anew.out
        ),
    }
    metrics: Metrics = {"rows_before": before.num_rows, "rows_grown": manifest.num_rows}
    for name, score in scores.items():
        metrics[f"perplexity_{name}"] = score.perplexity
        metrics[f"hit_rate_{name}"] = score.hit_rate
    return metrics


def evaluated(recipe: Recipe, out: str, **changes: str | None) -> TextScore:
    """The held-out text, read from a table."""
    config = recipe.evaluate_table.replace(out=out, **changes)
    return evaluate.run(config).text[ALL_SOURCES]


if __name__ == "__main__":
    main()
