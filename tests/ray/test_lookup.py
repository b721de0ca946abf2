"""Laws of the lookup: where rows come from is invisible in them."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from ray_jobs.serve.lookup import ActorRows, NodesRows, Placement, node_actor, open_row_source
from scone_core.artifacts.manifests import RowFormat
from scone_core.serving.served_folder import SconeSection
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.tiers import Tiers
from tests.builders.served_models import publish_fgrams, publish_table, random_fgrams


def make_section(folder: Path, rows: RowFormat) -> SconeSection:
    grams = random_fgrams(per_length=1000)
    fgrams = publish_fgrams(str(folder / "fgrams"), grams)
    publish_table(str(folder / "table"), torch.randn(len(grams), 2048), fgrams, row_format=rows)
    return SconeSection.of(
        str(folder / "fgrams"), str(folder / "table"), checkpoint_fingerprint="random"
    )


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> SconeSection:
    return make_section(tmp_path_factory.mktemp("lookup"), "bf16")


@pytest.mark.parametrize("num_ids", [1, 7, 4096])
def test_both_placements_give_bit_equal_rows(section: SconeSection, num_ids: int) -> None:
    ids_M = np.random.default_rng(num_ids).integers(0, 3000, num_ids)
    local, actor = open_row_source(section, "local"), open_row_source(section, "actor")
    assert isinstance(local, EmbeddingTable)
    assert isinstance(actor, ActorRows)
    rows_MD, asked_MD = local.vectors(ids_M), actor.rows(ids_M)
    assert rows_MD.dtype == asked_MD.dtype == torch.bfloat16
    assert torch.equal(rows_MD.view(torch.int16), asked_MD.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", ["local", "actor", "nodes"])
def test_rows_are_put_where_they_belong_and_nowhere_else(
    section: SconeSection, placement: Placement, dtype: torch.dtype
) -> None:
    inputs_TD = torch.full((7, 2048), 3.0, dtype=dtype)
    expected_TD = inputs_TD.clone()
    expected_TD[[5, 1]] = section.open_table().vectors(np.array([20, 2900])).to(dtype)
    source = open_row_source(section, placement)
    source.put_rows(np.array([20, 2900]), np.array([5, 1]), inputs_TD)
    assert torch.equal(inputs_TD, expected_TD)


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_quantised_and_cold_rows_arrive_as_vectors(tmp_path: Path, rows: RowFormat) -> None:
    section, ids_M = make_section(tmp_path, rows), np.arange(0, 3000, 7)
    tiers = Tiers(hot_rows=500, cold_from=1500, io="mmap")
    actor = ActorRows(section, tiers)  # which ends with this object, its first user
    rows_MD, asked_MD = section.open_table().vectors(ids_M), actor.rows(ids_M)
    assert rows_MD.dtype == asked_MD.dtype == torch.bfloat16
    assert torch.equal(rows_MD.view(torch.int16), asked_MD.view(torch.int16))
    report = ray.get(node_actor(section).report.remote())
    assert (report.num_rows, report.num_cold) == (len(ids_M), (ids_M >= 1500).sum())


def test_all_engines_of_a_node_ask_one_actor(section: SconeSection) -> None:
    ActorRows(section), ActorRows(section)
    first, second = node_actor(section), node_actor(section)
    assert first._actor_id == second._actor_id


def test_a_lookup_outlives_the_actor_it_asks(section: SconeSection) -> None:
    lookup = ActorRows(section)
    before = lookup.rows(np.arange(10))
    ray.kill(node_actor(section))
    assert torch.equal(lookup.rows(np.arange(10)).view(torch.int16), before.view(torch.int16))


def test_owners_of_parts_give_the_rows_of_the_whole(section: SconeSection) -> None:
    """Also after one of them has died."""
    lookup, local = NodesRows(section, num_owners=2), section.open_table()
    ids_M = np.random.default_rng(3).integers(0, 3000, 500)
    expected_MD = local.vectors(ids_M).view(torch.int16)
    assert torch.equal(lookup.rows(ids_M).view(torch.int16), expected_MD)
    ray.kill(ray.get_actor(f"lookup {section.table_fingerprint[:16]} part 2 of 2", "scone"))
    assert torch.equal(lookup.rows(ids_M).view(torch.int16), expected_MD)


def test_an_id_without_a_row_is_refused_by_all(section: SconeSection) -> None:
    ids_M, places_M = np.array([5, 4_000_000]), np.arange(2)
    for placement in ("local", "actor", "nodes"):
        inputs_TD = torch.zeros(2, 2048)
        with pytest.raises(ValueError, match="f-gram id 4000000 has no row"):
            open_row_source(section, placement).put_rows(ids_M, places_M, inputs_TD)
        assert not inputs_TD.any()
