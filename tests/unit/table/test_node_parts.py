"""Laws of a table on many nodes: every row once from its owner, in the order that was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone_core.artifacts.manifests import EmbeddingsManifest, load_manifest
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.node_parts import TableParts
from tests.builders.tables import publish_vectors, random_vectors

NUM_ROWS = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of six shards."""
    vectors_SD = random_vectors(NUM_ROWS, 24)
    path = tmp_path_factory.mktemp("table")
    return publish_vectors(path, vectors_SD, row_format="bf16", rows_per_shard=128)


@given(
    ids=st.lists(st.integers(0, NUM_ROWS - 1), max_size=60),
    num_owners=st.integers(1, 9),
)
def test_rows_of_all_owners_are_those_of_the_whole_table(
    folder: str, ids: list[int], num_owners: int
) -> None:
    ids_M = np.array(ids, np.int64)
    parts = TableParts(load_manifest(EmbeddingsManifest, folder), num_owners)
    plan = parts.plan(ids_M)
    owned = [EmbeddingTable.open(folder, shards=shards) for shards in parts.shards]
    rows_by_owner = {}
    for owner, ids_U in plan.ids_by_owner.items():
        rows_by_owner[owner] = owned[owner].empty(len(ids_U))
        owned[owner].gather(ids_U, rows_by_owner[owner])
    expected_MD = EmbeddingTable.open(folder).empty(len(ids))
    EmbeddingTable.open(folder).gather(ids_M, expected_MD)
    assert np.array_equal(plan.in_order(rows_by_owner), expected_MD)
    asked = np.concatenate(list(plan.ids_by_owner.values()))
    assert sorted(asked.tolist()) == sorted(set(ids))


@pytest.mark.parametrize("num_owners", [1, 2, 3, 6, 100])
def test_every_shard_has_one_owner_and_no_owner_is_without(folder: str, num_owners: int) -> None:
    parts = TableParts(load_manifest(EmbeddingsManifest, folder), num_owners)
    assert [number for shards in parts.shards for number in shards] == list(range(6))
    assert len(parts.shards) == min(num_owners, 6)
    assert max(map(len, parts.shards)) - min(map(len, parts.shards)) <= 1


@pytest.mark.parametrize("bad", [-1, NUM_ROWS])
def test_an_id_without_a_row_is_refused(folder: str, bad: int) -> None:
    parts = TableParts(load_manifest(EmbeddingsManifest, folder), 2)
    with pytest.raises(ValueError, match=f"f-gram id {bad} has no row"):
        parts.plan(np.array([3, bad, 5]))


def test_an_owner_has_no_rows_of_others(folder: str) -> None:
    table = EmbeddingTable.open(folder, shards=range(1, 3))
    assert (table.ids.start, table.ids.stop) == (128, 384)
    for bad in (127, 384):
        with pytest.raises(ValueError, match=f"f-gram id {bad} has no row: .* ids 128..383"):
            table.vectors(np.array([200, bad]))
