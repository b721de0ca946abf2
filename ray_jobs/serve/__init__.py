"""Checkpoint, f-grams and table -> served folder -> OpenAI API."""
