"""tokens/v1 -> the source of every document, and the bytes of its text.

Shapes: A documents, J sources, C the four sums of a score, V vocabulary; of a shard, L tokens.
"""

import re
from typing import NamedTuple

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.shards import map_shard
from scone_core.corpus.documents import file_number
from scone_core.corpus.token_stream import TokenStream
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.sums import DocumentSums


class DocumentSources(NamedTuple):
    """Which source each document of a tokens/v1 artifact is from, and how much text it was."""

    names: tuple[str, ...]
    source_A: np.ndarray
    """int64, an index into `names`."""
    bytes_A: np.ndarray
    """float64, UTF-8 bytes. They are exact for byte-level BPE; for other tokenizers they are in
    proportion to the tokens' own texts, and add up to the number in the manifest."""

    def add_up(self, sums: DocumentSums) -> np.ndarray:
        """float64 [J, C]: the sums of the documents of every source."""
        source_A = self.source_A[sums.document_A]
        columns = [np.bincount(source_A, column, len(self.names)) for column in sums[1:]]
        return np.stack(columns, axis=1)


def read_sources(folder: str) -> DocumentSources:
    """The sources of the documents in `folder`: a document id tells its input file, and the
    manifest names the files.
    """
    stream = TokenStream.open(folder)
    manifest = stream.manifest
    local = storage.local_copy(storage.join(folder, "tokenizer.json"))
    bytes_V = Tokenizer(local).bytes_of_tokens()
    file_A, bytes_A = [], []
    for shard, (tokens_L, offsets_A1) in zip(manifest.shards, stream.shards, strict=True):
        doc_id_A = map_shard(folder, shard).column("doc_id").to_numpy()
        file_A.append(file_number(doc_id_A).astype(np.int64))
        ends_L = np.cumsum(np.concatenate([[0], bytes_V[tokens_L]]))
        bytes_A.append(np.diff(ends_L[offsets_A1]).astype(np.float64))
    total_A = np.concatenate(bytes_A)
    files = sorted(name for name in manifest.inputs if name != "tokenizer")
    names, source_of_file = np.unique([source_name(name) for name in files], return_inverse=True)
    return DocumentSources(
        tuple(map(str, names)),
        source_of_file[np.concatenate(file_A)],
        total_A * (manifest.num_bytes_text / max(total_A.sum(), 1)),
    )


def source_name(file: str) -> str:
    """The source that an input file belongs to: the folder below the input that holds it, else the
    file itself without its suffixes and without a shard number like `-00003-of-00008`.
    """
    folder, _, inner = file.partition("/")
    return folder if inner else re.sub(r"([-._]\d+-of-\d+)?\.\w+(\.gz|\.zst)?$", "", file)
