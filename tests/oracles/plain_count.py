"""A whole count in this process, with receipts: something to kill."""

from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.artifacts.units import do_here
from scone_core.counting.count import count_fgrams
from scone_core.counting.options import CountOptions
from scone_core.counting.plan import plan_count


def count(tokens: str, out: str) -> None:
    """Count `tokens` into the Parquet shards of `out`, resuming a count that was killed."""
    plan = plan_count(
        tokens,
        load_manifest(TokensManifest, tokens),
        CountOptions(max_n=5, min_count=2),
        scratch=f"{out}/scratch",
        memory_bytes=1 << 30,
        num_chunks=6,
        num_ranges=6,
    )
    count_fgrams(plan, do_here, num_fgrams=2000, out=out, rows_per_shard=300)
