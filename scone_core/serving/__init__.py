"""The served folder, and the transformers model that reads it."""
