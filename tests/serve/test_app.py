"""The application's laws, as an OpenAI client sees `serve deploy cluster/serve.yaml`."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import yaml

from tests import ROOT
from tests.builders.corpora import text_of
from tests.builders.served_models import MAX_LENGTH, VOCAB, Agreement, Reference
from tests.programs.processes import free_port
from tests.serve.head import Head

SERVE_YAML = ROOT / "cluster" / "serve.yaml"
LENGTHS = [1, 2, 3, 5, 17, 31, 32, 33, 64, 100, 200, 259]
PROMPT = [5, 6, 7, 8]


class Api(NamedTuple):
    """The running application."""

    head: Head
    applications: dict[str, Any]
    """What was deployed."""
    url: str
    client: openai.OpenAI


@pytest.fixture(scope="module")
def api(base: Path) -> Iterator[Api]:
    """serve.yaml with the values that a user must change, chunked prefill, and lookup actors."""
    applications = yaml.safe_load(SERVE_YAML.read_text())
    port = free_port()
    applications["http_options"] = {"host": "127.0.0.1", "port": port}
    applications["applications"][0]["args"] |= {
        "model": str(base / "served"),
        "placement": "actor",
        "max_model_len": MAX_LENGTH,
        "engine": {"enforce_eager": True, "max_num_batched_tokens": 64, "block_size": 32},
        # vLLM would compile a function of three lines at the first answer with logprobs
        "env": {"VLLM_CACHE_ROOT": str(base / "vllm"), "TORCHDYNAMO_DISABLE": "1"},
    }
    head = Head()
    try:
        head.deploy(applications)
        status, message = head.wait_for("scone")
        assert status == "RUNNING", message
        url = f"http://127.0.0.1:{port}/v1"
        yield Api(head, applications, url, openai.OpenAI(base_url=url, api_key="none"))
    finally:
        head.stop()


def complete(api: Api, prompt: list[int] | str = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 16, "temperature": 0, "model": "scone", **options}
    return api.client.completions.create(prompt=prompt, **options)


def answer_ids(api: Api, prompt: list[int]) -> list[int]:
    extra = {"return_token_ids": True, "ignore_eos": True}
    return complete(api, prompt, max_tokens=32, extra_body=extra).choices[0].token_ids


def test_concurrent_answers_equal_a_full_recomputation(api: Api, reference: Reference) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in LENGTHS]
    agreement = Agreement()
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in ("fresh", "repeated"):
            answers = list(pool.map(lambda prompt: answer_ids(api, prompt), prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                agreement += reference.check(prompt, answer)
    assert agreement.num_tokens == 2 * 32 * len(prompts)
    assert agreement.num_wrong == 0
    assert agreement.num_ties < 0.01 * agreement.num_tokens
    assert 0.3 < agreement.num_hits / agreement.num_tokens < 0.95


def test_the_model_is_listed(api: Api) -> None:
    assert [model.id for model in api.client.models.list()] == ["scone"]


def test_text_and_its_token_ids_get_the_same_answer(api: Api) -> None:
    assert complete(api, text_of(PROMPT)).choices[0].text == complete(api).choices[0].text


def test_a_stream_adds_up_to_the_answer_and_ends_with_its_usage(api: Api) -> None:
    chunks = list(complete(api, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == complete(api).choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16


def test_logprobs_are_those_of_the_model(api: Api, reference: Reference) -> None:
    choice = complete(api, logprobs=3, extra_body={"return_token_ids": True}).choices[0]
    tokens = PROMPT + choice.token_ids
    logits_TV = reference.logits(tokens, reference.fgram_ids(tokens))[len(PROMPT) - 1 : -1]
    expected_TV = logits_TV.log_softmax(-1)
    for t, token in enumerate(choice.token_ids):
        found = choice.logprobs.token_logprobs[t]
        assert math.isclose(found, expected_TV[t, token], abs_tol=1e-4)
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)


def test_chat_answers_the_rendered_messages(api: Api) -> None:
    messages = [{"role": "user", "content": text_of(PROMPT)}]
    chat = api.client.chat.completions.create(
        model="scone", messages=messages, max_tokens=16, temperature=0
    )
    assert chat.choices[0].message.content == complete(api).choices[0].text


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model='nope' is not served"),
        ({"prompt": [1] * 600}, openai.BadRequestError, "maximum context length is 512"),
        ({"max_tokens": -3}, openai.BadRequestError, "max_tokens must be at least 1"),
        ({"prompt": {"a": 1}}, openai.BadRequestError, "Invalid request format"),
    ],
)
def test_a_bad_request_gets_an_error_and_the_next_an_answer(
    api: Api, options: dict[str, Any], error: type[openai.APIStatusError], reason: str
) -> None:
    with pytest.raises(error, match=reason) as raised:
        complete(api, **options)
    assert raised.value.body["message"]
    assert complete(api).choices[0].text


def test_a_broken_body_gets_an_error_and_the_next_request_an_answer(api: Api) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{api.url}/completions", content=b"{broken", headers=headers)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]
    assert complete(api).choices[0].text


def test_a_misspelt_argument_names_itself_and_leaves_the_others_running(api: Api) -> None:
    (good,) = api.applications["applications"]
    bad = good | {"name": "bad", "route_prefix": "/bad", "args": good["args"] | {"modle": "x"}}
    api.head.deploy(api.applications | {"applications": [good, bad]})
    status, message = api.head.wait_for("bad")
    assert status == "DEPLOY_FAILED"
    assert "modle\n" in message
    assert "Extra inputs are not permitted" in message
    assert complete(api).choices[0].text
