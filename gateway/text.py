"""Everything that turns text into tokens and back for one model: tokenizer, chat template, generation defaults.

Long texts are tokenised in a small thread pool (the tokenizer releases the GIL), so that they never hold the event
loop. Knows no HTTP. The worker loads one, jobs.py asks it.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.gateway.chat_template import ChatTemplate
from headrace.gateway.defaults import GenerationDefaults, load_defaults, read_json
from headrace.gateway.detokenizer import Detokenizer, detokenizer
from headrace.gateway.errors import bad_request, busy
from headrace.gateway.schemas import ChatPrompt, Prompt, TextPrompt
from headrace.gateway.segments import Segments, cuttable
from headrace.gateway.vocabulary import Vocabulary

INLINE_CHARACTERS = 4096  # about 2 ms; anything longer goes to the pool
POOL_THREADS = 2
MAX_WAITING = 64  # long texts in the pool and before it; one more is refused
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextError(ValueError):
    """The model folder's text side cannot be used; the message names the file."""


class Text:
    """Tokenizer and template of one model.

    Args:
        tokenizer: as loaded.
        template: None = the model has none, and chat requests are refused.
        defaults: of the model's generation_config.json.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, defaults: GenerationDefaults
    ) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self.defaults = defaults
        self._tokenizer = tokenizer
        self._segments = Segments(tokenizer) if cuttable(tokenizer) else None
        self._template = template
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="tokenize")
        self._waiting = 0

    @staticmethod
    def load(folder: Path) -> "Text":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Raises:
            TextError: no usable tokenizer.json.
            BadTemplate: the chat template does not compile.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"{path} is missing; a model needs its tokenizer in that format")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{path} is no tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        source = _template_source(folder, config)
        template = ChatTemplate(source, special) if source else None
        eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return Text(tokenizer, template, load_defaults(folder, eos))

    def close(self) -> None:
        """Stop the pool; texts that wait in it are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, its template applied.

        Raises:
            ApiError: 400 where the template refuses it, 429 where too many long texts wait.
        """
        if isinstance(prompt, tuple):
            return list(prompt)
        if _size(prompt) <= INLINE_CHARACTERS:
            return self._encode(prompt)
        if self._waiting >= MAX_WAITING:
            raise busy(f"{MAX_WAITING} long prompts wait for the tokenizer, the limit", "tokenizer_busy")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, prompt)
        finally:
            self._waiting -= 1

    def least_tokens(self, prompt: Prompt) -> int:
        """A lower bound of its tokens, cheap: what cannot fit need not be tokenised to know it."""
        if isinstance(prompt, tuple):
            return len(prompt)
        return _size(prompt) // self.vocabulary.longest if self.vocabulary.verbatim else 0

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat, as the model's template has it.

        Raises:
            ApiError: 400, the template refuses it or there is none.
        """
        if self._template is None:
            raise bad_request("the model has no chat template; use /v1/completions", "messages")
        return self._template.render(prompt.messages, prompt.add_generation_prompt, prompt.template_kwargs)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one stream."""
        return detokenizer(self.vocabulary)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _encode(self, prompt: ChatPrompt | TextPrompt) -> list[int]:
        text = self.render(prompt) if isinstance(prompt, ChatPrompt) else prompt.text
        if self._segments is not None and not prompt.add_special_tokens:
            return self._segments.encode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens).ids
        return ids


def _size(prompt: ChatPrompt | TextPrompt) -> int:
    """Characters, roughly, that will be tokenised."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.get("content", "")) for message in prompt.messages)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    """chat_template.jinja, else the template in tokenizer_config.json (which may hold several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _content(token: Any) -> str:
    """A special token is a string, or an object with its flags."""
    return str(token["content"]) if isinstance(token, dict) else str(token)
