"""f-gram ids -> rows of the table in host memory: mapped here, or asked of the node's lookup actor.

Both read the same mapped shards, so rows are bit-equal; the actor lets engines that may not map the
table (another container, another owner of the memory) share one copy per node.
"""

import logging
import os
from typing import Any, Literal, Protocol

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scone_core.lookup_statistics import LookupReport
from scone_core.row_formats import as_tensor
from scone_core.served_folder import SconeSection
from scone_core.tiers import ALL_MAPPED, Tiers

Placement = Literal["local", "actor"]

NAMESPACE = "scone"


class Lookup(Protocol):
    """Where an engine gets its rows."""

    def rows(self, ids_M: np.ndarray) -> torch.Tensor:
        """Rows [M, D] in the dtype that the table gives; valid until the next call."""
        ...


class LocalLookup:
    """Reads the node's mapped table in this process."""

    def __init__(self, section: SconeSection, tiers: Tiers = ALL_MAPPED) -> None:
        self._table = section.open_table(tiers)

    def rows(self, ids_M: np.ndarray) -> torch.Tensor:
        return self._table.vectors(ids_M)


class TableServer:
    """The body of a lookup actor: one mapped table, gathers outside the GIL."""

    def __init__(self, section: SconeSection, tiers: Tiers) -> None:
        self._table = section.open_table(tiers)

    def rows(self, ids_M: np.ndarray) -> np.ndarray:
        rows_MD = self._table.empty(len(ids_M))
        self._table.gather(ids_M, rows_MD)
        return rows_MD

    def report(self) -> LookupReport:
        """What the engines of this node have looked up."""
        return self._table.statistics.report()


class ActorLookup:
    """Asks the lookup actor of this node, one message per call.

    The engine that comes first starts the actor and owns it. When that engine ends, the actor ends
    with it, and whoever asks next starts another: nothing is left behind on a node without engines.
    """

    def __init__(self, section: SconeSection, tiers: Tiers = ALL_MAPPED) -> None:
        _join_cluster()
        self._section, self._tiers = section, tiers
        section.open_table()  # a damaged table is refused here and not by an actor that dies
        self._actor = node_actor(section, tiers)

    def rows(self, ids_M: np.ndarray) -> torch.Tensor:
        try:
            rows_MD = ray.get(self._actor.rows.remote(ids_M))
        except RayActorError:
            self._actor = node_actor(self._section, self._tiers)
            rows_MD = ray.get(self._actor.rows.remote(ids_M))
        return as_tensor(rows_MD.copy())  # objects of Ray are read-only


def open_lookup(
    section: SconeSection,
    placement: Placement,
    tiers: Tiers = ALL_MAPPED,
) -> Lookup:
    """The rows of `section`'s table, from where `placement` says."""
    return LocalLookup(section, tiers) if placement == "local" else ActorLookup(section, tiers)


def node_actor(section: SconeSection, tiers: Tiers = ALL_MAPPED) -> Any:
    """The lookup actor of this node for this table, started with `tiers` if there is none."""
    node_id = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(TableServer)
        .options(
            name=f"lookup {section.table_fingerprint[:16]} on {node_id}",
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(section, tiers)
    )


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
