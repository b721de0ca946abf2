"""The options of the tokenize stage."""

from typing import Annotated, Literal

from pydantic import Field

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts.config import InputPath, OptionalInputPath, Resource, Role
from scone_core.corpus.documents import DocumentFormat
from scone_core.corpus.token_files import TokenFormat


class TokenizeConfig(JobConfig):
    """Options of the tokenize stage."""

    inputs: Annotated[tuple[str, ...], Role("input")]
    """Files (.jsonl, .parquet, .txt; .gz or .zst) or folders of them. With `content` tokens:
    Hugging Face .parquet or .arrow, Dolma and OLMo .npy, Megatron .bin with .idx, nanoGPT .bin."""
    tokenizer: InputPath
    """A Hugging Face tokenizer.json; for tokens the one that made them."""
    content: Literal["text", "tokens", "chat"] = "text"
    """What the inputs hold: text, token ids, or conversations (JSONL with a list of messages, of
    which models learn what assistants say)."""
    chat_template: OptionalInputPath = None
    """For chat: a .jinja file, or a tokenizer_config.json with a chat_template."""
    separator: str = "<|endoftext|>"
    """The control token that stands between documents; text that looks like it stays text."""
    form: DocumentFormat = DocumentFormat()
    token_form: TokenFormat = TokenFormat()
    shard_mb: int = Field(default=64, ge=1)
    """Text per shard, MiB; small files share a shard."""
    num_tokenizers: Resource[int | None] = None
    """Tokenizing workers; by default one per CPU."""
