"""Laws of the lookup: where rows come from is invisible in them."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from ray_jobs.serve.lookup import ActorLookup, LocalLookup, NodesLookup, node_actor, open_lookup
from scone_core.artifacts.manifests import RowFormat
from scone_core.serving.served_folder import SconeSection
from scone_core.table.tiers import Tiers
from tests.builders.served_models import publish_fgrams, publish_table, random_fgrams


def make_section(folder: Path, rows: RowFormat) -> SconeSection:
    grams = random_fgrams(per_length=1000)
    fgrams = publish_fgrams(str(folder / "fgrams"), grams)
    publish_table(str(folder / "table"), torch.randn(len(grams), 2048), fgrams, rows=rows)
    return SconeSection.of(
        str(folder / "fgrams"), str(folder / "table"), checkpoint_fingerprint="random"
    )


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> SconeSection:
    return make_section(tmp_path_factory.mktemp("lookup"), "bf16")


@pytest.mark.parametrize("num_ids", [1, 7, 4096])
def test_both_placements_give_bit_equal_rows(section: SconeSection, num_ids: int) -> None:
    ids_M = np.random.default_rng(num_ids).integers(0, 3000, num_ids)
    local, actor = open_lookup(section, "local"), open_lookup(section, "actor")
    assert isinstance(local, LocalLookup)
    assert isinstance(actor, ActorLookup)
    rows_MD, asked_MD = local.rows(ids_M), actor.rows(ids_M)
    assert rows_MD.dtype == asked_MD.dtype == torch.bfloat16
    assert torch.equal(rows_MD.view(torch.int16), asked_MD.view(torch.int16))


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_quantised_and_cold_rows_arrive_as_vectors(tmp_path: Path, rows: RowFormat) -> None:
    section, ids_M = make_section(tmp_path, rows), np.arange(0, 3000, 7)
    tiers = Tiers(hot_rows=500, cold_from=1500, io="mmap")
    local, actor = open_lookup(section, "local"), open_lookup(section, "actor", tiers)
    rows_MD, asked_MD = local.rows(ids_M), actor.rows(ids_M)
    assert rows_MD.dtype == asked_MD.dtype == torch.bfloat16
    assert torch.equal(rows_MD.view(torch.int16), asked_MD.view(torch.int16))
    report = ray.get(node_actor(section).report.remote())
    assert (report.num_rows, report.num_cold) == (len(ids_M), (ids_M >= 1500).sum())


def test_all_engines_of_a_node_ask_one_actor(section: SconeSection) -> None:
    ActorLookup(section), ActorLookup(section)
    first, second = node_actor(section), node_actor(section)
    assert first._actor_id == second._actor_id


def test_a_lookup_outlives_the_actor_it_asks(section: SconeSection) -> None:
    lookup = ActorLookup(section)
    before = lookup.rows(np.arange(10))
    ray.kill(node_actor(section))
    assert torch.equal(lookup.rows(np.arange(10)).view(torch.int16), before.view(torch.int16))


def test_owners_of_parts_give_the_rows_of_the_whole(section: SconeSection) -> None:
    """Also after one of them has died."""
    lookup, local = NodesLookup(section, num_owners=2), LocalLookup(section)
    ids_M = np.random.default_rng(3).integers(0, 3000, 500)
    expected_MD = local.rows(ids_M).view(torch.int16)
    assert torch.equal(lookup.rows(ids_M).view(torch.int16), expected_MD)
    ray.kill(ray.get_actor(f"lookup {section.table_fingerprint[:16]} part 2 of 2", "scone"))
    assert torch.equal(lookup.rows(ids_M).view(torch.int16), expected_MD)


def test_an_id_without_a_row_is_refused_by_all(section: SconeSection) -> None:
    for placement in ("local", "actor", "nodes"):
        with pytest.raises(ValueError, match="f-gram id 4000000 has no row"):
            open_lookup(section, placement).rows(np.array([4_000_000]))
