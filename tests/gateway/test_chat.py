"""`/v1/chat/completions` in one piece, over real sockets."""

import json
from typing import Any

import pytest

from headrace.gateway.jobs import choice_seed
from tests.gateway.fake_engine import MS_PER_TOKEN, FakeEngine, prompt_ids
from tests.gateway.service import CHAT, embedded_text, say, serving

URL = "/v1/chat/completions"


async def test_an_answer_has_openais_shape() -> None:
    async with serving(say("Hello there.")) as service:
        status, answer, headers = await service.post(URL, CHAT)
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Request-Id"].startswith("req_")
    assert answer["id"].startswith("chatcmpl-")
    assert len(answer["id"]) > 30, "ids cannot be guessed"
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 4,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
        "gpu_ms": 4 * MS_PER_TOKEN,
    }


async def test_the_engine_gets_the_templates_tokens_and_the_models_defaults() -> None:
    async with serving() as service:
        await service.post(URL, CHAT)
        submit = service.engine.seen[0].submit
    text = embedded_text().decode(prompt_ids(submit), skip_special_tokens=False)
    assert text == "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.95), "of generation_config.json"
    assert sampling.max_tokens == 256 - 13, "up to the context"
    assert sampling.stop_token_ids == (2, 0)
    assert submit.credit == 256


async def test_the_requests_values_go_before_the_models() -> None:
    async with serving() as service:
        asked = {"temperature": 0, "top_p": 1, "max_completion_tokens": 5, "ignore_eos": True, "seed": 7}
        await service.post(URL, {**CHAT, **asked, "priority": -3, "cache_salt": "salt"})
        submit = service.engine.seen[0].submit
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.max_tokens) == (0, 1, 5)
    assert (submit.sampling.stop_token_ids, submit.sampling.seed) == ((), 7)
    assert (submit.priority, submit.cache_salt) == (-3, "salt")
    assert submit.sampling.seeded, "the seed is the client's"


async def test_a_drawn_seed_is_nobodys_promise_and_the_drafters_are_the_requests_choice() -> None:
    async with serving() as service:
        await service.post(URL, {**CHAT, "speculation": "off"})
        sampling = service.engine.seen[0].submit.sampling
        status, error, _ = await service.post(URL, {**CHAT, "speculation": "fast"})
    assert (sampling.seeded, sampling.speculation) == (False, "off")
    assert (status, error["error"]["param"]) == (400, "speculation")


async def test_length_ends_at_max_tokens() -> None:
    async with serving(say("one two three four five six", stop=False)) as service:
        _, answer, _ = await service.post(URL, {**CHAT, "max_tokens": 3})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_string_is_cut_and_named() -> None:
    async with serving(say("Once upon a time there was a fox.")) as service:
        _, answer, _ = await service.post(URL, {**CHAT, "stop": ["fox", " the"]})
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Once upon a time"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " the")


async def test_choices_have_their_own_seeds_and_the_first_is_that_of_n_1() -> None:
    async with serving() as service:
        await service.post(URL, {**CHAT, "seed": 42, "n": 3})
        await service.post(URL, {**CHAT, "seed": 42})
        await service.post(URL, {**CHAT, "n": 2})
        seeds = [stream.submit.sampling.seed for stream in service.engine.seen]
    assert seeds[:3] == [choice_seed(42, i) for i in range(3)]
    assert seeds[0] == seeds[3] == 42
    assert len(set(seeds)) == 5, "other choices and undetermined requests differ"
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_with_a_price_an_answer_says_what_it_cost() -> None:
    """Also streamed, and summed over its choices; 36 dollars an hour are a hundred-thousandth a millisecond."""
    body = {**CHAT, "n": 3, "stream_options": {"include_usage": True}}
    async with serving(price_per_gpu_hour=36.0) as service:
        _, whole, _ = await service.post(URL, {**CHAT, "n": 3})
        events = await service.events(URL, body)
    streamed = json.loads(events[-2].data)["usage"]
    for usage in (whole["usage"], streamed):
        assert usage["gpu_ms"] == usage["completion_tokens"] * MS_PER_TOKEN
        assert usage["cost_usd"] == pytest.approx(usage["gpu_ms"] * 1e-5)


async def test_a_generation_cut_by_the_gateway_has_no_bill_yet() -> None:
    engine = FakeEngine(say("fox " * 200), step_s=0.02)
    async with serving(engine=engine, request_timeout_s=0.2, price_per_gpu_hour=1.0) as service:
        _, answer, _ = await service.post(URL, CHAT)
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert (answer["usage"]["gpu_ms"], answer["usage"]["cost_usd"]) == (None, None)


async def test_n_choices_share_the_prompts_usage() -> None:
    async with serving(say("Hi")) as service:
        _, answer, _ = await service.post(URL, {**CHAT, "n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (13, 6)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_logprobs_cover_exactly_the_text() -> None:
    async with serving(say("naïve 😀 end")) as service:
        asked = {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": "end"}
        _, answer, _ = await service.post(URL, asked)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "naïve 😀 "
    shown = b"".join(bytes(entry["bytes"]) for entry in content)
    assert shown.decode().startswith("naïve 😀 ")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["logprob"] == pytest.approx(content[0]["top_logprobs"][0]["logprob"])


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"max_tokens": 244}, "max_tokens", ("13 prompt tokens", "max_tokens = 244", "257", "256")),
        ({"min_tokens": 250}, "min_tokens", ("min_tokens = 250", "243")),
        ({"logit_bias": {"4096": 1}}, "logit_bias", ("4096", "the vocabulary has 4096")),
        ({"stop_token_ids": [5000]}, "stop_token_ids", ("5000", "4096")),
    ],
)
async def test_limits_of_the_model_are_named(
    fields: dict[str, Any], param: str, told: tuple[str, ...]
) -> None:
    async with serving() as service:
        status, answer, _ = await service.post(URL, {**CHAT, **fields})
        assert not service.engine.seen, "nothing was submitted"
    assert (status, answer["error"]["param"]) == (400, param)
    for part in told:
        assert part in answer["error"]["message"]


@pytest.mark.parametrize("words", [300, 200_000])
async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(words: int) -> None:
    """The second one is so long that it is refused without being tokenised."""
    async with serving() as service:
        messages = [{"role": "user", "content": "fox " * words}]
        status, answer, _ = await service.post(URL, {**CHAT, "messages": messages})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "the context is 256" in error["message"]


async def test_an_unknown_model_is_a_404() -> None:
    async with serving() as service:
        status, answer, _ = await service.post(URL, {**CHAT, "model": "gpt-9"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["type"] == "invalid_request_error"
    assert '"gpt-9"' in answer["error"]["message"]


async def test_the_model_may_be_left_out() -> None:
    async with serving() as service:
        status, _, _ = await service.post(URL, {"messages": CHAT["messages"]})
    assert status == 200


async def test_several_tokens_a_step_make_the_same_answer() -> None:
    text = "Once upon a time there lived 😀 a naïve fox"
    async with serving(engine=FakeEngine(say(text), per_step=5)) as service:
        _, answer, _ = await service.post(URL, CHAT)
    assert answer["choices"][0]["message"]["content"] == text


async def test_a_long_answer_gets_its_credit() -> None:
    """No reader holds a one-piece answer back, so the engine is never parked for good."""
    async with serving(say("fox " * 150), credit_window=16) as service:
        _, answer, _ = await service.post(URL, CHAT)
        assert service.engine.seen[0].grants
    assert answer["choices"][0]["message"]["content"] == "fox " * 150
