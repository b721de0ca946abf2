"""Laws of encoding: the fast engine equals the reference, and text never becomes a control id."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from scone_core.corpus.tokenizer import NO_TOKEN, Tokenizer
from tests import BUNDLED

TOKENIZER = BUNDLED / "tokenizer.json"
REFERENCE = tokenizers.Tokenizer.from_file(str(TOKENIZER))
REFERENCE.encode_special_tokens = True


@pytest.fixture(scope="module")
def fast() -> Tokenizer:
    tokenizer = Tokenizer(TOKENIZER)
    assert tokenizer.select_engine([]) == "tiktoken"
    return tokenizer


@given(text=st.text(max_size=200))
@settings(max_examples=200)
def test_tiktoken_equals_the_reference_on_any_text(fast: Tokenizer, text: str) -> None:
    assert fast.encode(text).tolist() == REFERENCE.encode(text, add_special_tokens=False).ids


@given(text=st.text(max_size=200))
def test_decode_inverts_encode(fast: Tokenizer, text: str) -> None:
    assert fast.decode(fast.encode(text).tolist()) == text


def test_control_strings_in_text_stay_text(fast: Tokenizer) -> None:
    separator = fast.separator_id("<|endoftext|>")
    for tokenizer in (fast, Tokenizer(TOKENIZER)):
        for text in ("a <|endoftext|> b", f"a{NO_TOKEN}b"):
            ids = tokenizer.encode(text).tolist()
            assert separator not in ids
            assert tokenizer.decode(ids) == text
            assert max(ids) < tokenizer.vocab_size


@given(text=st.text(max_size=200))
def test_bytes_of_tokens_add_up_to_the_text(fast: Tokenizer, text: str) -> None:
    assert fast.bytes_of_tokens()[fast.encode(text)].sum() == len(text.encode())


def test_a_tokenizer_on_which_tiktoken_differs_keeps_the_reference(tmp_path: Path) -> None:
    """BPE merges `bc` first and never reaches `abc`; tiktoken finds `abc` whole."""
    content = json.loads(TOKENIZER.read_text())
    vocab = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocab |= {"bc": 256, "ab": 257, "abc": 258}
    content["added_tokens"] = []
    content["model"] |= {"vocab": vocab, "merges": [["b", "c"], ["a", "b"], ["ab", "c"]]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer(path)
    assert tokenizer.select_engine(["xyz"]) == "tiktoken"
    assert tokenizer.select_engine(["abc"]) == "tokenizers"
    assert tokenizer.encode("abc").tolist() == [vocab["a"], vocab["bc"]]


def test_added_ordinary_tokens_are_matched_longest_first(tmp_path: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    reference.add_tokens(["    ", "  "])
    path = tmp_path / "tokenizer.json"
    reference.save(str(path))
    tokenizer = Tokenizer(path)
    assert tokenizer.select_engine([]) == "tiktoken"
    for text in ("a     b", "  x", "      ", "no"):
        assert tokenizer.encode(text).tolist() == reference.encode(text).ids


def test_a_word_level_tokenizer_runs_on_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(path))
    assert Tokenizer(path).select_engine([]) == "tokenizers"


def test_a_file_that_is_no_tokenizer_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a Hugging Face tokenizer\.json"):
        Tokenizer(path)


def test_a_missing_separator_lists_the_control_tokens(fast: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"separator='</s>'.*<\|endoftext\|>"):
        fast.separator_id("</s>")
