"""Where each document of a corpus comes from."""

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
    source_N: np.ndarray
    """int64, an index into `names`."""
    bytes_N: np.ndarray
    """float64, UTF-8 bytes. Exact for byte-level BPE; else in proportion to the tokens' own texts,
    so that the sum is the one in the manifest."""

    def add_up(self, sums: DocumentSums) -> np.ndarray:
        """float64 [S, C]: the sums of the documents of every source."""
        source_N = self.source_N[sums.document_N]
        columns = [np.bincount(source_N, column, len(self.names)) for column in sums[1:]]
        return np.stack(columns, axis=1)


def read_sources(folder: str) -> DocumentSources:
    """The sources of the documents in `folder`: a document id tells its input file, and the
    manifest names the files.
    """
    stream = TokenStream.open(folder)
    manifest = stream.manifest
    local = storage.local_copy(storage.join(folder, "tokenizer.json"))
    bytes_V = Tokenizer(local).bytes_of_tokens()
    file_N, bytes_N = [], []
    for shard, (tokens_L, offsets_D1) in zip(manifest.shards, stream.shards, strict=True):
        doc_id_N = map_shard(folder, shard).column("doc_id").to_numpy()
        file_N.append(file_number(doc_id_N).astype(np.int64))
        ends_L = np.cumsum(np.concatenate([[0], bytes_V[tokens_L]]))
        bytes_N.append(np.diff(ends_L[offsets_D1]).astype(np.float64))
    total_N = np.concatenate(bytes_N)
    files = sorted(name for name in manifest.inputs if name != "tokenizer")
    names, source_of_file = np.unique([source_name(name) for name in files], return_inverse=True)
    return DocumentSources(
        tuple(map(str, names)),
        source_of_file[np.concatenate(file_N)],
        total_N * (manifest.num_bytes_text / max(total_N.sum(), 1)),
    )


def source_name(file: str) -> str:
    """The source that an input file belongs to: the folder below the input that holds it, else the
    file itself without its suffixes and without a shard number like `-00003-of-00008`.
    """
    folder, _, inner = file.partition("/")
    return folder if inner else re.sub(r"([-._]\d+-of-\d+)?\.\w+(\.gz|\.zst)?$", "", file)
