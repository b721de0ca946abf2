"""What a served model is: a Hugging Face folder whose config.json has a `scone` section.

The section names the f-gram set and the table that the main model was trained with, and their
fingerprints: without them, or with others, the weights in the folder are not the trained model.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import (
    ArtifactError,
    EmbeddingsManifest,
    FGramsManifest,
    Manifest,
    load_manifest,
    require_equal,
)
from scone_core.fgrams.index import FGramIndex
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.tiers import ALL_MAPPED, Tiers

ARCHITECTURE_PREFIX = "Scone"
"""`LlamaForCausalLM` with f-grams is `SconeLlamaForCausalLM`."""


class ServedManifest(Manifest):
    """served/v1: a Hugging Face folder that vLLM and transformers load; shards are its files."""

    CONTRACT: ClassVar[str] = "served/v1"
    contract: Literal["served/v1"] = "served/v1"
    checkpoint_fingerprint: str
    table_fingerprint: str | None
    """None for a plain baseline."""


class SconeSection(Frozen):
    """The `scone` entry of config.json."""

    fgrams: str
    """Folder or URI of the fgrams/v1 artifact."""
    table: str
    """Folder or URI of the embeddings/v1 artifact."""
    fgrams_fingerprint: str
    table_fingerprint: str
    tokenizer_sha256: str
    max_n: int

    @classmethod
    def of(cls, fgrams: str, table: str, *, checkpoint_fingerprint: str) -> "SconeSection":
        """The section for a checkpoint.

        Raises:
            ArtifactError: the table was not precomputed from this checkpoint and these f-grams.
        """
        fgrams_manifest = load_manifest(FGramsManifest, fgrams)
        table_manifest = load_manifest(EmbeddingsManifest, table)
        remedy = "run the precompute stage for this checkpoint and these f-grams"
        for field, found, expected in (
            ("checkpoint", table_manifest.checkpoint_fingerprint, checkpoint_fingerprint),
            ("fgrams", table_manifest.fgrams_fingerprint, fgrams_manifest.fingerprint),
        ):
            require_equal(f"table={table!r}: {field}", found, expected, remedy)
        return cls(
            fgrams=fgrams,
            table=table,
            fgrams_fingerprint=fgrams_manifest.fingerprint,
            table_fingerprint=table_manifest.fingerprint,
            tokenizer_sha256=fgrams_manifest.tokenizer_sha256,
            max_n=fgrams_manifest.max_n,
        )

    @classmethod
    def parse(cls, section: dict[str, Any], *, folder: str) -> "SconeSection":
        """The section of the config.json in `folder`.

        Raises:
            ArtifactError: fields are missing or unknown.
        """
        try:
            return cls.model_validate(section)
        except ValidationError as error:
            raise ArtifactError(
                f"{folder}/config.json: not a valid `scone` section: {error}"
            ) from error

    def require_tokenizer(self, path: str | Path) -> None:
        """Refuse a tokenizer.json other than the one whose ids the f-grams consist of."""
        require_equal(
            f"{path}: sha256",
            storage.sha256_of(str(path)),
            self.tokenizer_sha256,
            "serve with the tokenizer.json that was exported with the model",
        )

    def open_index(self) -> FGramIndex:
        """The matcher.

        Raises:
            ArtifactError: missing, damaged, or another f-gram set than the model was trained with.
        """
        manifest = load_manifest(FGramsManifest, self.fgrams)
        self._require(self.fgrams, manifest, fingerprint=self.fgrams_fingerprint)
        return FGramIndex.map(self.fgrams, manifest)

    def open_table(self, tiers: Tiers = ALL_MAPPED, shards: range | None = None) -> EmbeddingTable:
        """The rows (of some of the shards), which live where `tiers` says.

        Raises:
            ArtifactError: missing, damaged, or another table than the model was exported with.
            ValueError: `tiers` cannot be had on this machine.
        """
        self.table_manifest()
        return EmbeddingTable.open(self.table, tiers=tiers, shards=shards)

    def table_manifest(self) -> EmbeddingsManifest:
        """What the table is, its shards unopened.

        Raises:
            ArtifactError: missing, or another table than the model was exported with.
        """
        manifest = load_manifest(EmbeddingsManifest, self.table)
        self._require(self.table, manifest, fingerprint=self.table_fingerprint)
        return manifest

    def _require(
        self, folder: str, manifest: FGramsManifest | EmbeddingsManifest, *, fingerprint: str
    ) -> None:
        expected = {
            "fingerprint": fingerprint,
            "tokenizer_sha256": self.tokenizer_sha256,
            "max_n": self.max_n,
        }
        for field, value in expected.items():
            found = getattr(manifest, field)
            require_equal(f"{folder}: {field}", found, value, "export the model again")


def served_config(main_config: dict[str, Any], section: SconeSection | None) -> dict[str, Any]:
    """The config.json of a served folder from the one of the main model."""
    if section is None:
        return main_config
    (base,) = main_config["architectures"]
    architectures = [f"{ARCHITECTURE_PREFIX}{base}"]
    return {**main_config, "architectures": architectures, "scone": section.model_dump()}


def read_section(folder: str) -> SconeSection | None:
    """The `scone` section of a served folder, checked against its tokenizer; None for a plain one.

    Raises:
        ArtifactError: no such folder, a damaged section, or another tokenizer.
    """
    path = storage.join(folder, "config.json")
    if not storage.exists(path):
        raise ArtifactError(f"{path}: missing; write the folder with pipelines/export.py")
    config = json.loads(storage.read_bytes(path))
    if "scone" not in config:
        return None
    section = SconeSection.parse(config["scone"], folder=folder)
    section.require_tokenizer(storage.join(folder, "tokenizer.json"))
    return section
