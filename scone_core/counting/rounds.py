"""CountPlan + scratch space at hand -> CountPlan in as many rounds as the space asks for.

How many n-grams a count will find is a guess: it is extrapolated from a sample of the corpus.
"""

import math

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import TokensManifest
from scone_core.artifacts.units import read_receipt, write_receipt
from scone_core.corpus.token_shards import map_documents
from scone_core.counting.one_scan import Piece, count_ngrams, count_tokens
from scone_core.counting.plan import CountPlan

MAX_ROUNDS = 64
SAMPLE_TOKENS = 1 << 20
ROUNDS = "rounds"


class RoundsReceipt(Frozen):
    """How a count that has begun is cut into rounds."""

    round_tokens: tuple[int, ...]


class Estimate(Frozen):
    """What a count is expected to find; a guess, because it is extrapolated from a sample."""

    num_distinct: int
    num_frequent: int
    """N-grams at `min_count` or above."""

    @property
    def row_bytes(self) -> int:
        """Scratch bytes of the counted n-grams."""
        return self.num_frequent * 29


def fit_to_disk(plan: CountPlan, *, scratch_bytes: int | None) -> tuple[CountPlan, list[str]]:
    """The plan in as many rounds as its scratch disk asks for, and lines that say what it needs. A
    count that is resumed keeps its rounds, and no input is opened for that.

    Args:
        scratch_bytes: scratch space to use at most; None: all that is free.

    Raises:
        ValueError: the records do not fit in any number of rounds.
    """
    if begun := read_receipt(plan.scratch, ROUNDS, RoundsReceipt):
        return plan.with_rounds(begun.round_tokens), [f"resumed in {plan.scratch}"]
    free = storage.free_bytes(plan.scratch)
    limits = [size for size in (free, scratch_bytes) if size is not None]
    expected = estimate_ngrams(plan)
    plan = _add_rounds(plan, expected, available=min(limits, default=None))
    write_receipt(plan.scratch, ROUNDS, RoundsReceipt(round_tokens=plan.round_tokens))
    return plan, _lines(plan, expected, free)


def _add_rounds(plan: CountPlan, expected: Estimate, *, available: int | None) -> CountPlan:
    needed = plan.record_bytes + expected.row_bytes
    if available is None or needed <= available:
        return plan
    for_records = available - expected.row_bytes
    num_rounds = math.ceil(plan.record_bytes / for_records) if for_records > 0 else math.inf
    if num_rounds > MAX_ROUNDS or plan.keeps_chunks:
        raise ValueError(
            f"scratch={plan.scratch!r}: {available >> 20:,} MiB available, about "
            f"{needed >> 20:,} MiB needed; name a larger disk"
        )
    return plan.with_rounds(sample_cuts(plan, int(num_rounds)))


def _lines(plan: CountPlan, expected: Estimate, free: int | None) -> list[str]:
    room = "" if free is None else f" ({free >> 20:,} MiB free)"
    return [
        f"{plan.num_tokens:,} tokens in {len(plan.manifest.shards)} shards and "
        f"{len(plan.kept)} kept chunks, n = 2..{plan.options.max_n}, "
        f"min_count {plan.options.min_count}",
        f"expected (a guess from a sample): {expected.num_distinct:,} distinct n-grams, "
        f"{expected.num_frequent:,} frequent",
        f"plan: {plan.num_rounds} rounds of {plan.num_chunks} chunks, about "
        f"{-(-plan.num_tokens // plan.range_records)} ranges, at most "
        f"{plan.peak_bytes >> 20:,} MiB per task, about "
        f"{plan.record_bytes + expected.row_bytes >> 20:,} MiB of scratch in {plan.scratch}{room}",
    ]


def estimate_ngrams(plan: CountPlan) -> Estimate:
    """The n-grams that a count will find. Their number grows as a power of the corpus (Heaps' law);
    the exponent is taken from the first SAMPLE_TOKENS and their first half.
    """
    whole = sample_piece(plan.tokens, plan.manifest, SAMPLE_TOKENS)
    if whole.last < 2:
        return Estimate(num_distinct=0, num_frequent=0)
    num_ngrams = [
        [
            count_ngrams([part], plan.layout, min_count=least).num
            for least in (1, plan.options.min_count)
        ]
        for part in (whole._replace(last=whole.last // 2), whole)
    ]
    growth = plan.num_tokens / whole.last
    powers = [
        max(0.5, math.log2(max(of_whole, 1) / max(of_half, 1)))
        for of_half, of_whole in zip(*num_ngrams, strict=True)
    ]
    distinct, frequent = (
        round(num * growth**power) for num, power in zip(num_ngrams[1], powers, strict=True)
    )
    most = plan.num_tokens * (plan.options.max_n - 1)
    return Estimate(
        num_distinct=min(distinct, most),
        num_frequent=min(frequent, most // plan.options.min_count),
    )


def sample_piece(tokens: str, manifest: TokensManifest, num_tokens: int) -> Piece:
    """At most the first `num_tokens` tokens of the first shard that has any."""
    for shard in manifest.shards:
        tokens_L, offsets_D1 = map_documents(tokens, shard)
        if len(tokens_L):
            return Piece(tokens_L, offsets_D1, 0, min(num_tokens, len(tokens_L)))
    return Piece(np.empty(0, np.uint16), np.zeros(1, np.int64), 0, 0)


def sample_cuts(plan: CountPlan, num_parts: int) -> list[int]:
    """First tokens that cut a sample of the corpus into at most `num_parts` parts of similar
    numbers of positions; the end of the last part included.
    """
    vocab_size = plan.manifest.vocab_size
    sample = sample_piece(plan.tokens, plan.manifest, SAMPLE_TOKENS)
    ends_V = np.cumsum(count_tokens([sample], vocab_size) + 1)
    targets = np.arange(1, num_parts + 1) * (ends_V[-1] / num_parts)
    return [0, *sorted({min(int(i) + 1, vocab_size) for i in np.searchsorted(ends_V, targets)})]
