"""a model + tokens/v1, task files -> evaluation/v1: score held-out text and zero-shot tasks."""

import mlflow
import ray
from ray.util import ActorPool

from ray_jobs.evaluate.config import EvaluateConfig, check_inputs
from ray_jobs.evaluate.report import metrics, table
from ray_jobs.evaluate.worker import Evaluator, Unit, plan_units, read_answers, read_text
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.tracking import log_manifest, stage_run
from scone_core.artifacts.folders import claim, publish, read_receipt, shared_fields, write_receipt
from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.evaluation.scores import ALL_SOURCES, EvaluationManifest, TaskScore, TextScore
from scone_core.evaluation.sources import read_sources
from scone_core.evaluation.text import text_scores
from scone_core.evaluation.zero_shot import task_score


def run(config: EvaluateConfig) -> EvaluationManifest:
    """Perplexity and bits per byte of held-out text by source, and accuracy in zero-shot tasks,
    with 95 % intervals.
    """
    inputs = check_inputs(config)
    if done := claim(EvaluationManifest, config.out, config, inputs):
        print(f"evaluate: {config.out} is up to date\n{table(done)}")
        return done
    shared = shared_fields(EvaluationManifest, config, inputs)
    connect(config.cluster)
    with stage_run(config, stage="evaluate", fingerprint=shared["fingerprint"]):
        resolved = config.resolve()
        units = plan_units(resolved)
        _score_all(resolved, units)
        manifest = EvaluationManifest(
            **shared,
            shards=(),
            vectors=config.vectors,
            text=_text(config, units),
            tasks=_tasks(config, units),
        )
        mlflow.log_metrics(metrics(manifest))
        mlflow.log_text(table(manifest), "figures.txt")
        log_manifest(manifest)
        print(table(manifest))
        return publish(config.out, manifest)


def _score_all(config: EvaluateConfig, units: list[Unit]) -> None:
    """Give every unit its receipt; those that have one are not scored again."""
    todo = [unit for unit in units if read_receipt(config.out, unit.name) is None]
    progress = Progress("evaluate", unit="units", total=len(units), done=len(units) - len(todo))
    num_actors = config.num_actors or int(ray.cluster_resources().get("CPU", 1))
    actor = ray.remote(num_cpus=1)(Evaluator)
    settings = config.model_dump(mode="json")
    pool = ActorPool([actor.remote(settings) for _ in range(min(num_actors, len(todo)))])
    for name, content in pool.map_unordered(lambda actor, unit: actor.score.remote(unit), todo):
        write_receipt(config.out, name, content)
        progress.advance()


def _receipts(config: EvaluateConfig, units: list[Unit], task: str | None) -> list[dict]:
    found = [read_receipt(config.out, unit.name) for unit in units if unit.task == task]
    return [receipt for receipt in found if receipt is not None]


def _text(config: EvaluateConfig, units: list[Unit]) -> dict[str, TextScore]:
    if config.tokens is None:
        return {}
    sums = read_text(_receipts(config, units, None))
    scores = text_scores(sums, read_sources(config.tokens))
    tokens = load_manifest(TokensManifest, config.tokens)
    num_scored = tokens.num_tokens if tokens.num_targets is None else tokens.num_targets
    assert scores[ALL_SOURCES].num_tokens == num_scored, "every target is scored once"
    return scores


def _tasks(config: EvaluateConfig, units: list[Unit]) -> dict[str, TaskScore]:
    tasks = dict.fromkeys(unit.task for unit in units if unit.task is not None)
    return {task: task_score(read_answers(_receipts(config, units, task))) for task in tasks}
