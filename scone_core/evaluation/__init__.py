"""Perplexity and zero-shot tasks."""
