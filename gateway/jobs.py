"""From a checked request to running streams: model name, tokens, limits of the model, defaults, seeds, submission.

Knows no HTTP and no JSON. The HTTP handlers and the WebSocket share one Jobs.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os import urandom

from headrace.config import Config
from headrace.gateway.assembler import Assembler
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.dispatcher import Dispatcher, Generation
from headrace.gateway.errors import ApiError, bad_request, unavailable
from headrace.gateway.schemas import ChatPrompt, GenerationRequest, Prompt, SamplingRequest, TextPrompt
from headrace.gateway.stops import StopStrings
from headrace.gateway.stream import Sink, Stream
from headrace.gateway.text import Text
from headrace.ipc.messages import Sampling

SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sequence to generate."""

    index: int  # in the answer: prompts in order, `n` for each
    prompt: bytes  # int32[P]
    num_prompt: int
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that fits the model, ready to be submitted."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str  # of the model, as OpenAI's system_fingerprint
    tenant: str
    request: GenerationRequest
    choices: tuple[Choice, ...]
    echoes: tuple[str, ...]  # per choice: the prompt's text, if it is to be repeated
    stops: StopStrings | None
    price_per_gpu_hour: float  # dollars, 0 = unknown


class Jobs:
    """Prepares and starts generations.

    Args:
        config: resolved.
        dispatcher: takes the generations.
        text: of the model served.
    """

    def __init__(self, config: Config, dispatcher: Dispatcher, text: Text) -> None:
        self.text = text
        self._model = config.model.served_name
        self._window = config.gateway.credit_window
        self._deadlines = Deadlines(config.gateway.request_timeout_s)
        self._price = config.gateway.price_per_gpu_hour
        self._dispatcher = dispatcher
        self._known = ("?", "")  # the engines' fingerprint, and ours of it

    def check_model(self, model: str) -> None:
        """Raise 404 for a model that is not served; "" is the one served."""
        if model and model != self._model:
            message = f'the model "{model}" does not exist here; "{self._model}" is served'
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt + output.

        Raises:
            ApiError: 503, no engine has answered yet.
        """
        limit = self._dispatcher.max_model_len
        if not limit:
            raise unavailable(f"no engine has answered yet ({self._dispatcher.why_not_ready()})")
        return limit

    async def prepare(self, request: GenerationRequest, tenant: str, prefix: str) -> Job:
        """Tokenise and check against the model.

        Args:
            tenant: as the key ring has it.
            prefix: of the job's id: chatcmpl, cmpl, ...

        Raises:
            ApiError: 400, 404, 429 or 503.
        """
        self.check_model(request.model)
        limit = self.max_model_len
        for prompt in request.prompts:
            if (least := self.text.least_tokens(prompt)) >= limit:
                raise _too_long(f"at least {least}", limit, prompt)
        prompts = [await self.text.encode(prompt) for prompt in request.prompts]
        drawn = urandom(16 + 8)  # the id, which nobody must guess, and the seed where none was given
        seed = request.sampling.seed
        if seed is None:
            seed = int.from_bytes(drawn[16:], "little") >> (64 - SEED_BITS)
        choices: list[Choice] = []
        echoes: list[str] = []
        for prompt, token_ids in zip(request.prompts, prompts, strict=True):
            self._check_prompt(prompt, token_ids, limit)
            base = self._sampling(request.sampling, len(token_ids), limit)
            packed = array("i", token_ids).tobytes()
            echo = self._echo(prompt, token_ids) if request.echo else ""
            for number in range(request.n):
                choices.append(
                    Choice(
                        index=len(choices),
                        prompt=packed,
                        num_prompt=len(token_ids),
                        sampling=base(seed=choice_seed(seed, number)),
                    )
                )
                echoes.append(echo)
        return Job(
            id=f"{prefix}-{drawn[:16].hex()}",
            created=int(time.time()),
            model=self._model,
            fingerprint=self._fingerprint(),
            tenant=tenant,
            request=request,
            choices=tuple(choices),
            echoes=tuple(echoes),
            stops=StopStrings(request.sampling.stop) if request.sampling.stop else None,
            price_per_gpu_hour=self._price,
        )

    def streams(self, job: Job) -> list[Stream]:
        """A fresh stream per choice, not yet started."""
        return [
            Stream(
                Assembler(choice.sampling, self.text.detokenizer(), job.stops),
                choice.num_prompt,
                choice.sampling.max_tokens,
                self._window,
            )
            for choice in job.choices
        ]

    def start(self, job: Job, streams: Sequence[Stream], sinks: Sequence[Sink]) -> None:
        """Submit every choice; all or none.

        Raises:
            NoEngine, TooManyStreams: nothing runs.
        """
        try:
            for choice, stream, sink in zip(job.choices, streams, sinks, strict=True):
                generation = Generation(
                    request_id=f"{job.id}-{choice.index}",
                    prompt=choice.prompt,
                    sampling=choice.sampling,
                    credit=self._window,
                    tenant=job.tenant,
                    cache_salt=job.request.cache_salt,
                    priority=job.request.priority,
                )
                stream.start(sink, partial(self._dispatcher.submit, generation), self._deadlines)
        except Exception:
            for stream in streams:
                stream.cancel()
            raise

    def _check_prompt(self, prompt: Prompt, token_ids: Sequence[int], limit: int) -> None:
        if not token_ids:
            raise bad_request("the prompt has no tokens; at least one is needed", _param(prompt))
        if len(token_ids) >= limit:
            raise _too_long(str(len(token_ids)), limit, prompt)
        if isinstance(prompt, tuple):
            self._check_ids(token_ids, "prompt")

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._dispatcher.vocab_size
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise bad_request(
                f"{param} contains the token id {highest}, the vocabulary has {vocab_size}", param
            )

    def _sampling(self, asked: SamplingRequest, num_prompt: int, limit: int) -> Callable[..., Sampling]:
        """Everything of the wire's Sampling but the seed."""
        defaults = self.text.defaults
        room = limit - num_prompt
        max_tokens = asked.max_tokens
        if max_tokens is None:
            max_tokens = min(room, defaults.max_new_tokens or room)
        elif max_tokens > room:
            raise bad_request(
                f"{num_prompt} prompt tokens + max_tokens = {max_tokens} make {num_prompt + max_tokens}, "
                f"the context is {limit}",
                "max_tokens",
                "context_length_exceeded",
            )
        if asked.min_tokens > max_tokens:
            message = f"min_tokens = {asked.min_tokens} is more than the {max_tokens} that may be generated"
            raise bad_request(message, "min_tokens")
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        self._check_ids([token_id for token_id, _ in asked.logit_bias], "logit_bias")
        eos = () if asked.ignore_eos else defaults.eos_ids
        return partial(
            Sampling,
            max_tokens=max_tokens,
            temperature=_or(asked.temperature, defaults.temperature),
            top_p=_or(asked.top_p, defaults.top_p),
            top_k=defaults.top_k if asked.top_k is None else asked.top_k,
            min_p=_or(asked.min_p, defaults.min_p),
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=_or(asked.repetition_penalty, defaults.repetition_penalty),
            logit_bias=asked.logit_bias,
            min_tokens=asked.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*asked.stop_token_ids, *eos))),
            logprobs=asked.logprobs,
            speculation=asked.speculation,
            seeded=asked.seed is not None,
        )

    def _echo(self, prompt: Prompt, token_ids: list[int]) -> str:
        return prompt.text if isinstance(prompt, TextPrompt) else self.text.decode(token_ids)

    def _fingerprint(self) -> str:
        known = next((link.welcome for link in self._dispatcher.engines if link.welcome), None)
        name = known.fingerprint if known else ""
        if name != self._known[0]:
            self._known = (name, f"fp_{blake2b(name.encode(), digest_size=6).hexdigest()}")
        return self._known[1]


def choice_seed(seed: int, number: int) -> int:
    """The seed of choice `number`: the first keeps the request's, so that n = 1 gives the first of n = 4.

    The others take a digest of both: no two choices of near seeds coincide.
    """
    if not number:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + number.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def _too_long(found: str, limit: int, prompt: Prompt) -> ApiError:
    message = f"the prompt has {found} tokens, the context is {limit}, of which one must be left for output"
    return bad_request(message, _param(prompt), "context_length_exceeded")


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
