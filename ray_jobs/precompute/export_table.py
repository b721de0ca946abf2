"""embeddings/v1 -> LMDB, safetensors or .npy: write a table for other programs."""

import json

from ray_jobs.precompute.config import ExportConfig
from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import export_lmdb, export_npy, export_safetensors


def run(config: ExportConfig) -> list[str]:
    """Write `config.table` as `config.to`; the names of the files.

    Raises:
        ArtifactError: `out` is not empty, or an input is missing, damaged or not the table's.
        ValueError: lmdb without `fgrams`, or without the package.
    """
    if not storage.is_empty_folder(config.out):
        raise ArtifactError(f"out={config.out!r} is not empty; choose another folder")
    table = EmbeddingTable.open(config.table)
    match config.to:
        case "safetensors":
            names = export_safetensors(table, config.out)
        case "npy":
            names = export_npy(table, config.out)
        case "lmdb":
            if config.fgrams is None:
                raise ValueError("fgrams: the keys of lmdb are n-grams; name the fgrams/v1 folder")
            names = export_lmdb(table, config.fgrams, config.out)
    fields = {"fingerprint", "row_format", "num_rows", "width"}
    content = table.manifest.model_dump(include=fields) | {"files": names}
    storage.write_bytes(storage.join(config.out, "export.json"), json.dumps(content).encode())
    print(f"{config.out}: {', '.join(names)}")
    return names
