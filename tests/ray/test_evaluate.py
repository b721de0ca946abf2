"""The laws of the evaluate stage: table = on the fly; tasks as if asked directly; damaged or
foreign inputs are refused.
"""

import json
from functools import partial
from pathlib import Path

import mlflow
import pytest

from ray_jobs.evaluate import evaluate
from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.precompute import precompute
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.tokenize import tokenize_corpus
from ray_jobs.tokenize.config import TokenizeConfig
from scone_core.artifacts.manifests import ArtifactError, FGramsManifest, load_manifest
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.embed import embed_on_the_fly
from scone_core.evaluation.scores import ALL_SOURCES, EvaluationManifest
from scone_core.evaluation.sources import read_sources
from scone_core.evaluation.task_files import read_questions
from scone_core.evaluation.zero_shot import answer_questions, task_score
from scone_core.fgrams.index import FGramIndex
from scone_core.model.scone_lm import SconeLM
from tests import BUNDLED
from tests.builders.corpora import (
    text_of,
    word_tokenizer,
    write_fgrams,
    write_tokens,
    zipf_documents,
)
from tests.builders.served_models import (
    SEPARATOR,
    VOCAB,
    publish_checkpoint,
    random_llama,
    trained_model,
)
from tests.builders.tasks import write_task
from tests.programs.stages import snapshot

QUIZ = "quiz/rc_0shot"
DOCUMENTS = zipf_documents(num_documents=30, mean_length=80, vocab_size=VOCAB, seed=7)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens, fgrams, other_fgrams, checkpoint, table, pretrained and task_files, in folders of
    these names.
    """
    folder = tmp_path_factory.mktemp("artifacts")
    files = ("books.jsonl", "web/0.jsonl", "web/1.jsonl")
    write_tokens(str(folder / "tokens"), DOCUMENTS, vocab_size=VOCAB, files=files)
    write_quiz(folder / "task_files")
    random_llama().save_pretrained(folder / "pretrained")
    (folder / "pretrained" / "tokenizer.json").write_bytes(word_tokenizer(VOCAB))
    for name, num_fgrams in (("fgrams", 200), ("other_fgrams", 100)):
        write_fgrams(str(folder / name), DOCUMENTS, num_fgrams=num_fgrams, vocab_size=VOCAB)
    fgrams = load_manifest(FGramsManifest, str(folder / "fgrams"))
    (folder / "checkpoint" / "main_model").mkdir(parents=True)
    (folder / "checkpoint" / "main_model" / "tokenizer.json").write_bytes(word_tokenizer(VOCAB))
    publish_checkpoint(str(folder / "checkpoint"), trained_model(), fgrams)
    precompute.run(
        PrecomputeConfig(
            out=str(folder / "table"),
            checkpoint=str(folder / "checkpoint"),
            fgrams=str(folder / "fgrams"),
            row_format="fp32",
            num_actors=1,
        )
    )
    return folder


def write_quiz(folder: Path) -> None:
    """Questions from halves of documents, more than one unit of work."""
    quiz = [
        {
            "context": text_of(document[: 4 + i % 9]),
            "continuations": [" " + text_of(DOCUMENTS[(i + k) % 30][20 : 22 + k]) for k in (0, 1)],
            "label": i % 2,
        }
        for i, document in enumerate(3 * DOCUMENTS)
    ]
    write_task(folder, QUIZ, quiz)


def config_for(artifacts: Path, out: Path) -> EvaluateConfig:
    return EvaluateConfig(
        out=str(out),
        checkpoint=str(artifacts / "checkpoint"),
        tokens=str(artifacts / "tokens"),
        fgrams=str(artifacts / "fgrams"),
        sequence_length=16,
        num_actors=1,  # each imports for seconds
    )


@pytest.fixture
def config(artifacts: Path, tmp_path: Path) -> EvaluateConfig:
    return config_for(artifacts, tmp_path / "evaluation")


@pytest.fixture(scope="module")
def evaluated(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    """A finished evaluation of text and a task, on the fly."""
    config = config_for(artifacts, tmp_path_factory.mktemp("evaluated") / "evaluation")
    config = config.replace(task_files=str(artifacts / "task_files"), tasks=(QUIZ,))
    evaluate.run(config)
    return config


def test_table_gives_the_perplexity_of_the_fgram_model(
    evaluated: EvaluateConfig, config: EvaluateConfig, artifacts: Path
) -> None:
    of_fly = load_manifest(EvaluationManifest, evaluated.out)
    of_table = evaluate.run(config.replace(table=str(artifacts / "table")))
    fly, table = (manifest.text[ALL_SOURCES] for manifest in (of_fly, of_table))
    assert table.perplexity == pytest.approx(fly.perplexity, rel=1e-6)
    assert (table.hit_rate, table.mean_match_length) == (fly.hit_rate, fly.mean_match_length)
    assert fly.num_tokens == sum(map(len, DOCUMENTS))
    assert (of_fly.vectors, of_table.vectors) == ("on the fly", "table")


def test_every_source_and_task_is_in_mlflow_with_its_interval(
    evaluated: EvaluateConfig, tracking: str
) -> None:
    manifest = load_manifest(EvaluationManifest, evaluated.out)
    assert manifest.text.keys() == {ALL_SOURCES, "books", "web"}
    client = mlflow.MlflowClient(tracking)
    (experiment,) = client.search_experiments(filter_string="name = 'scone'")
    (run,) = client.search_runs(
        [experiment.experiment_id], f"tags.`scone.fingerprint` = '{manifest.fingerprint}'"
    )
    logged = run.data.metrics
    assert logged["perplexity"] == manifest.text[ALL_SOURCES].perplexity
    for source in ("books", "web"):
        score = manifest.text[source]
        assert logged[f"perplexity/{source}"] == score.perplexity
        ends = logged[f"perplexity_low/{source}"], logged[f"perplexity_high/{source}"]
        assert ends == score.perplexity_interval
    quiz = manifest.tasks[QUIZ]
    assert logged["accuracy"] == logged[f"accuracy/{QUIZ}"] == quiz.accuracy
    ends = logged[f"accuracy_low/{QUIZ}"], logged[f"accuracy_high/{QUIZ}"]
    assert ends == quiz.accuracy_interval


@pytest.mark.parametrize("model", ["checkpoint", "pretrained"])
def test_tasks_are_answered_as_if_asked_directly(
    model: str, config: EvaluateConfig, artifacts: Path
) -> None:
    """Also by a pretrained folder, and without any text."""
    is_plain = model == "pretrained"
    changes = {name: None for name in ("checkpoint", "fgrams") if is_plain}
    config = config.replace(
        tokens=None,
        task_files=str(artifacts / "task_files"),
        tasks=(QUIZ,),
        num_questions=70,
        **changes | {model: str(artifacts / model)},
    )
    found = evaluate.run(config)
    assert (found.text, found.vectors) == ({}, "none" if is_plain else "on the fly")
    scone = SconeLM(random_llama()) if is_plain else trained_model()
    index = None if is_plain else FGramIndex.open(str(artifacts / "fgrams"))
    answers = answer_questions(
        read_questions(str(artifacts / "task_files"), QUIZ, num_questions=70),
        main_model=scone.main_model,
        embed=partial(embed_on_the_fly, model=scone, matcher=index),
        encode=Tokenizer(artifacts / "pretrained" / "tokenizer.json").encode,
        start_id=SEPARATOR,
        max_length=16,
    )
    expected, quiz = task_score(answers), found.tasks[QUIZ]
    assert quiz.num_questions == 70
    assert quiz.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert (quiz.accuracy, quiz.hit_rate) == (expected.accuracy, expected.hit_rate)


def test_bytes_do_not_depend_on_the_number_of_actors(
    evaluated: EvaluateConfig, tmp_path: Path
) -> None:
    evaluate.run(evaluated.replace(out=str(tmp_path / "other"), num_actors=2))
    assert snapshot(tmp_path / "other") == snapshot(Path(evaluated.out))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fgrams": None}, "fgrams: needed"),
        ({"fgrams": "other_fgrams"}, "the training's was"),
        ({"checkpoint": "tokens"}, "'checkpoint/v1' is needed"),
        ({"table": "fgrams"}, "'embeddings/v1' is needed"),
        ({"pretrained": "pretrained"}, "give exactly one"),
        ({"checkpoint": None}, "give exactly one"),
        ({"checkpoint": None, "pretrained": "pretrained"}, "a pretrained model has none"),
        ({"tokens": None}, "give at least one"),
        ({"task_files": "tokens"}, "tasks: no 'piqa/rc_0shot'"),
    ],
    ids=str,
)
def test_inputs_that_do_not_belong_together_are_refused(
    config: EvaluateConfig, artifacts: Path, changes: dict[str, str | None], message: str
) -> None:
    paths = {name: value and str(artifacts / value) for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        evaluate.run(config.replace(**paths))
    assert not Path(config.out).exists()


def test_a_damaged_checkpoint_is_refused(config: EvaluateConfig, tmp_path: Path) -> None:
    fgrams = load_manifest(FGramsManifest, str(config.fgrams))
    folder = tmp_path / "checkpoint"
    publish_checkpoint(str(folder), trained_model(), fgrams)
    weights = folder / "main_model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with pytest.raises(ArtifactError, match=r"model\.safetensors: sha256 differs"):
        evaluate.run(config.replace(checkpoint=str(folder)))


def test_text_of_another_tokenizer_is_refused(
    config: EvaluateConfig, artifacts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pretrained"
    random_llama().save_pretrained(folder)
    tokenizer = json.loads(word_tokenizer(VOCAB))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    with pytest.raises(ArtifactError, match="tokenizer_sha256"):
        evaluate.run(config.replace(checkpoint=None, fgrams=None, pretrained=str(folder)))


def test_sources_of_a_tokenized_corpus_have_the_bytes_of_their_files(tmp_path: Path) -> None:
    """Three files in two sources through the real stage; the tokenizer is byte-level."""
    texts = {
        "web/0.jsonl": ["It is a truth", "naïve 世界 👩‍👩‍👧"],
        "web/1.jsonl": ["universally acknowledged\n" * 40],
        "poems-00000-of-00001.jsonl": ["«Größe»", "that a single man", "½"],
    }
    for name, of_file in texts.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in of_file))
    tokenize_corpus.run(
        TokenizeConfig(
            inputs=(str(tmp_path / "corpus"),),
            tokenizer=str(BUNDLED / "tokenizer.json"),
            out=str(tmp_path / "tokens"),
        )
    )
    sources = read_sources(str(tmp_path / "tokens"))
    num_bytes = {
        name: int(sources.bytes_A[sources.source_A == number].sum())
        for number, name in enumerate(sources.names)
    }
    expected = {"poems": 0, "web": 0}
    for name, of_file in texts.items():
        expected[name.split("/")[0].split("-")[0]] += sum(len(t.encode()) for t in of_file)
    assert num_bytes == expected
