"""The trained model -> the files of a checkpoint/v1 artifact."""

import shutil
import tempfile
from pathlib import Path

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.tally import Report
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import FGramsManifest, Shard, load_manifest
from scone_core.artifacts.units import write_receipt
from scone_core.model.scone_lm import MAIN, SconeLM

EXPORT = "export"
"""The name of the receipt of the exported model."""


class ExportReceipt(Frozen):
    """The model is exported."""

    shards: tuple[Shard, ...]
    """Its files."""
    reports: list[Report]
    """All reports of the training: a kill may have lost some on their way to the driver."""


def export(model: SconeLM, config: TrainConfig, reports: list[Report]) -> None:
    """Publish the model's folders file by file, with the tokenizer in `main_model/`."""
    fgrams = load_manifest(FGramsManifest, config.fgrams) if config.fgrams else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save(folder, fgrams=fgrams)
        tokenizer = storage.join(config.train_tokens, "tokenizer.json")
        (folder / MAIN / "tokenizer.json").write_bytes(storage.read_bytes(tokenizer))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        shards = tuple(_publish_file(config.out, folder, path) for path in files)
    write_receipt(config.out, EXPORT, ExportReceipt(shards=shards, reports=reports))


def _publish_file(out: str, folder: Path, path: Path) -> Shard:
    name = str(path.relative_to(folder))
    num_bytes, sha256 = storage.write_atomic(
        storage.join(out, name), lambda target: shutil.copyfile(path, target)
    )
    return Shard(name=name, num_rows=0, num_bytes=num_bytes, sha256=sha256)
