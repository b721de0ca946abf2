"""What a count looks for: the options that decide its result, and the n-grams to include."""

from itertools import combinations
from typing import Literal

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import TokensManifest
from scone_core.fgrams.ngrams import NGram

ScratchForm = Literal["raw", "compressed"]


class CountOptions(Frozen):
    """What a count looks for, and how it writes its records to scratch."""

    max_n: int
    min_count: int
    scratch_form: ScratchForm = "raw"
    include: tuple[NGram, ...] = ()
    """N-grams that become f-grams however rare, closed under prefixes and suffixes."""
    exclude_tokens: tuple[int, ...] = ()
    """No f-gram holds one of these token ids."""


def read_ngrams(
    path: str, tokens: TokensManifest, *, max_n: int, exclude_tokens: tuple[int, ...] = ()
) -> tuple[NGram, ...]:
    """The n-grams of a text file with one n-gram a line, and all n-grams inside them, sorted.

    Raises:
        ValueError: names the line that is no n-gram, or holds an excluded token.
    """
    found: set[NGram] = set()
    refused = {*exclude_tokens, tokens.separator_id}
    for number, line in enumerate(storage.read_bytes(path).decode().splitlines(), 1):
        if not all(word.isdecimal() for word in line.split()):
            raise ValueError(f"{path}, line {number}: token ids are expected: {line!r}")
        ngram = tuple(int(word) for word in line.split())
        inside = all(token < tokens.vocab_size for token in ngram) and not refused & {*ngram}
        if ngram and not (2 <= len(ngram) <= max_n and inside):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not 2 to max_n={max_n} ids "
                f"below vocab_size={tokens.vocab_size} without separator and excluded tokens"
            )
        pairs = combinations(range(len(ngram) + 1), 2)
        found |= {ngram[first:last] for first, last in pairs if last - first >= 2}
    return tuple(sorted(found))
