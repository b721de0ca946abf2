"""The engine's laws: its answers are those of a full recomputation, whatever the KV cache did."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch

from tests.builders.served_models import Agreement, Reference

Scenarios = dict[str, dict[str, Any]]
EVERY_SCENARIO = ("fresh", "repeated", "continued", "crowded")


PLACEMENTS = ("local", "actor")


@pytest.fixture(scope="session")
def answers_of(base: Path) -> dict[str, Scenarios]:
    """What engines with either placement answer; both run at once."""
    paths = {placement: base / f"{placement}.json" for placement in PLACEMENTS}
    engines = [start_engine(base / "served", placement, paths[placement]) for placement in paths]
    for engine in engines:
        output, _ = engine.communicate(timeout=400)
        assert engine.returncode == 0, output[-6000:]
    return {placement: json.loads(path.read_text()) for placement, path in paths.items()}


@pytest.fixture(scope="session", params=PLACEMENTS)
def answers(request: pytest.FixtureRequest, answers_of: dict[str, Scenarios]) -> Scenarios:
    """What an engine with this placement answers."""
    return answers_of[request.param]


def start_engine(served: Path, *args: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.serve.engine", str(served), *map(str, args)]
    return subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True)


@pytest.mark.parametrize("scenario", EVERY_SCENARIO)
def test_answers_equal_a_full_recomputation(
    answers: Scenarios, reference: Reference, scenario: str
) -> None:
    agreement = Agreement()
    pairs = zip(answers[scenario]["prompts"], answers[scenario]["answers"], strict=True)
    for prompt, answer in pairs:
        agreement += reference.check(prompt, answer)
    print(scenario, agreement)
    assert agreement.num_wrong == 0
    assert agreement.num_ties < 0.01 * agreement.num_tokens
    assert 0.3 < agreement.num_hits / agreement.num_tokens < 0.95


def test_the_scenarios_are_what_they_are_called(answers: Scenarios) -> None:
    lengths = sorted(len(prompt) for prompt in answers["fresh"]["prompts"])
    assert len(lengths) >= 12
    assert (lengths[0], lengths[-1]) == (1, 259)
    assert answers["fresh"]["prefix_cache_hits"] == 0
    assert answers["repeated"]["prefix_cache_hits"] > 500
    assert answers["continued"]["prefix_cache_hits"] > 500
    assert answers["crowded"]["num_preemptions"] > 0


def test_a_prompt_answered_twice_gets_one_answer(answers: Scenarios) -> None:
    assert answers["repeated"]["answers"] == answers["fresh"]["answers"]


def test_history_from_the_prompt_alone_would_give_other_answers(
    answers: Scenarios, reference: Reference
) -> None:
    """The known wrong way: generated tokens are unknown, so f-grams that reach into them miss."""
    num_different = 0
    for prompt, answer in zip(
        answers["fresh"]["prompts"], answers["fresh"]["answers"], strict=True
    ):
        fgram_ids = reference.fgram_ids(prompt + answer)
        fgram_ids[len(prompt) + 1 :] = [-1] * (len(answer) - 1)
        logits_TV = reference.logits(prompt + answer, fgram_ids)[len(prompt) - 1 : -1]
        num_different += logits_TV.argmax(-1).tolist() != answer
    assert num_different >= 12


def test_both_placements_give_equal_answers(answers_of: dict[str, Scenarios]) -> None:
    local, actor = (answers_of[placement] for placement in PLACEMENTS)
    for scenario in EVERY_SCENARIO:
        assert local[scenario]["answers"] == actor[scenario]["answers"]
        logprobs = [torch.tensor(part[scenario]["logprobs"]) for part in (local, actor)]
        torch.testing.assert_close(*logprobs, rtol=0, atol=1e-4)


def test_an_engine_that_cannot_be_the_trained_model_does_not_start(
    base: Path, tmp_path: Path
) -> None:
    """Neither with another table, nor with a worker that ignores f-grams."""
    changed = shutil.copytree(base / "served", tmp_path / "served")
    config = json.loads((changed / "config.json").read_text())
    config["scone"]["table_fingerprint"] = "another"
    (changed / "config.json").write_text(json.dumps(config))
    other_table = start_engine(changed, "local", tmp_path / "other_table.json")
    other_worker = start_engine(base / "served", "local", tmp_path / "other_worker.json", "auto")
    for engine, reason in (
        (other_table, "fingerprint: found .* expected 'another'"),
        (other_worker, "a SCONE model needs its own worker"),
    ):
        output, _ = engine.communicate(timeout=400)
        assert engine.returncode != 0
        assert re.search(reason, output), output[-6000:]
