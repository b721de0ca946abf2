"""evaluation/v1 -> a table for people, metrics for MLflow."""

from scone_core.evaluation.scores import (
    ALL_SOURCES,
    EvaluationManifest,
    Interval,
    TaskScore,
    TextScore,
    mean_accuracy,
)

TEXT_METRICS = ("perplexity", "bits_per_byte", "hit_rate", "mean_match_length")
MEAN = "mean of tasks"


def table(manifest: EvaluationManifest) -> str:
    """All figures, with their 95 % intervals in brackets."""
    lines = [f"f-gram vectors: {manifest.vectors}"]
    if manifest.text:
        lines += ["", _row("text", "documents", "tokens", "perplexity", "bits per byte", *FGRAMS)]
        others = sorted(manifest.text.keys() - {ALL_SOURCES})
        lines += [_text_row(name, manifest.text[name]) for name in (ALL_SOURCES, *others)]
    if manifest.tasks:
        lines += ["", _row("task", "questions", "accuracy, %", "by sum", "bits per byte", "hits")]
        lines += [_task_row(name, manifest.tasks[name]) for name in sorted(manifest.tasks)]
    if len(manifest.tasks) > 1:
        mean, interval = mean_accuracy(list(manifest.tasks.values()))
        lines.append(_row(MEAN, "", _percent(mean, interval)))
    return "\n".join(line.rstrip() for line in lines)


def metrics(manifest: EvaluationManifest) -> dict[str, float]:
    """`perplexity`, ... of all text; `perplexity/<source>`, `accuracy/<task>`, ... and the ends of
    their intervals as `perplexity_low/...`, `perplexity_high/...`.
    """
    found: dict[str, float] = {}
    for source, score in manifest.text.items():
        end = "" if source == ALL_SOURCES else f"/{source}"
        found |= {f"{name}{end}": getattr(score, name) for name in TEXT_METRICS}
        found |= _ends("perplexity", end, score.perplexity_interval)
        found |= _ends("bits_per_byte", end, score.bits_per_byte_interval)
    for task, score in manifest.tasks.items():
        end = f"/{task}"
        found |= {
            f"accuracy{end}": score.accuracy,
            f"answer_bits_per_byte{end}": score.bits_per_byte,
        }
        found |= _ends("accuracy", end, score.accuracy_interval)
    if manifest.tasks:
        mean, interval = mean_accuracy(list(manifest.tasks.values()))
        found |= {"accuracy": mean} | _ends("accuracy", "", interval)
    return found


FGRAMS = ("hits", "match length")
WIDTHS = (28, 10, 24, 24, 24, 6, 12)


def _row(*cells: str) -> str:
    first, *others = cells
    numbers = (f"{cell:>{width}}" for cell, width in zip(others, WIDTHS[1:], strict=False))
    return f"{first:{WIDTHS[0]}}" + "".join(numbers)


def _text_row(name: str, score: TextScore) -> str:
    return _row(
        name,
        f"{score.num_documents:,}",
        f"{score.num_tokens:,}",
        _figure(score.perplexity, score.perplexity_interval, ".2f"),
        _figure(score.bits_per_byte, score.bits_per_byte_interval, ".4f"),
        f"{score.hit_rate:.2f}",
        f"{score.mean_match_length:.2f}",
    )


def _task_row(name: str, score: TaskScore) -> str:
    return _row(
        name,
        f"{score.num_questions:,}",
        _percent(score.accuracy, score.accuracy_interval),
        f"{100 * score.accuracy_by_sum:.1f}",
        f"{score.bits_per_byte:.4f}",
        f"{score.hit_rate:.2f}",
    )


def _percent(share: float, interval: Interval) -> str:
    return _figure(100 * share, (100 * interval[0], 100 * interval[1]), ".1f")


def _figure(value: float, interval: Interval | None, form: str) -> str:
    if interval is None:
        return f"{value:{form}}"
    return f"{value:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def _ends(name: str, end: str, interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    return {f"{name}_low{end}": interval[0], f"{name}_high{end}": interval[1]}
