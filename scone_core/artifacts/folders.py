"""The folder of an artifact: claimed, filled unit by unit, published by its manifest."""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from scone_core.artifacts import storage
from scone_core.artifacts.config import StageConfig, fingerprint
from scone_core.artifacts.manifests import (
    MANIFEST,
    PLAN,
    AnyManifest,
    ArtifactError,
    Manifest,
    _read_json,
    load_manifest,
)

RECEIPTS = "_receipts"


def claim(
    kind: type[AnyManifest], folder: str, config: StageConfig, inputs: Mapping[str, str]
) -> AnyManifest | None:
    """Claim `folder` as the output of `config`; the finished manifest when there is nothing left to
    do.

    An unfinished folder of the same configuration is resumed: its receipts are kept. Nothing that
    exists is changed
    before every check has passed.

    Raises:
        ArtifactError: `folder` belongs to another configuration (the differing fields are named) or
        holds files
            that no stage wrote.
        OSError: `folder` cannot be written.
    """
    plan = {"contract": kind.CONTRACT, "config": config.semantic_fields(), "inputs": dict(inputs)}
    if storage.exists(storage.join(folder, MANIFEST)):
        _refuse_other_plan(folder, _read_json(storage.join(folder, MANIFEST)), plan)
        return load_manifest(kind, folder)
    if storage.exists(storage.join(folder, PLAN)):
        if not storage.is_empty_folder(storage.join(folder, RECEIPTS)):
            _refuse_other_plan(folder, _read_json(storage.join(folder, PLAN)), plan)
    elif not storage.is_empty_folder(folder):
        raise ArtifactError(
            f"out={folder!r} is not empty and was not written by this stage; choose another folder"
        )
    storage.write_bytes(storage.join(folder, PLAN), _to_json(plan))
    return None


def publish(folder: str, manifest: AnyManifest) -> AnyManifest:
    """Write the manifest, last; then drop the receipts and the plan, which it replaces. What killed
    attempts left half written is dropped before.
    """
    storage.remove_abandoned(folder)
    storage.write_bytes(storage.join(folder, MANIFEST), _to_json(manifest.model_dump(mode="json")))
    storage.remove_folder(storage.join(folder, RECEIPTS))
    storage.remove(storage.join(folder, PLAN))
    return manifest


class SharedFields(TypedDict):
    """The fields that all manifests share."""

    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]


def shared_fields(
    kind: type[Manifest], config: StageConfig, inputs: Mapping[str, str]
) -> SharedFields:
    """The fields that every manifest shares, for `kind(**shared_fields(...), ...)`."""
    fields = config.semantic_fields()
    return {
        "fingerprint": fingerprint(kind.CONTRACT, fields, dict(inputs)),
        "config": fields,
        "inputs": dict(inputs),
    }


def write_receipt(folder: str, name: str, content: Mapping[str, Any]) -> None:
    """Record that the unit of work `name` is finished; `content` is what the manifest needs to know
    of it.
    """
    storage.write_bytes(storage.join(folder, RECEIPTS, f"{name}.json"), _to_json(content))


def read_receipt(folder: str, name: str) -> dict[str, Any] | None:
    """The receipt of the unit of work `name`; None when it has not finished."""
    path = storage.join(folder, RECEIPTS, f"{name}.json")
    return _read_json(path) if storage.exists(path) else None


def remove_receipt(folder: str, name: str) -> None:
    """Forget that the unit of work `name` is finished."""
    storage.remove(storage.join(folder, RECEIPTS, f"{name}.json"))


def _refuse_other_plan(folder: str, existing: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    if existing.get("contract") != plan["contract"]:
        raise ArtifactError(
            f"out={folder!r} holds {existing.get('contract')!r}; choose another folder"
        )
    changes = [
        f"{name}: {existing[part].get(name)!r} there, {plan[part].get(name)!r} here"
        for part in ("config", "inputs")
        for name in sorted(existing[part].keys() | plan[part].keys())
        if existing[part].get(name) != plan[part].get(name)
    ]
    if changes:
        raise ArtifactError(
            f"out={folder!r} belongs to another configuration ({'; '.join(changes)}); "
            "choose another folder or use that configuration"
        )


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
