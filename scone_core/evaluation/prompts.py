"""prompts with several endings -> the likelihood of every ending: each prefix is computed once.

A row holds a prefix and then its endings; each ending attends to the prefix and to itself, at the
positions it would have alone. Input embeddings are those of every prefix with one ending, because
f-grams reach from an ending into its prefix.

Legend: B prompts of a batch, T tokens of the longest, V vocabulary, P positions of scored tokens;
E endings of a batch, L tokens of the longest prefix with one ending, R positions with logits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from scone_core.evaluation.embed import Embed

BATCH_TOKENS = 2048
"""Tokens of one forward pass, padding included. If all were scored, their logits would take 400 MB
at 49,152 tokens of vocabulary."""


class Prompt(NamedTuple):
    """What is given, and what is scored after it."""

    prefix_T: np.ndarray
    """int64, at least one token."""
    endings: tuple[np.ndarray, ...]
    """int64, at least one token each."""

    @property
    def num_inputs(self) -> int:
        """Tokens of its row; the last one of an ending is a target only."""
        return len(self.prefix_T) + sum(len(ending_T) - 1 for ending_T in self.endings)

    def cut(self, max_length: int) -> "Prompt":
        """The prompt without the beginning of its prefix, so that with any of the endings a model
        takes at most `max_length` tokens.

        Raises:
            ValueError: nothing of the prefix is left.
        """
        longest = max(len(ending_T) for ending_T in self.endings)
        if longest > max_length:
            raise ValueError(
                f"sequence_length={max_length}: too short for a continuation of {longest} tokens "
                "and one before it"
            )
        return self._replace(prefix_T=self.prefix_T[-(max_length + 1 - longest) :])


class Likelihood(NamedTuple):
    """What a model makes of one ending."""

    log_likelihood: float
    """Nats."""
    is_greedy: bool
    """Every token is the model's most likely one."""
    num_tokens: int
    """Tokens of the prefix and of the ending, without its last one."""
    num_hits: int
    """Tokens among them at which an f-gram ends."""


@torch.inference_mode()
def score_prompts(
    main_model: PreTrainedModel,
    embed: Embed,
    prompts: Sequence[Prompt],
    *,
    padding_id: int,
    batch_tokens: int = BATCH_TOKENS,
) -> list[list[Likelihood]]:
    """The likelihoods of the endings of every prompt, in the order of `prompts`.

    Args:
        main_model: a causal language model of transformers.
        embed: gives its input embeddings.
        padding_id: a token that is in no f-gram.

    Raises:
        ValueError: a prompt is longer than the model's attention window.
    """
    scores: dict[int, list[Likelihood]] = {}
    for numbers in batches_by_length([prompt.num_inputs for prompt in prompts], batch_tokens):
        batch = Batch.of([prompts[number] for number in numbers], padding_id)
        scores |= zip(numbers, _score_batch(main_model, embed, batch), strict=True)
    return [scores[number] for number in range(len(prompts))]


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences, shortest first, so many that padding included they hold at most
    `batch_tokens`, or one alone.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * lengths[number] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class Batch(NamedTuple):
    """Prompts as the rows of one forward pass."""

    prompts: Sequence[Prompt]
    sequence_EL: np.ndarray
    """int64: every prefix with one ending, padded."""
    source_BT: np.ndarray
    """int64: where in `sequence_EL`, flattened, a position of a row comes from."""
    position_BT: np.ndarray
    """int64: how many tokens stand before it."""
    ending_BT: np.ndarray
    """int64: the ending of the row, from 1, that it belongs to; 0 in the prefix, -1 for padding."""
    before_P: np.ndarray
    """int64: the position, of the flattened rows, before each scored token."""

    @classmethod
    def of(cls, prompts: Sequence[Prompt], padding_id: int) -> "Batch":
        sequences = [np.concatenate([p.prefix_T, ending]) for p in prompts for ending in p.endings]
        sequence_EL = np.full((len(sequences), max(map(len, sequences))), padding_id, np.int64)
        for row_L, sequence in zip(sequence_EL, sequences, strict=True):
            row_L[: len(sequence)] = sequence
        shape = (len(prompts), max(prompt.num_inputs for prompt in prompts))
        source_BT, position_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        ending_BT, before = np.full(shape, -1, np.int64), []
        e = 0
        for b, (prefix_T, endings) in enumerate(prompts):
            start = column = len(prefix_T)
            source_BT[b, :start] = e * sequence_EL.shape[1] + np.arange(start)
            position_BT[b, :start], ending_BT[b, :start] = np.arange(start), 0
            for number, ending_T in enumerate(endings, 1):
                end = column + len(ending_T) - 1
                place = start + np.arange(len(ending_T) - 1)
                source_BT[b, column:end] = e * sequence_EL.shape[1] + place
                position_BT[b, column:end], ending_BT[b, column:end] = place, number
                before += [b * shape[1] + np.array([start - 1, *range(column, end)])]
                column, e = end, e + 1
        return cls(prompts, sequence_EL, source_BT, position_BT, ending_BT, np.concatenate(before))

    @property
    def endings(self) -> list[np.ndarray]:
        return [ending_T for prompt in self.prompts for ending_T in prompt.endings]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, T, T], added to attention scores: a position sees the prefix and its own ending,
        up to itself.
        """
        is_prefix = self.ending_BT[:, None, :] == 0
        is_own = self.ending_BT[:, None, :] == self.ending_BT[:, :, None]
        is_seen_BTT = torch.from_numpy(np.tril(is_prefix | is_own))
        return torch.where(is_seen_BTT, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def _score_batch(main_model: PreTrainedModel, embed: Embed, batch: Batch) -> list[list[Likelihood]]:
    """The likelihoods of a batch, by prompt. The head is applied from the first scored position on:
    prefixes are most of a batch, and V is large.
    """
    _require_window(main_model, int(batch.position_BT.max()) + 1)
    inputs = embed(batch.sequence_EL)
    input_BTD = inputs.embeddings_BTD.flatten(0, 1)[torch.from_numpy(batch.source_BT)]
    row_P, column_P = map(torch.from_numpy, np.divmod(batch.before_P, batch.source_BT.shape[1]))
    first = int(column_P.min())
    logits_BRV = main_model(
        inputs_embeds=input_BTD,
        attention_mask=batch.mask(input_BTD.dtype),
        position_ids=torch.from_numpy(batch.position_BT),
        use_cache=False,
        logits_to_keep=batch.source_BT.shape[1] - first,
    ).logits
    logits_PV = logits_BRV[row_P, column_P - first].float()
    target_P = torch.from_numpy(np.concatenate(batch.endings))
    loss_P = F.cross_entropy(logits_PV, target_P, reduction="none").double()
    is_best_P = logits_PV.argmax(-1) == target_P
    return _by_prompt(batch, loss_P, is_best_P, inputs.match_len_BT)


def _by_prompt(
    batch: Batch, loss_P: Tensor, is_best_P: Tensor, match_len_EL: np.ndarray
) -> list[list[Likelihood]]:
    sizes = [len(ending_T) for ending_T in batch.endings]
    parts = zip(loss_P.split(sizes), is_best_P.split(sizes), match_len_EL, strict=True)
    found = []
    for prefix_T, endings in batch.prompts:
        found.append([])
        for ending_T in endings:
            loss, is_best, match_len_L = next(parts)
            num_tokens = len(prefix_T) + len(ending_T) - 1
            num_hits = int((match_len_L[:num_tokens] > 1).sum())
            found[-1].append(
                Likelihood(-loss.sum().item(), bool(is_best.all()), num_tokens, num_hits)
            )
    return found


def _require_window(main_model: PreTrainedModel, length: int) -> None:
    """Refuse a sliding window shorter than a row: the mask alone decides what a position sees."""
    window = getattr(main_model.config, "sliding_window", None)
    if window is not None and length > window:
        raise ValueError(
            f"sequence_length: a question has {length} tokens, but the model attends to {window}; "
            f"set it to {window}"
        )
