"""What a client may ask for, once parsed and checked: plain frozen data, independent of the API it came by.

Knows no JSON and no defaults of a model (None = the model's own). gateway/openai makes these, jobs.py takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CHOICES = 128  # `n`
MAX_PROMPTS = 1024  # prompts of one completion request
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
SPECULATION = ("auto", "mtp", "ngram", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """How to choose tokens. None = the model's generation_config.json, else neutral."""

    max_tokens: int | None = None  # None = up to the context
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None = drawn
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1 = none, 0 = the chosen token's, n = and the n likeliest
    speculation: str = "auto"  # which drafters may serve it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages for the model's chat template."""

    messages: tuple[Mapping[str, Any], ...]  # role, content (a string) and what the template may use besides
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # templates write their own BOS
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text for the tokenizer."""

    text: str
    add_special_tokens: bool = True  # as the tokenizer's post-processor has it


TokenPrompt = tuple[int, ...]
Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One API request: `n` choices for each prompt."""

    model: str  # "" = the one served
    prompts: tuple[Prompt, ...]
    sampling: SamplingRequest
    n: int = 1
    stream: bool = False
    include_usage: bool = False  # a last chunk with the usage
    echo: bool = False  # the answer begins with the prompt
    priority: int = 0  # lower runs first
    cache_salt: str = ""
