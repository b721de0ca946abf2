"""The served folder, and what an engine's step looks up."""
