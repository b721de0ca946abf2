"""fgrams/v1 + embeddings/v1 -> rows of the f-grams in a text: matcher and table as one.

Shapes: B sequences, T positions, M hits, D width.
"""

from typing import Self

import numpy as np

from scone_core.artifacts.manifests import FGramsManifest, load_manifest
from scone_core.fgrams.index import FGramIndex, Matches, MatchStream
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.lookup_statistics import LookupReport
from scone_core.table.tiers import ALL_MAPPED, Tiers


class LookupEngine:
    """What a decoder needs per step: match the new tokens, gather the rows of the hits."""

    def __init__(self, index: FGramIndex, table: EmbeddingTable) -> None:
        self.index, self.table = index, table

    @classmethod
    def open(cls, fgrams: str, table: str, *, tiers: Tiers = ALL_MAPPED) -> Self:
        """Map both artifacts, folders or URIs.

        Raises:
            ArtifactError: missing, damaged, or they do not belong together.
            ValueError: `tiers` cannot be had on this machine.
        """
        manifest = load_manifest(FGramsManifest, fgrams)
        expected = {"fgrams_fingerprint": manifest.fingerprint}
        rows = EmbeddingTable.open(table, expected=expected, tiers=tiers)
        return cls(FGramIndex.map(fgrams, manifest), rows)

    def match(self, tokens_BT: np.ndarray) -> Matches:
        """The longest f-gram that ends at each position: `FGramIndex.match`."""
        return self.index.match(tokens_BT)

    def stream(self, num_sequences: int) -> MatchStream:
        """The state of sequences that grow token by token, for `step`."""
        return self.index.stream(num_sequences)

    def step(self, stream: MatchStream, tokens_B: np.ndarray, out_BD: np.ndarray) -> np.ndarray:
        """One decode step: `out_BD[m]` becomes the row of the m-th hit.

        Returns:
            The sequences of the hits, int64 [M], ascending.

        Raises:
            ArtifactError: a cold row cannot be read.
        """
        return self.gather_hits(stream.advance(tokens_B), out_BD)

    def gather_hits(self, fgram_ids_T: np.ndarray, out_TD: np.ndarray) -> np.ndarray:
        """`out_TD[m]` becomes the row of the m-th hit among matches (a miss is -1).

        Returns:
            The positions of the hits, int64 [M], ascending.

        Raises:
            ArtifactError: a cold row cannot be read.
        """
        hits_M = (fgram_ids_T >= 0).nonzero()[0]
        self.table.statistics.add_match(len(fgram_ids_T), len(hits_M))
        if len(hits_M):
            self.table.gather(fgram_ids_T[hits_M], out_TD[: len(hits_M)])
        return hits_M

    def report(self) -> LookupReport:
        """What was looked up since the table was opened."""
        return self.table.statistics.report()
