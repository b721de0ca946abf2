"""checkpoint/v1 -> perplexity per source, zero-shot tasks."""
