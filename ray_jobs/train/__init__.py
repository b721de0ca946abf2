"""tokens/v1 + fgrams/v1 -> checkpoint/v1."""
