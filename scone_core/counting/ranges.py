"""chunk files -> ranges of records: cut the order (token, record) where memory asks for it.

A range is everything between two cuts, of all chunks. Most cuts are between the groups of two
tokens. A group that is too large for one range is cut inside, at the shortest prefix of tokens that
makes its parts small enough. So a cut divides only the n-grams that are shorter prefixes of its
place (`open_ngrams`). If all copies of a single record fill more than a range, a cut replaces them:
they are counted in the chunk files, not read.

Shapes: G groups, R records.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from scone_core.artifacts.config import Frozen
from scone_core.counting.chunks import Chunk
from scone_core.counting.one_scan import Groups, join_groups, starts_of
from scone_core.counting.records import Layout, Records, find_value, sort_records
from scone_core.fgrams.ngrams import NGram


class Cut(Frozen):
    """A place in the order (token, record)."""

    token: int
    value: int = 0
    """The record before which the range ends."""
    depth: int = 1
    """Tokens of the prefix at which the cut is. 1: before the whole group of `token`. max_n + 1:
    one record fills more than a range, so the cut replaces all its copies; they are counted, not
    read.
    """

    def resumes(self, layout: Layout) -> int:
        """The smallest record that is behind the cut."""
        return self.value + (self.depth > layout.max_n)

    def open_ngrams(self, layout: Layout) -> set[NGram]:
        """The n-grams that the cut divides: they occur on both sides, or among the copies that it
        replaces.
        """
        found = (layout.ngram(self.token, self.value, n) for n in range(2, self.depth))
        return {ngram for ngram in found if ngram is not None}


def plan_cuts(
    chunks: Sequence[Chunk], layout: Layout, sizes_G: np.ndarray, *, first_token: int, budget: int
) -> list[Cut]:
    """Cuts between which there are about `budget` records or fewer; the first and the last cut are
    the two ends.

    Args:
        sizes_G: records of the tokens from `first_token` on, all chunks together.
    """
    cuts = [Cut(token=first_token)]
    room = budget
    for token, size in enumerate(sizes_G.tolist(), first_token):
        if size > room and cuts[-1].token < token:
            cuts.append(Cut(token=token))
            room = budget
        if size > budget:
            cuts += _split_group(chunks, layout, token, budget / 2)
            room = 0
        room -= size
    return [*cuts, Cut(token=first_token + len(sizes_G))]


def _split_group(chunks: Sequence[Chunk], layout: Layout, token: int, budget: float) -> list[Cut]:
    """Cuts inside the group of `token`, with at most about 1.5 `budget` records between them."""
    samples = sorted(_sample(chunks, token, budget / 32))
    values, weights, before = [], [], [0.0]
    for value, equal in groupby(samples, key=itemgetter(0)):
        values.append(value)
        weights.append(sum(weight for _, weight in equal))
        before.append(before[-1] + weights[-1])
    cuts = [Cut(token=token)]
    start = 0.0
    for i, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if weight > budget / 2:
            cuts.append(Cut(token=token, value=value, depth=layout.max_n + 1))
            start = before[i + 1]
        elif before[i + 1] - start > budget:
            cut, start = _shallowest(layout, cuts[-1], values, before, i, budget / 2)
            cuts.append(cut)
    return cuts[1:]


def _shallowest(
    layout: Layout, last: Cut, values: list[int], before: list[float], i: int, most: float
) -> tuple[Cut, float]:
    """The cut at the shortest prefix of `values[i]` with at most `most` records between them, and
    the weight of all records in front of the cut.
    """
    for depth in range(2, layout.max_n):
        value = layout.truncate(values[i], depth - 1)
        place = before[bisect_left(values, value, 0, i)]
        if value > last.value and before[i] - place <= most:
            return Cut(token=last.token, value=value, depth=depth), place
    return Cut(token=last.token, value=values[i], depth=layout.max_n), before[i]


def _sample(chunks: Sequence[Chunk], token: int, step: float) -> list[tuple[int, float]]:
    """Records of a group about `step` apart, each with the number of records it stands for."""
    samples = []
    for chunk in chunks:
        begin, end = chunk.starts(token, token + 1).tolist()
        num = min(end - begin, int((end - begin) / step) + 1)
        for i in range(num):
            place = begin + (2 * i + 1) * (end - begin) // (2 * num)
            samples.append((chunk.value(place), (end - begin) / num))
    return samples


def gather_range(
    chunks: Sequence[Chunk], layout: Layout, lower: Cut, upper: Cut
) -> tuple[Groups, int]:
    """The records between two cuts, grouped, and how many copies of `lower.value` the lower cut
    replaced. Valid until the next call.

    Raises:
        ArtifactError: a chunk is missing or truncated.
    """
    first, last = lower.token, upper.token + (upper.depth > 1)
    whole = slice(int(lower.depth > 1), last - first - int(upper.depth > 1))
    starts = [chunk.starts(first, last) for chunk in chunks]
    sizes_G = np.zeros(last - first, np.int64)
    borders, num_equal = [], 0
    for chunk, starts_G1 in zip(chunks, starts, strict=True):
        sizes_G[whole] += np.diff(starts_G1)[whole]
        for token in sorted({cut.token for cut in (lower, upper) if cut.depth > 1}):
            begin, end = starts_G1[token - first : token - first + 2].tolist()
            part, equal = _inside_group(chunk, layout, token, begin, end, lower, upper)
            borders.append((token - first, part))
            sizes_G[token - first] += len(part.low_R)
            num_equal += equal

    def parts() -> Iterator[tuple[slice, np.ndarray, Records]]:
        for group, part in borders:
            yield slice(group, group + 1), np.array([0, len(part.low_R)]), part
        for chunk, starts_G1 in zip(chunks, starts, strict=True):
            if whole.start < whole.stop:
                inside_G1 = starts_G1[whole.start : whole.stop + 1]
                yield whole, inside_G1, chunk.records(int(inside_G1[0]), int(inside_G1[-1]))

    return Groups(first, starts_of(sizes_G), join_groups(sizes_G, layout, parts())), num_equal


def count_exactly(
    groups: Groups, layout: Layout, ngrams: Iterable[NGram], lower: Cut, num_equal: int
) -> dict[NGram, int]:
    """The occurrences in a range of those of `ngrams` whose first token has a group there.

    Args:
        num_equal: copies of `lower.value` that the lower cut replaced.
    """
    counts = {}
    for ngram in ngrams:
        group_index = ngram[0] - groups.first_token
        if 0 <= group_index < len(groups.starts_G1) - 1:
            group = groups.group(group_index)
            sort_records(group)
            value, behind = layout.bounds(ngram)
            counts[ngram] = find_value(group, behind) - find_value(group, value)
            if ngram[0] == lower.token and value <= lower.value < behind:
                counts[ngram] += num_equal
    return counts


def _inside_group(
    chunk: Chunk, layout: Layout, token: int, begin: int, end: int, lower: Cut, upper: Cut
) -> tuple[Records, int]:
    """The records between two cuts in a chunk's group of `token`, which has the records `begin` to
    `end - 1`, and how many copies of `lower.value` the lower cut replaced.
    """
    if end - begin < chunk.sorted_from:  # a small group: read all of it
        group = chunk.records(begin, end).copy()
        sort_records(group)
        find, part, first, last = partial(find_value, group), group.part, 0, end - begin
    else:
        find, part, first, last = partial(chunk.find, begin, end), chunk.records, begin, end
    num_equal = 0
    if token == lower.token and lower.depth > 1:
        first = find(lower.resumes(layout))
        num_equal = first - find(lower.value)
    if token == upper.token:
        last = find(upper.value)
    return part(first, last), num_equal
