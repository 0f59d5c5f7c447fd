"""Chat templates and tokenising: equal to transformers, sandboxed, and off the loop where it takes long."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace.config import embedded_model
from headrace.gateway.chat_template import BadTemplate, ChatTemplate
from headrace.gateway.errors import ApiError
from headrace.gateway.schemas import ChatPrompt, TextPrompt
from headrace.gateway.text import Text, TextError
from tests.gateway.service import embedded_text

MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me <b>a story</b> & 'sing' — naïve 😀\n"},
    {"role": "assistant", "content": "Once."},
    {"role": "user", "content": "More!"},
)


def render(source: str, messages: Any = MESSAGES, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, True, kwargs)


async def test_a_chat_has_the_tokens_that_transformers_gives_it() -> None:
    reference = AutoTokenizer.from_pretrained(embedded_model())
    for generation in (True, False):
        expected = reference.apply_chat_template(
            list(MESSAGES), add_generation_prompt=generation, tokenize=True, return_dict=False
        )
        prompt = ChatPrompt(messages=MESSAGES, add_generation_prompt=generation)
        assert await embedded_text().encode(prompt) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}{% endif %}\n{% endfor %}\nend",
        "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
        "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{% generation %}{{ bos_token }}{{ messages[-1]['content'] }}{% endgeneration %}",
        "{{ enable_thinking }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    reference = AutoTokenizer.from_pretrained(embedded_model())
    reference.bos_token = "<s>"
    expected = reference.apply_chat_template(
        list(MESSAGES),
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert render(source, enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content.strip() }}", "has no element 99"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
    ],
)
def test_a_template_that_fails_is_a_400_with_its_reason(source: str, told: str) -> None:
    with pytest.raises((ApiError, BadTemplate)) as caught:
        render(source, messages=list(MESSAGES))
    assert told in str(caught.value)


def test_a_template_that_does_not_compile_says_where() -> None:
    with pytest.raises(BadTemplate, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer.json is missing"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="is no tokenizer"):
        Text.load(tmp_path)


async def test_a_model_without_a_template_takes_completions_only(tmp_path: Path) -> None:
    shutil.copy(embedded_model() / "tokenizer.json", tmp_path)
    text = Text.load(tmp_path)
    assert await text.encode(TextPrompt(text="Hi"))
    with pytest.raises(ApiError, match="no chat template"):
        await text.encode(ChatPrompt(messages=MESSAGES))
    text.close()


async def test_a_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    text = Text.load(tmp_path)
    assert text.render(ChatPrompt(messages=MESSAGES)) == "Be brief.!"
    text.close()


def test_generation_defaults_come_from_the_model(tmp_path: Path) -> None:
    defaults = embedded_text().defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.7, 0.95, 0)
    assert defaults.eos_ids == (2, 0)
    shutil.copy(embedded_model() / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    bare = Text.load(tmp_path)
    assert (bare.defaults.temperature, bare.defaults.top_p, bare.defaults.eos_ids) == (1.0, 1.0, (5,))
    bare.close()


async def test_long_texts_are_tokenised_off_the_loop_and_not_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop stays free while every thread is busy; one text too many is refused, not queued."""
    text = Text.load(embedded_model())
    release, threads = threading.Event(), set()
    encode = text._encode

    def slow(prompt: Any) -> list[int]:
        threads.add(threading.current_thread())
        release.wait()
        return encode(prompt)

    monkeypatch.setattr(text, "_encode", slow)
    long = TextPrompt(text="word " * 2000)
    running = [asyncio.create_task(text.encode(long)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await text.encode(long)
    assert caught.value.status == 429
    release.set()
    results = await asyncio.gather(*running)
    assert len({len(result) for result in results}) == 1
    assert threading.main_thread() not in threads
    assert len(threads) <= 2
    text.close()
