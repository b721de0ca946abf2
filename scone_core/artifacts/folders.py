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
    load_manifest,
    read_json,
)

RECEIPTS = "_receipts"
"""The folder, inside that of an unfinished artifact, of its units' receipts (see `units`)."""


class SharedFields(TypedDict):
    """The fields that all manifests share."""

    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]


def claim(
    kind: type[AnyManifest], folder: str, config: StageConfig, inputs: Mapping[str, str]
) -> AnyManifest | None:
    """Claim `folder` as the output of `config`.

    An unfinished folder of the same configuration is resumed: its receipts are kept. Nothing that
    exists is changed before every check has passed.

    Returns:
        The manifest of the finished artifact; None when there is work to do.

    Raises:
        ArtifactError: `folder` belongs to another configuration (the differing fields are named),
            or holds files that no stage wrote.
        OSError: `folder` cannot be written.
    """
    plan = {"contract": kind.CONTRACT, "config": config.semantic_fields(), "inputs": dict(inputs)}
    if storage.exists(storage.join(folder, MANIFEST)):
        _refuse_other_plan(folder, read_json(storage.join(folder, MANIFEST)), plan)
        return load_manifest(kind, folder)
    if storage.exists(storage.join(folder, PLAN)):
        if not storage.is_empty_folder(storage.join(folder, RECEIPTS)):
            _refuse_other_plan(folder, read_json(storage.join(folder, PLAN)), plan)
    elif not storage.is_empty_folder(folder):
        raise ArtifactError(
            f"out={folder!r} is not empty and was not written by this stage; choose another folder"
        )
    storage.write_bytes(storage.join(folder, PLAN), _to_json(plan))
    return None


def publish(folder: str, manifest: AnyManifest) -> AnyManifest:
    """Finish the artifact in `folder`: drop what killed attempts left half written, write the
    manifest, then drop the receipts and the plan, which the manifest replaces.
    """
    storage.remove_abandoned(folder)
    storage.write_bytes(storage.join(folder, MANIFEST), _to_json(manifest.model_dump(mode="json")))
    storage.remove_folder(storage.join(folder, RECEIPTS))
    storage.remove(storage.join(folder, PLAN))
    return manifest


def shared_fields(
    kind: type[Manifest], config: StageConfig, inputs: Mapping[str, str]
) -> SharedFields:
    """The fields that all manifests share, for `kind(**shared_fields(...), ...)`."""
    fields = config.semantic_fields()
    return {
        "fingerprint": fingerprint(kind.CONTRACT, fields, dict(inputs)),
        "config": fields,
        "inputs": dict(inputs),
    }


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
