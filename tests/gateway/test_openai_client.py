"""The `openai` package as a client: what people's programs see."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from headrace.ipc.messages import Submit
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import MODEL, say, serving, settle

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]


@asynccontextmanager
async def talking(
    answer: Callable[[Submit], Sequence[int]] | None = None, engine: FakeEngine | None = None
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeEngine]]:
    """An async client and the engine it ends up at; no retries, so that errors are seen."""
    async with (
        serving(answer, engine=engine, api_keys=("the-key",)) as service,
        openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="the-key", max_retries=0) as client,
    ):
        yield client, service.engine


async def test_the_synchronous_client_in_a_thread() -> None:
    def use(url: str) -> tuple[str | None, list[str | None], list[str]]:
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
                pieces = [chunk.choices[0].delta.content for chunk in stream]
            return whole.choices[0].message.content, pieces, [model.id for model in client.models.list()]

    async with serving(say("Once upon a time")) as service:
        whole, pieces, models = await asyncio.to_thread(use, f"{service.url}/v1")
    assert whole == "Once upon a time"
    assert "".join(piece or "" for piece in pieces) == whole
    assert models == [MODEL]


async def test_a_chat_with_choices_usage_and_logprobs() -> None:
    async with talking(say("Hello there.")) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, seed=1, max_tokens=20
        )
    assert [choice.message.content for choice in answer.choices] == ["Hello there."] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hello", " there", "."]
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)


async def test_a_stream_with_usage() -> None:
    async with talking(say("Hello there.")) as (client, _):
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


async def test_the_stream_helper_accumulates() -> None:
    async with (
        talking(say("Hello there.")) as (client, _),
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream,
    ):
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello there."] * 2


async def test_completions_of_several_prompts() -> None:
    async with talking(say(" there")) as (client, engine):
        answer = await client.completions.create(
            model=MODEL, prompt=["Hello", "Hi"], n=2, echo=True, max_tokens=5, logit_bias={"5": -100}
        )
        assert engine.seen[0].submit.sampling.logit_bias == ((5, -100.0),)
    assert [c.text for c in answer.choices] == ["Hello there", "Hello there", "Hi there", "Hi there"]


async def test_completions_stream_with_logprobs() -> None:
    async with talking(say(" there was")) as (client, _):
        stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True, logprobs=2)
        chunks = [chunk async for chunk in stream]
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens or []]
    assert tokens == [" there", " was"]


async def test_vllms_extra_fields_pass_through() -> None:
    async with talking(say("Hello there.")) as (client, engine):
        extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
        sampling = engine.seen[0].submit.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (2, ())


async def test_errors_arrive_as_the_packages_own_exceptions() -> None:
    async with talking() as (client, engine):
        with pytest.raises(openai.BadRequestError, match="temperature = 9"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.InternalServerError) as unbuilt:
            await client.responses.create(model=MODEL, input="hi")
        assert unbuilt.value.status_code == 501
        engine.reject = ("queue_full", "8 requests wait, the limit is 8")
        with pytest.raises(openai.RateLimitError, match="the limit is 8"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


async def test_an_error_in_a_stream_raises() -> None:
    engine = FakeEngine(say("Once upon a time"))
    engine.error_after = 2
    async with talking(engine=engine) as (client, _):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="NaN logits"):
            async for _ in stream:
                pass


async def test_the_package_retries_a_full_queue() -> None:
    """It honours Retry-After, and succeeds once there is room."""
    async with talking(say("Hello")) as (client, engine):
        engine.reject = ("queue_full", "full")
        asking = asyncio.create_task(
            client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=MESSAGES)
        )
        await settle(lambda: engine.num_rejected > 0)
        engine.reject = None
        answer = await asking
    assert answer.choices[0].message.content == "Hello"


async def test_closing_a_stream_early_cancels_the_generation() -> None:
    async with talking(engine=FakeEngine(say("fox " * 200), step_s=0.01)) as (client, engine):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(engine.cancelled.wait(), 10)
