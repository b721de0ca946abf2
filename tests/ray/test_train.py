"""The laws of training: one run, resumed or not, gives one model; ranks never wait for ever."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlflow
import psutil
import pytest
from mlflow.entities import Run

from ray_jobs.evaluate import evaluate
from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.runtime.command_line import main
from ray_jobs.runtime.config import Tracking
from ray_jobs.train import train
from ray_jobs.train.config import TrainConfig
from scone_core.artifacts.manifests import ArtifactError
from scone_core.evaluation.scores import ALL_SOURCES
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.scone_lm import SconeLM
from scone_core.training.optimizer import OptimizerConfig
from tests.builders.corpora import write_fgrams, write_tokens, zipf_documents
from tests.programs.evaluate_here import evaluate_here
from tests.programs.stages import TIMEOUT_S, kill_when
from tests.programs.train_here import train_here

VOCAB_SIZE = 96
TINY = DecoderConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens/v1 of training and validation text, and the fgrams/v1 of the training text."""
    folder = tmp_path_factory.mktemp("inputs")
    corpora = {
        name: zipf_documents(num_documents=40, mean_length=80, vocab_size=VOCAB_SIZE, seed=seed)
        for name, seed in (("train", 1), ("validation", 2))
    }
    files = ("books.jsonl", "web.jsonl")
    for name, documents in corpora.items():
        write_tokens(str(folder / name), documents, vocab_size=VOCAB_SIZE, files=files)
    write_fgrams(str(folder / "fgrams"), corpora["train"], num_fgrams=300, vocab_size=VOCAB_SIZE)
    return folder


def config_for(inputs: Path, out: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        out=str(out),
        train_tokens=str(inputs / "train"),
        validation_tokens=str(inputs / "validation"),
        fgrams=str(inputs / "fgrams"),
        model=TINY,
        fgram_model=FGramModelConfig(num_layers=1),
        sequence_length=16,
        global_batch=8,
        steps=30,  # long enough to be killed before its end
        optimizer=OptimizerConfig(warmup_steps=2),
        micro_batch=2,
        eval_every=15,
        checkpoint_every=3,
        report_every=3,
        tracking=Tracking(experiment=out.parent.name),
    )
    return config.replace(**changes)


def weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("*_model/*.safetensors")
    }


def losses(config: TrainConfig) -> dict[int, float]:
    """The logged loss of every step."""
    (run,) = logged_runs(config)
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}


def logged_runs(config: TrainConfig) -> list[Run]:
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    return client.search_runs([experiment.experiment_id])


def seen_perplexity(config: TrainConfig) -> float:
    """What the last evaluation of a training found."""
    return logged_runs(config)[0].data.metrics["validation_perplexity"]


def evaluation_of(config: TrainConfig, folder: Path) -> EvaluateConfig:
    """How the evaluate stage scores a training's model on its validation text."""
    return EvaluateConfig(
        out=str(folder / "evaluation"),
        checkpoint=config.out,
        tokens=config.validation_tokens,
        fgrams=config.fgrams,
        num_actors=1,
    )


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished, uninterrupted training with f-grams."""
    config = config_for(inputs, tmp_path_factory.mktemp("trained") / "model")
    train.run(config)
    return config


def test_training_lowers_the_loss_and_publishes_a_model(trained: TrainConfig) -> None:
    logged = losses(trained)
    assert list(logged) == list(range(3, 31, 3))
    assert logged[30] < logged[3] - 0.2
    assert SconeLM.load(trained.out).fgram_model is not None


def test_one_run_holds_config_manifest_and_the_registered_model(trained: TrainConfig) -> None:
    """mlflow/mlflow#11782: one run, whatever the number of workers."""
    (run,) = logged_runs(trained)
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    artifacts = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "manifest.json"} <= artifacts
    (version,) = client.search_model_versions(f"run_id = '{run.info.run_id}'")
    assert version.name == f"{trained.tracking.experiment}-model"
    assert version.tags["scone.out"] == trained.out
    metrics = {"learning_rate", "gradient_norm", "tokens_per_second", "gflops_per_second"}
    metrics |= {"peak_memory_mb", "hit_rate", "fgram_flops_share", "validation_perplexity"}
    assert metrics <= run.data.metrics.keys()


def test_evaluation_gives_the_perplexity_that_training_saw(
    trained: TrainConfig, tmp_path: Path
) -> None:
    scores = evaluate.run(evaluation_of(trained, tmp_path)).text
    assert scores[ALL_SOURCES].perplexity == pytest.approx(seen_perplexity(trained), 1e-5)
    logged = logged_runs(trained)[0].data.metrics
    for source in ("books", "web"):
        seen = logged[f"validation_perplexity/{source}"]
        assert scores[source].perplexity == pytest.approx(seen, 1e-5)
        assert scores[source].perplexity != pytest.approx(scores[ALL_SOURCES].perplexity, 1e-5)


def test_losses_do_not_depend_on_the_number_of_workers(
    trained: TrainConfig, inputs: Path, tmp_path: Path
) -> None:
    alone = config_for(inputs, tmp_path / "model", num_workers=1, micro_batch=8)
    seen = {int(report["step"]): report["loss"] for report in train_here(alone)}
    assert seen == pytest.approx(losses(trained), rel=1e-4)


def test_killed_and_resumed_training_gives_the_bytes_of_the_uninterrupted_one(
    trained: TrainConfig,
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Driver and workers die during a save; the same command line, with the Ray of the tests, goes
    on (ray-project/ray#45516). Then a worker dies alone, and is replaced.
    """
    config = config_for(inputs, tmp_path / "model")
    arguments, states = command_line(config), tmp_path / "model/resume"
    kill_when(lambda: is_saving(states), "train.py", *arguments)
    assert not (tmp_path / "model/manifest.json").exists()
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_a_worker, states, after=max(complete(states)))
        main(TrainConfig, train.run)
        assert killed.done(), "no worker was killed"
        killed.result()
    assert "resumed after step" in capsys.readouterr().out
    assert weights(Path(config.out)) == weights(Path(trained.out))
    assert losses(config) == losses(trained)
    assert len(logged_runs(config)) == 1


def is_saving(folder: Path) -> bool:
    """A state is complete, and another one is being written."""
    return len(list(folder.glob("step-*"))) > len(complete(folder)) > 0


def complete(folder: Path) -> set[str]:
    """Names of the complete states."""
    return {path.parent.name for path in folder.glob("step-*/COMPLETE")}


def kill_a_worker(states: Path, *, after: str) -> None:
    """SIGKILL to a process that trains, once there is a newer complete state than `after`."""
    deadline = time.monotonic() + TIMEOUT_S
    while max(complete(states), default="") <= after:
        assert time.monotonic() < deadline, "no newer state"
        time.sleep(0.01)
    children = psutil.Process().children(recursive=True)
    workers = [process for process in children if "RayTrain" in process.name()]
    assert workers, "no worker runs"
    workers[0].kill()


def command_line(config: TrainConfig) -> list[str]:
    """The options of `config` as the command line takes them."""
    options = config.model_dump(mode="json", exclude={"cluster"}, exclude_none=True)
    flat = {}
    for name, value in options.items():
        for inner, part in value.items() if isinstance(value, dict) else [(None, value)]:
            flat[f"{name}.{inner}" if inner else name] = part
    return [
        word
        for name, value in flat.items()
        if value is not True and value != {}
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_an_output_of_another_configuration_is_refused(trained: TrainConfig) -> None:
    with pytest.raises(ArtifactError, match=r"sequence_length: 16 there, 8 here"):
        train.run(trained.replace(sequence_length=8))


def test_a_finished_training_is_not_done_again(trained: TrainConfig) -> None:
    before = losses(trained)
    train.run(trained)
    assert losses(trained) == before
    assert len(logged_runs(trained)) == 1


def test_the_plan_says_what_a_training_costs_and_starts_nothing(
    inputs: Path, tmp_path: Path
) -> None:
    config = config_for(inputs, tmp_path / "model", num_workers=64, global_batch=128)
    shown = "\n".join(train.plan(config).lines())
    assert not (tmp_path / "model").exists()
    assert "parameters" in shown
    assert "ZeRO-3" in shown
    assert "hours" in shown


def test_a_pretrained_model_that_does_not_know_all_ids_is_refused(
    trained: TrainConfig, inputs: Path, tmp_path: Path
) -> None:
    write_tokens(str(tmp_path / "tokens"), [[VOCAB_SIZE, 1, 2]] * 20, vocab_size=VOCAB_SIZE + 1)
    config = config_for(
        inputs,
        tmp_path / "model",
        train_tokens=str(tmp_path / "tokens"),
        validation_tokens=str(tmp_path / "tokens"),
        fgrams=None,
        pretrained=f"{trained.out}/main_model",
    )
    with pytest.raises(ValueError, match=r"knows 96 token ids, train_tokens has 97"):
        train.run(config)


def test_options_that_do_not_go_together_fail_before_any_worker_starts(
    inputs: Path, tmp_path: Path
) -> None:
    config = config_for(inputs, tmp_path / "model", fgram_model=FGramModelConfig(width=17))
    with pytest.raises(ValueError, match=r"fgram_model\.width=17"):
        train.run(config)
    assert not (tmp_path / "model/resume").exists()


@pytest.mark.parametrize("method", ["plain", "over_encoding", "fgram_mean"])
def test_other_input_embeddings_train_by_the_same_options(
    inputs: Path, tmp_path: Path, method: str
) -> None:
    fgrams = str(inputs / "fgrams") if method == "fgram_mean" else None
    config = config_for(
        inputs, tmp_path / "model", method=method, fgrams=fgrams, steps=4, num_workers=1
    )
    seen = train_here(config)[-1]["validation_perplexity"]
    assert SconeLM.load(config.out).input_embedding.method == method
    scores = evaluate_here(evaluation_of(config, tmp_path))
    assert scores[ALL_SOURCES].perplexity == pytest.approx(seen, 1e-5)


def test_chats_train_and_are_scored_by_their_targets_alone(inputs: Path, tmp_path: Path) -> None:
    """With attention that ends at document borders, in training and in evaluation."""
    chats = zipf_documents(num_documents=30, mean_length=40, vocab_size=VOCAB_SIZE, seed=5)
    marks = [[i % 3 == 0 for i in range(len(chat))] for chat in chats]
    folder = str(tmp_path / "chats")
    num_targets = sum(map(sum, marks))
    write_tokens(folder, chats, vocab_size=VOCAB_SIZE, targets=marks)
    config = config_for(
        inputs,
        tmp_path / "model",
        train_tokens=folder,
        validation_tokens=folder,
        attention_span="document",
        steps=3,
        num_workers=1,
    )
    seen = train_here(config)[-1]["validation_perplexity"]
    text = evaluate_here(evaluation_of(config, tmp_path))[ALL_SOURCES]
    assert text.num_tokens == num_targets
    assert text.perplexity == pytest.approx(seen, 1e-5)


def test_a_method_without_its_fgrams_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method='scone' needs f-grams"):
        config_for(inputs, tmp_path / "model", method="scone", fgrams=None)
    with pytest.raises(ValueError, match="method='plain' takes none"):
        config_for(inputs, tmp_path / "model", method="plain")


def test_more_workers_than_cpus_are_refused(inputs: Path, tmp_path: Path) -> None:
    config = config_for(inputs, tmp_path / "model", cpus_per_worker=100)
    with pytest.raises(ValueError, match="cpus_per_worker=100 needs 200 CPUs"):
        train.run(config)
