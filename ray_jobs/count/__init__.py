"""tokens/v1 -> fgrams/v1."""
