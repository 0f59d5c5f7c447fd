"""`/v1/completions`, `/v1/models`, `/tokenize` and `/detokenize` over real sockets."""

import pytest

from tests.gateway.fake_engine import prompt_ids
from tests.gateway.service import CHAT, COMPLETION, embedded_text, say, serving

URL = "/v1/completions"


async def test_an_answer_has_openais_shape() -> None:
    async with serving(say(" there was")) as service:
        status, answer, _ = await service.post(URL, COMPLETION)
    assert status == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " there was", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 4


async def test_prompts_and_choices_are_numbered_in_order() -> None:
    answers = {"a": " one", "b": " two"}

    def answer(submit: object) -> list[int]:
        prompt = embedded_text().decode(prompt_ids(submit))  # type: ignore[arg-type]
        return [*embedded_text()._tokenizer.encode(answers[prompt]).ids, 2]

    async with serving(answer) as service:
        _, whole, _ = await service.post(URL, {"prompt": ["a", "b"], "n": 2, "echo": True})
    assert [choice["text"] for choice in whole["choices"]] == ["a one", "a one", "b two", "b two"]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_token_ids_go_to_the_engine_as_they_are() -> None:
    async with serving(say("!")) as service:
        _, answer, _ = await service.post(URL, {"prompt": [300, 301], "echo": True})
        assert prompt_ids(service.engine.seen[0].submit) == [300, 301]
    assert answer["choices"][0]["text"] == embedded_text().decode([300, 301]) + "!"


@pytest.mark.parametrize(
    ("prompt", "told"),
    [([4096], "token id 4096, the vocabulary has 4096"), ("", "no tokens"), ([[1], []], "empty array")],
)
async def test_prompts_that_the_model_cannot_take(prompt: object, told: str) -> None:
    async with serving() as service:
        status, answer, _ = await service.post(URL, {"prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert told in answer["error"]["message"]


async def test_logprobs_have_offsets_into_the_text() -> None:
    async with serving(say("Once upon 😀 a time")) as service:
        _, answer, _ = await service.post(URL, {**COMPLETION, "logprobs": 2})
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_models_are_listed_and_found() -> None:
    async with serving() as service:
        _, models, _ = await service.get("/v1/models")
        _, model, _ = await service.get("/v1/models/tiny")
        status, missing, _ = await service.get("/v1/models/meta/llama")
    assert models["data"] == [model]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert (status, missing["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with serving() as service:
        _, answer, _ = await service.post("/tokenize", {"prompt": "Once upon 😀", "return_token_strs": True})
        _, back, _ = await service.post("/detokenize", {"tokens": answer["tokens"]})
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert answer["token_strs"][:2] == ["Once", " upon"]
    assert back == {"prompt": "Once upon 😀"}


async def test_tokenize_applies_the_chat_template() -> None:
    async with serving() as service:
        _, answer, _ = await service.post("/tokenize", CHAT)
        _, bare, _ = await service.post("/tokenize", {**CHAT, "add_generation_prompt": False})
        _, back, _ = await service.post("/detokenize", {"tokens": answer["tokens"]})
    assert back["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert answer["count"] > bare["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [99999]}),
    ],
)
async def test_tokenize_refuses_what_it_cannot_read(path: str, body: dict[str, object]) -> None:
    async with serving() as service:
        status, answer, _ = await service.post(path, body)
    assert status == 400
    assert answer["error"]["param"] in ("prompt", "tokens")
