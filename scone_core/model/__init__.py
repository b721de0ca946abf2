"""The prefix forest, the decoders, and main and f-gram model as one module."""
