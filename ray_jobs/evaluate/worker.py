"""units of evaluation -> their receipts: what each copy of the model does.

A unit is a range of windows of the text, or a range of questions of a task. Ranges are fixed by
the configuration, because they decide the batches and so the last bits of every sum.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedConfig

from ray_jobs.evaluate.config import EvaluateConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import CheckpointManifest, load_manifest
from scone_core.corpus.token_stream import TokenStream
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.embed import Embed, embed_from_table, embed_on_the_fly
from scone_core.evaluation.sums import DocumentSums
from scone_core.evaluation.task_files import read_questions
from scone_core.evaluation.text import evaluate_documents, num_windows
from scone_core.evaluation.zero_shot import Answer, Question, answer_questions
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import load_causal_lm
from scone_core.model.micro_batch import AttentionSpan
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable

UNIT_TOKENS = 1 << 14
"""Of text, about."""
UNIT_QUESTIONS = 64
BATCH_TOKENS = 2048
"""Of one forward pass over text. Its logits take 400 MB at 49,152 tokens of vocabulary."""


class Unit(Frozen):
    """One resumable piece of work."""

    name: str
    """Of its receipt."""
    task: str | None
    """None for text."""
    first: int
    """Window or question."""
    last: int
    """The one behind the last."""


class TextReceipt(Frozen):
    """The sums of a range of windows, one entry per document (see DocumentSums)."""

    document_A: list[int]
    loss_A: list[float]
    tokens_A: list[float]
    hits_A: list[float]
    match_len_A: list[float]

    @classmethod
    def of(cls, sums: DocumentSums) -> Self:
        return cls(**{name: column.tolist() for name, column in sums._asdict().items()})

    def sums(self) -> DocumentSums:
        return DocumentSums(*(np.array(getattr(self, name)) for name in DocumentSums._fields))


class TaskReceipt(Frozen):
    """The answers to a range of questions."""

    answers: tuple[Answer, ...]


def plan_units(config: EvaluateConfig) -> list[Unit]:
    """All units of a resolved configuration, in the order in which their sums are added."""
    units = []
    if config.tokens is not None:
        length = _length(config)
        total = num_windows(TokenStream.open(config.tokens), length)
        units += _split("text", None, total, max(1, UNIT_TOKENS // length))
    for task in config.tasks if config.task_files is not None else ():
        name = f"task-{task.replace('/', '-')}"
        units += _split(name, task, len(_questions(config, task)), UNIT_QUESTIONS)
    return units


def _split(name: str, task: str | None, total: int, size: int) -> list[Unit]:
    return [
        Unit(name=f"{name}-{n:05d}", task=task, first=first, last=min(first + size, total))
        for n, first in enumerate(range(0, total, size))
    ]


def _length(config: EvaluateConfig) -> int:
    assert config.sequence_length is not None, "the configuration is resolved"
    return config.sequence_length


def _attention_span(config: EvaluateConfig) -> AttentionSpan:
    """As in training."""
    if config.checkpoint is None:
        return "sequence"
    return load_manifest(CheckpointManifest, config.checkpoint).config.get(
        "attention_span", "sequence"
    )


@cache
def _questions(config: EvaluateConfig, task: str) -> list[Question]:
    assert config.task_files is not None, "tasks are asked for"
    return read_questions(config.task_files, task, num_questions=config.num_questions)


class Evaluator:
    """A Ray actor that holds the model. It has one thread, so that no sum depends on threads."""

    def __init__(self, config: EvaluateConfig) -> None:
        """`config` is resolved."""
        torch.set_num_threads(1)
        self._config = config
        self._model = _load_model(self._config)
        self._embed = _embed(self._config, self._model)

    def score(self, unit: Unit) -> tuple[str, TextReceipt | TaskReceipt]:
        """The name of the receipt, and the receipt."""
        receipt = self._score_text(unit) if unit.task is None else self._answer(unit, unit.task)
        return unit.name, receipt

    def _score_text(self, unit: Unit) -> TextReceipt:
        assert self._config.tokens is not None, "text is asked for"
        length = _length(self._config)
        sums = evaluate_documents(
            self._model.main_model,
            self._embed,
            TokenStream.open(self._config.tokens),
            windows=np.arange(unit.first, unit.last),
            sequence_length=length,
            batch_size=max(1, BATCH_TOKENS // length),
            attention_span=_attention_span(self._config),
        )
        return TextReceipt.of(sums)

    def _answer(self, unit: Unit, task: str) -> TaskReceipt:
        answers = answer_questions(
            _questions(self._config, task)[unit.first : unit.last],
            main_model=self._model.main_model,
            embed=self._embed,
            encode=self._encode,
            start_id=_start_id(self._model.main_model.config),
            max_length=_length(self._config),
        )
        return TaskReceipt(answers=tuple(answers))

    @cached_property
    def _encode(self) -> Callable[[str], np.ndarray]:
        path = storage.join(self._config.model_folder, "tokenizer.json")
        return Tokenizer(storage.local_copy(path)).encode


def _load_model(config: EvaluateConfig) -> SconeLM:
    if config.checkpoint is not None:
        return SconeLM.load(config.checkpoint)
    return SconeLM(load_causal_lm(Path(config.model_folder)).float()).eval()


def _embed(config: EvaluateConfig, model: SconeLM) -> Embed:
    index = None if config.fgrams is None else FGramIndex.open(config.fgrams)
    if index is None or config.table is None:
        return partial(embed_on_the_fly, model=model, matcher=index)
    table = EmbeddingTable.open(config.table)
    return partial(embed_from_table, model=model, index=index, table=table)


def _start_id(config: PreTrainedConfig) -> int:
    """What stands before a text: the beginning token, else the separator."""
    if config.bos_token_id is not None:
        return config.bos_token_id
    return config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
