"""Text -> tokens/v1."""
