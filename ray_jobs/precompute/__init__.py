"""checkpoint/v1 + fgrams/v1 -> embeddings/v1."""
