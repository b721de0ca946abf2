"""a model + tokens/v1, task files -> evaluation/v1: score held-out text and zero-shot tasks."""

from functools import partial

import ray
from ray.util import ActorPool

from ray_jobs.evaluate.config import EvaluateConfig, check_inputs
from ray_jobs.evaluate.report import metrics, table
from ray_jobs.evaluate.worker import Evaluator, TaskReceipt, TextReceipt, Unit, plan_units
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.artifacts.units import read_receipt, read_receipts, write_receipt
from scone_core.evaluation.scores import ALL_SOURCES, EvaluationManifest, TaskScore, TextScore
from scone_core.evaluation.sources import read_sources
from scone_core.evaluation.sums import DocumentSums
from scone_core.evaluation.text import text_scores
from scone_core.evaluation.zero_shot import task_score


def run(config: EvaluateConfig) -> EvaluationManifest:
    """Perplexity and bits per byte of held-out text by source, and accuracy in zero-shot tasks,
    with 95 % intervals.
    """
    inputs = check_inputs(config)
    build = partial(_evaluate, config)
    manifest = run_stage(EvaluationManifest, config, inputs, build, stage="evaluate")
    print(table(manifest))
    return manifest


def _evaluate(config: EvaluateConfig, shared: SharedFields, log: RunLog) -> EvaluationManifest:
    connect(config.cluster)
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
    log.log_metrics(metrics(manifest))
    log.log_text(table(manifest), "figures.txt")
    return manifest


def _score_all(config: EvaluateConfig, units: list[Unit]) -> None:
    """Give every unit its receipt; a unit that has one is not scored again."""
    todo = [unit for unit in units if read_receipt(config.out, unit.name, _kind(unit)) is None]
    progress = Progress("evaluate", unit="units", total=len(units), done=len(units) - len(todo))
    num_actors = config.num_actors or int(ray.cluster_resources().get("CPU", 1))
    actor = ray.remote(num_cpus=1)(Evaluator)
    pool = ActorPool([actor.remote(config) for _ in range(min(num_actors, len(todo)))])
    for name, receipt in pool.map_unordered(lambda actor, unit: actor.score.remote(unit), todo):
        write_receipt(config.out, name, receipt)
        progress.advance()


def _kind(unit: Unit) -> type[TextReceipt] | type[TaskReceipt]:
    return TextReceipt if unit.task is None else TaskReceipt


def _text(config: EvaluateConfig, units: list[Unit]) -> dict[str, TextScore]:
    if config.tokens is None:
        return {}
    names = [unit.name for unit in units if unit.task is None]
    receipts = read_receipts("evaluate: text", names, kind=TextReceipt, folder=config.out)
    sums = DocumentSums.join(receipt.sums() for receipt in receipts)
    scores = text_scores(sums, read_sources(config.tokens))
    tokens = load_manifest(TokensManifest, config.tokens)
    num_scored = tokens.num_tokens if tokens.num_targets is None else tokens.num_targets
    assert scores[ALL_SOURCES].num_tokens == num_scored, "every target is scored once"
    return scores


def _tasks(config: EvaluateConfig, units: list[Unit]) -> dict[str, TaskScore]:
    tasks = dict.fromkeys(unit.task for unit in units if unit.task is not None)
    return {task: _task(config, units, task) for task in tasks}


def _task(config: EvaluateConfig, units: list[Unit], task: str) -> TaskScore:
    names = [unit.name for unit in units if unit.task == task]
    receipts = read_receipts(f"evaluate: {task}", names, kind=TaskReceipt, folder=config.out)
    return task_score([answer for receipt in receipts for answer in receipt.answers])
