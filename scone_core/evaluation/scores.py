"""sums per document and per question -> evaluation/v1: figures with their 95 % intervals.

Nothing is drawn at random, so equal runs give equal intervals. Text: documents are clusters (the
tokens of one depend on each other), and a mean is a ratio of sums over them. Tasks: questions are
independent.

Shapes: A documents.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np

from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import Manifest

ALL_SOURCES = "all sources"
MIN_CLUSTERS = 5
"""With fewer documents an interval would say more than they can."""
NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)

Interval = tuple[float, float]
"""Lower and upper end."""


class TextScore(Frozen):
    """How well a model predicts the documents of one source, or of all."""

    num_documents: int
    num_tokens: int
    """Scored tokens: all of the documents, no separator."""
    num_bytes_text: int
    """UTF-8 bytes of the text behind the tokens."""
    perplexity: float
    """Per token."""
    perplexity_interval: Interval | None
    """None below five documents."""
    bits_per_byte: float
    bits_per_byte_interval: Interval | None
    hit_rate: float
    """Part of the tokens at which an f-gram ends."""
    mean_match_length: float
    """Tokens of the longest f-gram that ends at a token, 1 where none does."""


class TaskScore(Frozen):
    """How many questions of a task a model answers rightly."""

    num_questions: int
    chosen_by: Literal["likelihood per character", "greedy choice"]
    """The best choice; or, where there is only one, all of its tokens are the model's own."""
    accuracy: float
    accuracy_interval: Interval
    accuracy_by_sum: float
    """The same when choices are compared by their likelihood alone, whatever their length."""
    bits_per_byte: float
    """Bits per byte of the right choices, mean over questions."""
    hit_rate: float
    """Part of the tokens, contexts included, at which an f-gram ends."""


class EvaluationManifest(Manifest):
    """evaluation/v1: what a model makes of held-out text and of tasks; no shards."""

    CONTRACT: ClassVar[str] = "evaluation/v1"
    contract: Literal["evaluation/v1"] = "evaluation/v1"
    vectors: Literal["none", "on the fly", "table"]
    """Where the f-grams' vectors came from; none for a plain model."""
    text: dict[str, TextScore]
    """By source, and for `ALL_SOURCES` together; empty when no text was given."""
    tasks: dict[str, TaskScore]
    """By name; empty when no tasks were given."""


def ratio_interval(sum_A: np.ndarray, weight_A: np.ndarray) -> Interval | None:
    """The interval of `sum(sum_A) / sum(weight_A)` over clusters A that were drawn as a whole.

    Linearised standard error of a ratio (Cochran, Sampling Techniques, 3rd ed., 6.4), Student's t.
    """
    n = len(sum_A)
    if n < MIN_CLUSTERS:
        return None
    mean = sum_A.sum() / weight_A.sum()
    squares = np.square(sum_A - mean * weight_A).sum()
    half = student_quantile(n - 1) * math.sqrt(n / (n - 1) * squares) / weight_A.sum()
    return float(mean - half), float(mean + half)


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, to 0.3 % from 4 degrees of freedom on (Abramowitz and
    Stegun, 26.7.5).
    """
    z, v = NORMAL_QUANTILE, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def share_interval(share: float, n: int) -> Interval:
    """Wilson's interval of a share of n independent trials; holds near 0 and 1 as well (Wilson,
    JASA 22, 1927).
    """
    z = NORMAL_QUANTILE
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def mean_accuracy(scores: Sequence[TaskScore]) -> tuple[float, Interval]:
    """The unweighted mean over tasks, as the paper reports it, and its interval."""
    mean = sum(score.accuracy for score in scores) / len(scores)
    halves = [(score.accuracy_interval[1] - score.accuracy_interval[0]) / 2 for score in scores]
    half = math.hypot(*halves) / len(scores)
    return mean, (max(0.0, mean - half), min(1.0, mean + half))
