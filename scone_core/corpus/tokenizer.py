"""Hugging Face `tokenizer.json` -> token ids: byte-level BPE runs through tiktoken where both
agree.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiktoken
import tokenizers

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
NO_TOKEN = "\U0010ffff<none>\U0010ffff"
"""tiktoken looks for its control tokens even where none is allowed, and without any it takes twice
the time. Nothing ever becomes this one."""
PROBE = (
    "It's 1999's 3,000 O'Neill's\tDON'T\n\n  x = {'a': [1, 2]}  \r\n"
    "naïve café — «Größe» 你好，世界 สวัสดี здравствуй 👩‍👩‍👧 ½ "
    "\u200b\ufeff e\u0301 <|endoftext|> </s> [PAD]"
)


Engine = Literal["tokenizers", "tiktoken"]


class Tokenizer:
    """Encodes text as ordinary text: what looks like a special token in it never becomes a control
    id.
    """

    def __init__(self, path: str | Path, *, engine: Engine = "tokenizers") -> None:
        """Load a Hugging Face `tokenizer.json`; `engine` is what `select_engine` returned for it.

        Raises:
            ValueError: not such a file.
        """
        try:
            self._reference = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust binding raises plain Exception
            raise ValueError(
                f"tokenizer={str(path)!r}: not a Hugging Face tokenizer.json ({error})"
            ) from error
        self._reference.encode_special_tokens = True
        self._reference.no_truncation()
        self._reference.no_padding()
        self._fast = self._fast_bpe() if engine == "tiktoken" else None

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the largest id + 1."""
        return max(self._reference.get_vocab(with_added_tokens=True).values()) + 1

    def bytes_of_tokens(self) -> np.ndarray:
        """UTF-8 bytes behind every token id, int64 [V]. They are exact for byte-level BPE, whose
        tokens are bytes; for other tokenizers they are those of the token's own text.
        """
        content = json.loads(self._reference.to_str())
        sizes_V = np.zeros(self.vocab_size, np.int64)
        if _split_pattern(content["pre_tokenizer"]) is not None:
            for token, token_id in content["model"]["vocab"].items():
                sizes_V[token_id] = len(token)  # GPT-2 writes every byte as one character
            for token in content["added_tokens"]:
                sizes_V[token["id"]] = len(token["content"].encode())
            return sizes_V
        for token_id in range(self.vocab_size):
            sizes_V[token_id] = len(self.decode([token_id]).encode())
        return sizes_V

    def separator_id(self, token: str) -> int:
        """The id of the token that separates documents.

        Raises:
            ValueError: `token` is not in the vocabulary; lists the control tokens there are.
        """
        token_id = self._reference.token_to_id(token)
        if token_id is None:
            added = [entry.content for entry in self._reference.get_added_tokens_decoder().values()]
            raise ValueError(f"separator={token!r} is not in the vocabulary; it has {added}")
        return token_id

    def select_engine(self, sample: Sequence[str]) -> Engine:
        """Use tiktoken from now on if, and only if, it gives the reference's ids on `sample` and on
        a built-in probe of scripts, spaces and control strings.
        """
        self._fast, candidate = None, self._fast_bpe()
        texts = [PROBE, *sample]
        expected = [encoding.ids for encoding in self._encode_reference(texts)]
        if candidate is None or [candidate.encode(text).tolist() for text in texts] != expected:
            return "tokenizers"
        self._fast = candidate
        return "tiktoken"

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint32 [L]; no token is added."""
        if self._fast is not None:
            return self._fast.encode(text)
        return np.array(self._encode_reference([text])[0].ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(list(ids), skip_special_tokens=False)

    def _fast_bpe(self) -> "FastBpe | None":
        return FastBpe.from_json(json.loads(self._reference.to_str()))

    def _encode_reference(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        return self._reference.encode_batch(list(texts), add_special_tokens=False)


class FastBpe:
    """Byte-level BPE in tiktoken, which knows tokens by merge rank: `ids[rank]` gives the
    vocabulary's id.
    """

    def __init__(
        self,
        pattern: str,
        ranks: dict[bytes, int],
        ids: np.ndarray,
        added: dict[str, int],
        form: str | None,
    ) -> None:
        self.encoding = tiktoken.Encoding(
            "scone", pat_str=pattern, mergeable_ranks=ranks, special_tokens={NO_TOKEN: len(ranks)}
        )
        self._ids = None if np.array_equal(ids, np.arange(len(ids))) else ids
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._split = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None
        )
        self._form = form

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "FastBpe | None":
        """None when the tokenizer is of a kind that tiktoken cannot express."""
        model, normalizer = content["model"], content["normalizer"]
        pattern = _split_pattern(content["pre_tokenizer"])
        form = normalizer["type"] if normalizer else None
        plain = not any(
            model.get(name)
            for name in (
                "dropout",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "byte_fallback",
            )
        )
        ordinary = [token for token in content["added_tokens"] if not token["special"]]
        if any(token[flag] for token in ordinary for flag in ("lstrip", "rstrip", "single_word")):
            return None
        if model["type"] != "BPE" or not plain or pattern is None or form not in (None, "NFC"):
            return None
        table = _rank_table(model)
        if table is None:
            return None
        ranks, ids = table
        return cls(pattern, ranks, ids, {token["content"]: token["id"] for token in ordinary}, form)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, uint32 [L]."""
        if self._form is not None:
            text = unicodedata.normalize("NFC", text)
        if self._split is None:
            return self._encode_ordinary(text)
        parts = [
            np.array([self._added[part]], np.uint32) if number % 2 else self._encode_ordinary(part)
            for number, part in enumerate(self._split.split(text))
        ]
        return np.concatenate(parts)

    def _encode_ordinary(self, text: str) -> np.ndarray:
        ranks_L = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ranks_L if self._ids is None else self._ids.take(ranks_L)


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The regular expression by which a byte-level pre-tokenizer cuts text, if it is one."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _rank_table(model: dict[str, Any]) -> tuple[dict[bytes, int], np.ndarray] | None:
    """Merge rank of every token (bytes first, then merges in order) and the id of every rank."""
    to_byte = {char: byte for byte, char in _byte_chars().items()}
    vocab: dict[str, int] = model["vocab"]
    tokens = [char for char, byte in to_byte.items() if char in vocab or byte not in NEVER_IN_UTF8]
    for merge in model["merges"]:
        tokens.append("".join(merge.split(" ") if isinstance(merge, str) else merge))
    tokens = list(dict.fromkeys(tokens))
    if any(token not in vocab for token in tokens):
        return None
    ranks = {bytes(to_byte[char] for char in token): rank for rank, token in enumerate(tokens)}
    return ranks, np.array([vocab[token] for token in tokens], np.uint32)


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte (openai/gpt-2, src/encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
