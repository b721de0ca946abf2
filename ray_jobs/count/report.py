"""a finished count -> the metrics and figures of its run."""

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from ray_jobs.count.config import CountConfig
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts.manifests import FGramsManifest
from scone_core.fgrams.coverage import coverage_curve, curve_sizes, held_out_curve
from scone_core.fgrams.index import FGramIndex

COLOURS = {
    2: "#4477aa",
    3: "#228833",
    4: "#ccbb44",
    5: "#ee6677",
    6: "#aa3377",
    7: "#66ccee",
    8: "#bbbbbb",
}
"""Paul Tol's bright scheme, whose colours colour-blind readers can tell apart, too."""
INK = "#333333"


def rank_frequency_figure(runs: pl.DataFrame) -> Figure:
    """Count against rank, all f-grams together and per n; `runs` is as from `ranking.rank_runs`."""
    figure, axes = _figure("Rank and frequency", x="rank", y="occurrences in the corpus")
    _step(axes, runs, label="all", color=INK, linewidth=2.2)
    for (n,), part in sorted(runs.group_by("n")):
        _step(axes, part, label=f"n = {n}", color=COLOURS[n], linewidth=1.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    return figure


def coverage_figure(curve: pl.DataFrame) -> Figure:
    """Hit rate and mean match length against the number of f-grams; `curve` is as from
    `coverage.coverage_curve`.
    """
    figure, axes = _figure("What the first S f-grams cover", x="number of f-grams S", y="hit rate")
    axes.plot(curve["num_fgrams"], curve["hit_rate"], color=COLOURS[2], linewidth=2.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1)
    axes.yaxis.label.set_color(COLOURS[2])
    lengths = axes.twinx()
    lengths.plot(curve["num_fgrams"], curve["mean_match_length"], color=COLOURS[5], linewidth=2.2)
    lengths.set_ylabel("mean match length (tokens; a miss is 1)", color=COLOURS[5])
    lengths.set_ylim(bottom=1)
    lengths.spines[["top", "left"]].set_visible(False)
    return figure


def fgrams_per_n_figure(num_per_n: dict[int, int]) -> Figure:
    """How many f-grams of each length there are."""
    figure, axes = _figure("F-grams per length", x="n (tokens)", y="f-grams")
    bars = axes.bar(
        [str(n) for n in num_per_n],
        list(num_per_n.values()),
        color=[COLOURS[n] for n in num_per_n],
        width=0.65,
    )
    total = max(sum(num_per_n.values()), 1)
    labels = [f"{num:,}\n{num / total:.0%}" for num in num_per_n.values()]
    axes.bar_label(bars, labels, padding=3, color=INK)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(y=0.18)
    axes.grid(visible=False, axis="x")
    return figure


def _figure(title: str, *, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _step(axes: Axes, runs: pl.DataFrame, *, label: str, color: str, linewidth: float) -> None:
    """Draw both ends of each class of equal counts, so that ties show as steps."""
    classes = runs.group_by("count").agg(pl.col("num").sum()).sort("count", descending=True)
    last = classes["num"].cum_sum().to_numpy()
    first = last - classes["num"].to_numpy() + 1
    ranks, counts = (
        np.column_stack([first, last]).ravel(),
        np.repeat(classes["count"].to_numpy(), 2),
    )
    axes.plot(ranks, counts, label=label, color=color, linewidth=linewidth)


def log_count(
    config: CountConfig,
    manifest: FGramsManifest,
    runs: pl.DataFrame,
    log: RunLog,
    *,
    seconds: float,
) -> None:
    """Log metrics and plots of a count, and print its coverage."""
    sizes = curve_sizes(manifest.num_fgrams)
    coverage = coverage_curve(runs, num_tokens=manifest.num_tokens, sizes=sizes)
    if config.held_out:
        _log_held_out(config, config.held_out, manifest, log)
    _, hit_rate, mean_match_length = coverage.row(-1)
    print(
        f"count: {manifest.num_fgrams:,} f-grams; on the counted corpus hit rate "
        f"{hit_rate:.3f}, mean match length {mean_match_length:.2f}"
    )
    per_n = {f"num_fgrams_{n}": num for n, num in manifest.num_fgrams_per_n.items()}
    log.log_metrics(
        {
            "num_fgrams": manifest.num_fgrams,
            "hit_rate": hit_rate,
            "mean_match_length": mean_match_length,
            "seconds": seconds,
            "tokens_per_second": manifest.num_tokens / seconds,
            **per_n,
        }
    )
    log.log_text(coverage.write_csv(), "coverage.csv")
    log.log_figure(rank_frequency_figure(runs), "rank_frequency.png")
    log.log_figure(coverage_figure(coverage), "coverage.png")
    log.log_figure(fgrams_per_n_figure(manifest.num_fgrams_per_n), "fgrams_per_n.png")


def _log_held_out(
    config: CountConfig, held_out: str, manifest: FGramsManifest, log: RunLog
) -> None:
    index = FGramIndex.map(config.out, manifest)
    curve = held_out_curve(index, held_out, tokenizer_sha256=manifest.tokenizer_sha256)
    _, hit_rate, mean_match_length = curve.row(-1)
    print(f"count: held out: hit rate {hit_rate:.3f}, mean match length {mean_match_length:.2f}")
    log.log_metrics(
        {"held_out_hit_rate": hit_rate, "held_out_mean_match_length": mean_match_length}
    )
    log.log_text(curve.write_csv(), "coverage_held_out.csv")
    log.log_figure(coverage_figure(curve), "coverage_held_out.png")
