"""The whole story: text becomes f-grams, two trained models, a table, and a served model."""

import json
import time

from pipelines.recipes import Recipe, RecipeChoice, build_recipe
from ray_jobs.count import fgram_count
from ray_jobs.evaluate import evaluate
from ray_jobs.precompute import precompute
from ray_jobs.runtime.command_line import one_line_errors
from ray_jobs.runtime.options import read_options
from ray_jobs.runtime.tracking import tracking_uri
from ray_jobs.serve import export, measure_decode
from ray_jobs.tokenize import tokenize_corpus
from ray_jobs.train import train
from scone_core.evaluation.scores import ALL_SOURCES


def run(recipe: Recipe) -> dict[str, float]:
    """Run every stage of a recipe that is not finished yet; the numbers of the summary."""
    started = time.monotonic()

    chapter("1 tokenize: training text and held-out text")
    tokens, *_ = [tokenize_corpus.run(config) for config in recipe.tokens]

    chapter("2 count: which n-grams are frequent")
    fgrams = fgram_count.run(recipe.fgrams)

    chapter("3 train: the plain baseline, then the same model with f-grams")
    train.run(recipe.baseline)
    train.run(recipe.scone)

    chapter("4 precompute: the f-gram model becomes a table")
    table = precompute.run(recipe.table)

    chapter("5 evaluate: baseline, f-gram model on the fly, table")
    baseline = evaluate.run(recipe.evaluate_baseline).text[ALL_SOURCES]
    fly = evaluate.run(recipe.evaluate_fly).text[ALL_SOURCES]
    from_table = evaluate.run(recipe.evaluate_table).text[ALL_SOURCES]

    chapter("6 serve: both models behind OpenAI's API")
    export.run(recipe.export_baseline)
    export.run(recipe.export_scone)
    decode = measure_decode.run(recipe.decode)
    print(f"serve: the model continues the first prompt with {decode.answer!r}")

    return {
        "documents": tokens.num_documents,
        "tokens": tokens.num_tokens,
        "num_fgrams": fgrams.num_fgrams,
        "hit_rate": from_table.hit_rate,
        "mean_match_length": from_table.mean_match_length,
        "perplexity_baseline": baseline.perplexity,
        "perplexity_scone_fly": fly.perplexity,
        "perplexity_scone_table": from_table.perplexity,
        "table_vs_fly_rel": abs(from_table.perplexity / fly.perplexity - 1),
        "table_bytes": sum(shard.num_bytes for shard in table.shards),
        "decode_tokens_per_second": decode.decode_tokens_per_second,
        "decode_tokens_per_second_baseline": decode.decode_tokens_per_second_baseline,
        "seconds_after_setup": time.monotonic() - started,
    }


def chapter(title: str) -> None:
    print(f"\n== {title}", flush=True)


def main(choice: RecipeChoice) -> None:
    """Run the chosen recipe and print its numbers, for people and as one line of JSON."""
    recipe = build_recipe(choice)
    numbers = run(recipe)
    print()
    for name, value in numbers.items():
        digits = ",.4f" if isinstance(value, float) else ","
        print(f"{name:24} {value:>16{digits}}")
    print(f"\nevery run, with plots:  mlflow ui --backend-store-uri {tracking_uri(recipe.scone)}")
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(read_options(RecipeChoice, description=__doc__))
