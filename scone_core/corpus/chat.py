"""chat messages + a chat template -> token ids, and which of them a model learns to write.

The text of a message never becomes a control id: the template is rendered around placeholders, its
own text is encoded with control tokens, and the messages in their places are encoded without.

Shape: L tokens.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from scone_core.artifacts import storage
from scone_core.corpus.tokenizer import Tokenizer

PLACEHOLDER = "\ue000{}\ue001"
"""Private-use characters, which no template trims."""


class ChatTokens(NamedTuple):
    """One conversation."""

    tokens_L: np.ndarray
    """uint32."""
    is_target_L: np.ndarray
    """uint8: 1 for what assistants say and the control token that ends it."""
    num_target_bytes: int
    """UTF-8 bytes of what assistants say."""


class ChatTokenizer:
    """Encodes conversations by a chat template of Hugging Face (Jinja)."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_path: str | Path, template: str) -> None:
        """`tokenizer` encodes messages; the file at `tokenizer_path` also the template's text."""
        self._tokenizer, self._template = tokenizer, template
        self._with_control = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        added = self._with_control.get_added_tokens_decoder()
        self._control_ids = {number for number, token in added.items() if token.special}

    def encode(self, messages: list[dict[str, str]]) -> ChatTokens:
        """Token ids of a conversation.

        Raises:
            ValueError: a message without role or content, or the template refuses the roles.
        """
        contents = [_content_of(message) for message in messages]
        parts: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        speaks = False
        for number, part in enumerate(self._render(messages)):
            if number % 2:  # a message
                message = int(part)
                speaks = messages[message]["role"] == "assistant"
                tokens_L = self._tokenizer.encode(contents[message])
                num_targets = len(tokens_L) if speaks else 0
            else:
                encoding = self._with_control.encode(part, add_special_tokens=False)
                tokens_L = np.array(encoding.ids, np.uint32)
                num_targets = self._end_of_turn(tokens_L) if speaks else 0
            parts.append(tokens_L)
            targets.append((np.arange(len(tokens_L)) < num_targets).astype(np.uint8))
        said = [
            len(content.encode())
            for message, content in zip(messages, contents, strict=True)
            if message["role"] == "assistant"
        ]
        return ChatTokens(np.concatenate(parts), np.concatenate(targets), sum(said))

    def _render(self, messages: list[dict[str, str]]) -> list[str]:
        """The template's own text at even places, numbers of messages at odd ones."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

        held = [{**m, "content": PLACEHOLDER.format(i)} for i, m in enumerate(messages)]
        try:
            rendered, _ = render_jinja_template([held], chat_template=self._template)
        except Exception as error:  # templates raise errors of any kind
            raise ValueError(f"chat_template: refuses this conversation ({error})") from error
        return re.split("\ue000(\\d+)\ue001", rendered[0])

    def _end_of_turn(self, tokens_L: np.ndarray) -> int:
        """Tokens up to the first control token after a message, which ends it."""
        for place, token in enumerate(tokens_L.tolist()):
            if token in self._control_ids:
                return place + 1
        return 0


def read_template(path: str) -> str:
    """A chat template: a .jinja file, or the `chat_template` of a tokenizer_config.json.

    Raises:
        ValueError: no template in it.
    """
    text = storage.read_bytes(path).decode()
    if not path.endswith(".json"):
        return text
    template = json.loads(text).get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"chat_template={path!r}: no chat_template in it; give a .jinja file")
    return template


def _content_of(message: object) -> str:
    if not isinstance(message, dict) or not all(
        isinstance(message.get(name), str) for name in ("role", "content")
    ):
        raise ValueError(f"messages: each needs a role and a content, both strings: {message!r}")
    return message["content"]
