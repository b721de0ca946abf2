"""f-gram ids -> rows of the table in host memory: read from a map, or asked of lookup actors.

All read the same mapped shards, so rows are bit-equal. An actor of the node lets engines that may
not map the table (another container, another owner of the memory) share one copy per node; actors
of all nodes, each with a part of the shards, hold a table that is too large for any of them.
"""

import logging
import os
from typing import Any, Literal

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scone_core.serving.served_folder import SconeSection
from scone_core.table.embedding_table import put_tensor
from scone_core.table.lookup_statistics import LookupReport
from scone_core.table.node_parts import LookupPlan, TableParts
from scone_core.table.row_formats import as_tensor
from scone_core.table.row_lookup import RowSource
from scone_core.table.tiers import ALL_MAPPED, Tiers

Placement = Literal["local", "actor", "nodes"]

NAMESPACE = "scone"


def open_row_source(
    section: SconeSection, placement: Placement, tiers: Tiers = ALL_MAPPED
) -> RowSource:
    """The rows of `section`'s table: `local` maps the table in this process, `actor` asks the
    lookup actor of this node, `nodes` asks the actors of all nodes.

    Raises:
        ArtifactError: the table is missing, damaged, or another than the model was exported with.
        ValueError: `tiers` cannot be had on this machine, or there is no Ray cluster to ask.
    """
    sources = {"local": SconeSection.open_table, "actor": ActorRows, "nodes": NodesRows}
    return sources[placement](section, tiers)


class TableServer:
    """The body of a lookup actor: a mapped table or a part of it, gathers outside the GIL."""

    def __init__(self, section: SconeSection, tiers: Tiers, shards: range | None = None) -> None:
        self._table = section.open_table(tiers, shards)

    def rows(self, ids_M: np.ndarray) -> np.ndarray:
        rows_MD = self._table.empty(len(ids_M))
        self._table.gather(ids_M, rows_MD)
        return rows_MD

    def report(self) -> LookupReport:
        """What the engines of this node have looked up."""
        return self._table.statistics.report()


class ActorRows:
    """Asks the lookup actor of this node, one message per call.

    The engine that comes first starts the actor and owns it. When that engine ends, the actor ends
    with it, and whoever asks next starts another: nothing is left behind on a node without engines.
    """

    def __init__(self, section: SconeSection, tiers: Tiers = ALL_MAPPED) -> None:
        _join_cluster()
        self._section, self._tiers = section, tiers
        section.open_table()  # a damaged table is refused here and not by an actor that dies
        self._actor = node_actor(section, tiers)

    def put_rows(self, ids_M: np.ndarray, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
        """As `RowSource.put_rows`."""
        put_tensor(self.rows(ids_M), places_M, inputs_TD)

    def rows(self, ids_M: np.ndarray) -> torch.Tensor:
        """The rows [M, D] in the dtype that the table gives."""
        try:
            rows_MD = ray.get(self._actor.rows.remote(ids_M))
        except RayActorError:
            self._actor = node_actor(self._section, self._tiers)
            rows_MD = ray.get(self._actor.rows.remote(ids_M))
        return as_tensor(rows_MD.copy())  # objects of Ray are read-only


class NodesRows:
    """Asks the lookup actors of all nodes, each of which owns a range of shards: one message per
    owner and call, for each row once.
    """

    def __init__(
        self, section: SconeSection, tiers: Tiers = ALL_MAPPED, num_owners: int | None = None
    ) -> None:
        """`num_owners`: by default as many as the cluster has nodes when the first engine comes."""
        _join_cluster()
        self._section, self._tiers = section, tiers
        manifest = section.table_manifest()
        self._parts = TableParts(manifest, num_owners or len(_alive_nodes()))
        self._owners = [self._owner(number) for number in range(len(self._parts.shards))]

    def put_rows(self, ids_M: np.ndarray, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
        """As `RowSource.put_rows`."""
        put_tensor(self.rows(ids_M), places_M, inputs_TD)

    def rows(self, ids_M: np.ndarray) -> torch.Tensor:
        """The rows [M, D] in the dtype that the table gives."""
        plan = self._parts.plan(ids_M)
        asked = {
            owner: self._owners[owner].rows.remote(ids) for owner, ids in plan.ids_by_owner.items()
        }
        return as_tensor(
            plan.in_order({owner: self._wait(plan, owner, ref) for owner, ref in asked.items()})
        )

    def _wait(self, plan: LookupPlan, owner: int, answer: ray.ObjectRef) -> np.ndarray:
        """The rows of one owner; another one takes its place if it has died."""
        try:
            return ray.get(answer)
        except RayActorError:
            self._owners[owner] = self._owner(owner)
            return ray.get(self._owners[owner].rows.remote(plan.ids_by_owner[owner]))

    def _owner(self, number: int) -> Any:
        nodes, parts = _alive_nodes(), self._parts.shards
        name = f"part {number + 1} of {len(parts)}"
        node_id = nodes[number % len(nodes)]
        return _table_actor(self._section, self._tiers, name, node_id, parts[number])


def node_actor(section: SconeSection, tiers: Tiers = ALL_MAPPED) -> Any:
    """The lookup actor of this node for this table, started with `tiers` if there is none."""
    node_id = ray.get_runtime_context().get_node_id()
    return _table_actor(section, tiers, f"on {node_id}", node_id)


def _table_actor(
    section: SconeSection, tiers: Tiers, name: str, node_id: str, shards: range | None = None
) -> Any:
    """The lookup actor of that name, which every engine finds; started if there is none."""
    return (
        ray.remote(TableServer)
        .options(
            name=f"lookup {section.table_fingerprint[:16]} {name}",
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(section, tiers, shards)
    )


def _alive_nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _join_cluster() -> None:
    """vLLM's engine is a process of its own; the plugin hands it the address of the cluster.

    Raises:
        ValueError: there is no cluster to join.
    """
    if ray.is_initialized():
        return
    if "RAY_ADDRESS" not in os.environ:
        raise ValueError(
            "placement='actor' needs a Ray cluster: set RAY_ADDRESS or use placement='local'"
        )
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
