"""From request bodies to GenerationRequest: every field's type and range, and what is not built."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.errors import ApiError
from headrace.gateway.openai.chat import parse_chat
from headrace.gateway.openai.completions import parse_completion
from headrace.gateway.schemas import ChatPrompt, TextPrompt

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": MESSAGES, **fields})


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "Hi", **fields})


def refusal(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", 2.5, "temperature = 2.5 is outside 0..2"),
        ("temperature", "hot", 'temperature must be a number, got the string "hot"'),
        ("temperature", True, "temperature must be a number, got true"),
        ("temperature", float("nan"), "temperature = nan is outside 0..2"),
        ("top_p", -0.1, "top_p = -0.1 is outside 0..1"),
        ("top_k", -2, "top_k = -2 is outside -1.."),
        ("top_k", 1.5, "top_k must be an integer, got the number 1.5"),
        ("min_p", 1.1, "min_p = 1.1 is outside 0..1"),
        ("presence_penalty", 3, "presence_penalty = 3 is outside -2..2"),
        ("frequency_penalty", -3, "frequency_penalty = -3 is outside -2..2"),
        ("repetition_penalty", 0, "repetition_penalty = 0 is outside 0.01..100"),
        ("n", 0, "n = 0 is outside 1..128"),
        ("n", True, "n must be an integer, got true"),
        ("max_tokens", 0, "max_tokens = 0 is outside 1.."),
        ("max_completion_tokens", "1", 'max_completion_tokens must be an integer, got the string "1"'),
        ("min_tokens", -1, "min_tokens = -1 is outside 0.."),
        ("seed", 2**63, "seed = 9223372036854775808 is outside"),
        ("stop", [""], "a stop string has 0 characters, allowed are 1..1024"),
        ("stop", ["a"] * 17, "stop has 17 items, the limit is 16"),
        ("stop", [1], "stop must be a string or an array of strings, got the number 1"),
        ("stop", {"a": 1}, "stop must be an array, got an object"),
        ("stop_token_ids", ["2"], "stop_token_ids must be an array of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids must be an array of token ids"),
        ("logit_bias", {"x": 1}, 'logit_bias has the key "x", which is no token id'),
        ("logit_bias", {"5": 101}, "logit_bias.5 = 101 is outside -100..100"),
        ("logit_bias", [5], "logit_bias must be an object, got an array of 1 items"),
        ("speculation", "eagle", 'speculation must be one of "auto", "mtp", "ngram", "off", got the string'),
        ("speculation", ["mtp"], "got an array of 1 items"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got the number 1"),
        ("stream", "yes", 'stream must be true or false, got the string "yes"'),
        ("stream_options", {"include_usage": True}, "stream_options is only allowed when stream is true"),
        ("priority", 1.5, "priority must be an integer, got the number 1.5"),
        ("cache_salt", "", "cache_salt must not be empty"),
        ("model", 7, "model must be a string, got the number 7"),
        ("best_of", 0, "best_of = 0 is outside 1..128"),
    ],
)
def test_wrong_types_and_ranges_name_field_value_and_limit(field: str, value: Any, told: str) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{field: value})
        assert error.status == 400
        assert told in error.message
        assert error.param is not None
        assert error.param.split(".")[0] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_is_not_built_says_so(fields: dict[str, Any], param: str) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **fields)
        assert (error.status, error.code) == (501, "not_implemented")
        assert "not built yet" in error.message
        assert error.param is not None
        assert error.param.split(".")[0] == param


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
def test_content_other_than_text_is_not_built(part: str) -> None:
    error = refusal(chat, messages=[{"role": "user", "content": [{"type": part}]}])
    assert (error.status, error.param) == (501, "messages[0].content[0]")
    assert part in error.message


def test_echo_with_logprobs_is_not_built() -> None:
    assert refusal(completion, echo=True, logprobs=0).status == 501


def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    plain = {"messages": MESSAGES}
    nulls = dict.fromkeys(("temperature", "stop", "n", "logit_bias", "tools", "stream_options", "user"))
    assert parse_chat({**plain, **nulls, "colour": "blue", "service_tier": "auto"}) == parse_chat(plain)


def test_neutral_values_of_unbuilt_fields_pass() -> None:
    neutral = {"tools": [], "response_format": {"type": "text"}, "suffix": "", "best_of": 1}
    assert chat(**neutral) == chat()


def test_every_supported_field_arrives() -> None:
    asked = chat(
        model="m",
        n=3,
        max_tokens=7,
        max_completion_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 2.5},
        seed=-1,
        stop="END",
        stop_token_ids=[4],
        ignore_eos=True,
        speculation="ngram",
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
        priority=-5,
        cache_salt="me",
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        user="someone",
    )
    sampling = asked.sampling
    assert (asked.model, asked.n, asked.stream, asked.include_usage) == ("m", 3, True, True)
    assert (asked.priority, asked.cache_salt) == (-5, "me")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.0)
    assert 0 < sampling.top_p < 1e-5, "0 means the likeliest only, not off"
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == ((5, -100.0), (6, 2.5))
    assert sampling.seed == 2**63 - 1
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("END",), (4,), True)
    assert (sampling.logprobs, sampling.speculation) == (3, "ngram")
    prompt = asked.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"enable_thinking": False}
    assert (prompt.add_generation_prompt, prompt.add_special_tokens) == (False, False)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, -1),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, -1),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], count: int) -> None:
    assert chat(**fields).sampling.logprobs == count


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 2}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": True}],
)
def test_chat_logprobs_of_the_wrong_kind(fields: dict[str, Any]) -> None:
    assert refusal(chat, **fields).status == 400


def test_completion_logprobs_are_a_count() -> None:
    assert completion().sampling.logprobs == -1
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=20).sampling.logprobs == 20
    assert "logprobs must be an integer 0..20, got true" in refusal(completion, logprobs=True).message
    assert refusal(completion, logprobs=21).status == 400


def test_the_four_kinds_of_prompt() -> None:
    assert completion(prompt="a").prompts == (TextPrompt(text="a"),)
    assert completion(prompt=["a", "b"]).prompts == (TextPrompt(text="a"), TextPrompt(text="b"))
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [[]], [None], [1, "a"], ["a", 1], [[1.5]], [-1], [True]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


def test_content_parts_are_joined_and_nulls_left_out() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "system", "content": content, "name": None}])
    assert asked.prompts[0].messages == ({"role": "system", "content": "a\nb"},)


def test_earlier_tool_calls_reach_the_template_with_parsed_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    asked = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ]
    )
    assert asked.prompts[0].messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_pointed_at(messages: Any, param: str) -> None:
    error = refusal(chat, messages=messages)
    assert (error.status, error.param) == (400, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    *("messages", "prompt", "model", "n", "stop", "seed", "stream", "stream_options", "logprobs", "echo"),
    *("top_logprobs", "logit_bias", "tools", "temperature", "max_tokens", "best_of", "modalities"),
    *("chat_template_kwargs", "response_format"),
)


@given(st.dictionaries(st.sampled_from(NAMES), json_values, max_size=6))
def test_no_body_makes_anything_but_a_request_or_a_clear_refusal(body: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        try:
            parse(body)
        except ApiError as error:
            assert error.status in (400, 501)
            assert error.message
