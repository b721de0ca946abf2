"""Laws of chunk files and ranges: however the records are cut, nothing is lost or counted twice."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts.manifests import ArtifactError
from scone_core.counting.chunks import Chunk, write_chunk
from scone_core.counting.one_scan import Piece, count_groups, group_records, sort_groups
from scone_core.counting.ranges import Cut, count_exactly, gather_range, plan_cuts
from scone_core.counting.records import Layout
from tests.builders.corpora import Documents, brute_force, whole

VOCABULARIES = [3, 255, 65_535, 65_536, 131_073]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Layout, Documents]:
    """Few distinct tokens, so that single groups and even single records are large."""
    layout = Layout(draw(st.integers(2, 6)), draw(st.sampled_from(VOCABULARIES)))
    ids = st.sampled_from([0, 1, layout.vocab_size - 1])
    documents = draw(st.lists(st.lists(ids, max_size=20), min_size=1, max_size=6))
    return layout, documents


def write_chunks(
    folder: Path, documents: Documents, layout: Layout, cuts: list[int], **form: int
) -> list[Chunk]:
    tokens_L, offsets_D1, _, num_tokens = whole(documents)
    edges = [0, *sorted(min(cut, num_tokens) for cut in cuts), num_tokens]
    chunks = []
    for i, (first, last) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        groups = group_records([Piece(tokens_L, offsets_D1, first, last)], layout)
        groups = sort_groups(groups, layout, min_size=form["sorted_from"])
        write_chunk(str(folder / f"{i}.records"), groups, **form)
        chunks.append(Chunk(str(folder / f"{i}.records")))
    return chunks


def count_all(chunks: list[Chunk], layout: Layout, cuts: list[Cut], min_count: int) -> Counter:
    """The counts of all ranges; those across cuts are added up."""
    counts: Counter = Counter()
    across_all: Counter = Counter()
    for lower, upper in zip(cuts[:-1], cuts[1:], strict=True):
        groups, num_equal = gather_range(chunks, layout, lower, upper)
        groups = sort_groups(groups, layout, min_size=min_count)
        across = lower.open_ngrams(layout) | upper.open_ngrams(layout)
        across_all.update(count_exactly(groups, layout, across, lower, num_equal))
        found = count_groups(groups, layout, min_count=min_count).without(across)
        for ngram, count in zip(found.tuples(), found.counts_M.tolist(), strict=True):
            assert ngram not in counts
            counts[ngram] = count
    assert not counts.keys() & across_all.keys()
    return counts | Counter({ngram: c for ngram, c in across_all.items() if c >= min_count})


@given(
    corpus=corpora(),
    min_count=st.integers(1, 3),
    budget=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 96), max_size=3),
    sorted_from=st.integers(2, 12),
    block=st.sampled_from([0, 3, 16]),
)
@settings(max_examples=120)
def test_counts_do_not_depend_on_chunks_ranges_and_compression(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: tuple[Layout, Documents],
    min_count: int,
    budget: int,
    cuts: list[int],
    sorted_from: int,
    block: int,
) -> None:
    layout, documents = corpus
    folder = tmp_path_factory.mktemp("chunks")
    chunks = write_chunks(folder, documents, layout, cuts, sorted_from=sorted_from, block=block)
    sizes_G = sum(np.diff(chunk.starts(0, layout.vocab_size)) for chunk in chunks)
    range_cuts = plan_cuts(chunks, layout, sizes_G, first_token=0, budget=budget)
    expected = brute_force(documents, max_n=layout.max_n, min_count=min_count)
    assert count_all(chunks, layout, range_cuts, min_count) == expected


def test_one_hot_n_gram_is_cut_into_ranges_within_the_budget(tmp_path: Path) -> None:
    """One bigram at most positions must not make one huge task (ray-project/ray#45303, #58603)."""
    rng = np.random.default_rng(0)
    documents = [
        [1, 2, *([1, 2] * int(rng.integers(0, 3))), *rng.integers(3, 50, 2).tolist()]
        for _ in range(5000)
    ]
    documents += [[7] * 3000]
    layout, budget = Layout(5, 50), 2000
    chunks = write_chunks(tmp_path, documents, layout, [9000, 18_000], sorted_from=100, block=0)
    sizes_G = sum(np.diff(chunk.starts(0, 50)) for chunk in chunks)
    assert sizes_G.max() > 4 * budget
    cuts = plan_cuts(chunks, layout, sizes_G, first_token=0, budget=budget)
    assert max(cut.depth for cut in cuts) == 6
    for lower, upper in zip(cuts[:-1], cuts[1:], strict=True):
        assert len(gather_range(chunks, layout, lower, upper)[0].records.low_R) <= 1.25 * budget
    assert count_all(chunks, layout, cuts, 2) == brute_force(documents, max_n=5, min_count=2)


def test_sorted_compressed_chunks_take_less_than_half_the_bytes(tmp_path: Path) -> None:
    """4 bytes per record of English."""
    rng = np.random.default_rng(0)
    documents = [(200 ** rng.random(50_000)).astype(int).tolist()]
    raw, compressed = (
        write_chunks(tmp_path, documents, Layout(5, 200), [], sorted_from=2, block=block)[0].path
        for block in (0, 1 << 12)
    )
    assert raw == compressed
    assert Path(compressed).stat().st_size < 0.5 * 8 * 50_000 + 201 * 8


def test_a_truncated_or_missing_chunk_is_an_error(tmp_path: Path) -> None:
    (chunk,) = write_chunks(tmp_path, [[1, 2, 1, 2]], Layout(5, 4), [], sorted_from=2, block=0)
    path = Path(chunk.path)
    path.write_bytes(path.read_bytes()[:-8])
    whole_order = Cut(token=0), Cut(token=4)
    with pytest.raises(ArtifactError, match="truncated"):
        gather_range([Chunk(chunk.path)], Layout(5, 4), *whole_order)
    with pytest.raises(ArtifactError, match="is gone"):
        gather_range([Chunk(str(tmp_path / "1.records"))], Layout(5, 4), *whole_order)
