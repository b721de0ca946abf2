"""questions with choices -> the likelihood of every choice -> what the model answers.

A choice is a context and a continuation. They are tokenised as one text, as training text is, and
the first token that is scored is the first that any continuation changes: the choices of a context
are scored after the same tokens, and no character of a continuation is left out when a token
reaches across the boundary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from scone_core.artifacts.config import Frozen
from scone_core.evaluation.embed import Embed
from scone_core.evaluation.prompts import BATCH_TOKENS, Likelihood, Prompt, score_prompts
from scone_core.evaluation.scores import TaskScore, share_interval

Encode = Callable[[str], np.ndarray]
"""Text to token ids [T]."""


class Choice(NamedTuple):
    """One possible answer, as text."""

    context: str
    continuation: str

    @property
    def scored_text(self) -> str:
        """The continuation without the space that separates it from its context."""
        return self.continuation.removeprefix(" ")


class Question(NamedTuple):
    """Choices, one of which is right. A single choice is a text that the model is to continue."""

    number: int
    """Number within its task; wordings of one question share it."""
    choices: tuple[Choice, ...]
    answer: int


class Answer(Frozen):
    """What a model makes of one question."""

    number: int
    num_choices: int
    is_right: bool
    """The choice of the highest likelihood per character is right; a single choice is right where
    its tokens are the model's own.
    """
    is_right_by_sum: bool
    bits_per_byte: float
    """Bits per byte of the right choice."""
    num_tokens: int
    """Tokens of all choices, each with its context."""
    num_hits: int


def answer_questions(
    questions: Sequence[Question],
    *,
    main_model: PreTrainedModel,
    embed: Embed,
    encode: Encode,
    start_id: int,
    max_length: int,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Answer]:
    """Score all choices of `questions` and choose.

    Args:
        main_model: a causal language model of transformers.
        embed: gives its input embeddings.
        start_id: stands before a text without context, and is the padding; in no f-gram.
        max_length: the most tokens the model takes; longer contexts lose their beginning.

    Raises:
        ValueError: a continuation is empty or does not fit into `max_length`.
    """
    groups = [
        (place, chosen, prompt.cut(max_length))
        for place, question in enumerate(questions)
        for chosen, prompt in encode_question(question, encode=encode, start_id=start_id)
    ]
    likelihoods = score_prompts(
        main_model,
        embed,
        [prompt for _, _, prompt in groups],
        padding_id=start_id,
        batch_tokens=batch_tokens,
    )
    by_choice: list[dict[int, Likelihood]] = [{} for _ in questions]
    for (place, chosen, _), of_prompt in zip(groups, likelihoods, strict=True):
        by_choice[place] |= zip(chosen, of_prompt, strict=True)
    return [
        judge(question, [found[choice] for choice in range(len(question.choices))])
        for question, found in zip(questions, by_choice, strict=True)
    ]


def encode_question(
    question: Question, *, encode: Encode, start_id: int
) -> Iterator[tuple[list[int], Prompt]]:
    """For every context that the question has (most have one): which choices, and their tokens.

    Raises:
        ValueError: a continuation is empty.
    """
    for context in dict.fromkeys(choice.context for choice in question.choices):
        chosen = [n for n, choice in enumerate(question.choices) if choice.context == context]
        continuations = [question.choices[n].continuation for n in chosen]
        yield chosen, encode_prompt(context, continuations, encode=encode, start_id=start_id)


def encode_prompt(
    context: str, continuations: Sequence[str], *, encode: Encode, start_id: int
) -> Prompt:
    """Cut the tokens of the whole texts where the first of them differs from the context alone."""
    context_T = encode(context)
    wholes = [encode(context + continuation) for continuation in continuations]
    start = min(num_shared(context_T, whole_T) for whole_T in wholes)
    endings = tuple(whole_T[start:].astype(np.int64) for whole_T in wholes)
    for ending_T, text in zip(endings, continuations, strict=True):
        if not len(ending_T) or not text.removeprefix(" "):
            raise ValueError(f"continuation={text!r} after {context[-60:]!r}: nothing to score")
    prefix_T = context_T[:start] if start else np.array([start_id])
    return Prompt(prefix_T.astype(np.int64), endings)


def num_shared(a_T: np.ndarray, b_T: np.ndarray) -> int:
    """Tokens that both begin with."""
    length = min(len(a_T), len(b_T))
    differs_T = a_T[:length] != b_T[:length]
    return int(differs_T.argmax()) if differs_T.any() else length


def judge(question: Question, likelihoods: Sequence[Likelihood]) -> Answer:
    """The choice of highest likelihood per character; of equal ones the first."""
    sums = np.array([likelihood.log_likelihood for likelihood in likelihoods])
    texts = [choice.scored_text for choice in question.choices]
    best, best_by_sum = (sums / [len(text) for text in texts]).argmax(), sums.argmax()
    right, num_bytes = likelihoods[question.answer], len(texts[question.answer].encode())
    is_single = len(likelihoods) == 1
    return Answer(
        number=question.number,
        num_choices=len(likelihoods),
        is_right=right.is_greedy if is_single else bool(best == question.answer),
        is_right_by_sum=right.is_greedy if is_single else bool(best_by_sum == question.answer),
        bits_per_byte=float(-right.log_likelihood / np.log(2) / num_bytes),
        num_tokens=sum(likelihood.num_tokens for likelihood in likelihoods),
        num_hits=sum(likelihood.num_hits for likelihood in likelihoods),
    )


def task_score(answers: Sequence[Answer]) -> TaskScore:
    """The figures of a task: means over all wordings; intervals count questions."""
    n, num_questions = len(answers), len({answer.number for answer in answers})
    accuracy = sum(answer.is_right for answer in answers) / n
    is_greedy = all(answer.num_choices == 1 for answer in answers)
    return TaskScore(
        num_questions=num_questions,
        chosen_by="greedy choice" if is_greedy else "likelihood per character",
        accuracy=accuracy,
        accuracy_interval=share_interval(accuracy, num_questions),
        accuracy_by_sum=sum(answer.is_right_by_sum for answer in answers) / n,
        bits_per_byte=sum(answer.bits_per_byte for answer in answers) / n,
        hit_rate=sum(a.num_hits for a in answers) / sum(a.num_tokens for a in answers),
    )
