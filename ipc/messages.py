"""Every message between a gateway and an engine, one frozen dataclass each.

On the wire a message is a MessagePack array: its tag, then its fields in order (ipc/codec.py). Packed fields
are little-endian bytes. A `stream` is a number that the gateway chose; it is unique within its connection.
Who calls: the gateway builds `ToEngine`, the engine builds `ToGateway`.
"""

from dataclasses import dataclass

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens, and when to stop. The gateway has checked the ranges."""

    max_tokens: int  # output tokens, at least 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 = off; counts prompt and output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to the logit)
    seed: int = 0  # 0..2**63-1; the gateway draws one where the client gave none
    min_tokens: int = 0  # stop ids cannot be chosen before so many output tokens
    stop_token_ids: tuple[int, ...] = ()  # ends the request with reason "stop"; includes EOS unless ignored
    logprobs: int = -1  # -1 = none, 0 = the chosen token's, n = and the n likeliest, at most 20
    speculation: str = "auto"  # auto | mtp | ngram | off: which of the engine's drafters may serve it
    seeded: bool = False  # the client gave the seed: equal requests give equal tokens, whatever was drafted


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a gateway; the engine answers Welcome or Refused."""

    version: int  # PROTOCOL_VERSION
    gateway: str  # id, for logs
    fingerprint: str  # of the model the gateway serves; "" = take what the engine has


@dataclass(frozen=True, slots=True)
class Submit:
    """A generation. Answered by Tokens, or by one Rejected."""

    stream: int
    request_id: str
    tenant: str  # "" or a digest of the API key: salts nothing by itself, groups for fairness
    cache_salt: str  # requests with different salts never share prefix blocks
    priority: int  # lower runs first
    prompt: bytes  # int32[P]
    generated: bytes  # int32[G]: output made before, on another engine; numbering goes on after it
    sampling: Sampling
    credit: int  # output index (exclusive) up to which the engine may run; see Credit


@dataclass(frozen=True, slots=True)
class Credit:
    """The reader took more: the engine may produce output tokens with index below `limit`."""

    stream: int
    limit: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a generation and free its blocks before the next step. Answered by a Finished row."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Heartbeat of a gateway; an engine that misses them cancels the gateway's streams."""

    sent_at: float  # seconds, gateway's monotonic clock; comes back in Load


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender leaves in good order; its streams are cancelled."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The engine takes the gateway in and says what it can hold."""

    version: int
    engine: str  # id, for logs and metrics
    fingerprint: str  # of model, dtype and format: engines with equal ones are interchangeable
    model: str  # served name
    vocab_size: int
    max_model_len: int  # tokens of prompt + output
    max_num_seqs: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The handshake failed, or a frame was malformed; nothing the sender has open goes on."""

    reason: str  # version | fingerprint | malformed | oversized | unknown
    detail: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """This generation is not taken; nothing is queued."""

    stream: int
    code: str  # queue_full | too_long | draining | bad_request
    message: str  # names the value and the limit


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took. Times in seconds, on the engine's clock."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    output_tokens: int
    queue_s: float  # arrival to first schedule
    prefill_s: float  # first schedule to first token
    decode_s: float  # first to last token
    preemptions: int
    gpu_ms: float = 0.0  # its part of the milliseconds that its steps took
    drafted: int = 0  # draft tokens verified for it
    accepted: int = 0  # of those, accepted: output tokens that took no step of their own


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a stream. Its last tokens are in the same or an earlier Tokens message."""

    stream: int
    reason: str  # stop | length | cancelled | error
    usage: Usage
    message: str  # for reason "error": what went wrong


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one row of Tokens; N = the row's count, K = its `top_k`."""

    row: int
    chosen: bytes  # float32[N]
    top_k: int
    top_ids: bytes  # int32[N, K], likeliest first
    top: bytes  # float32[N, K]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one engine step made for one gateway; R rows, one per stream that got tokens."""

    step: int
    streams: bytes  # uint32[R]
    starts: bytes  # uint32[R]: output index of the row's first token
    counts: bytes  # uint8[R]: tokens of the row, at least 1
    token_ids: bytes  # int32[sum(counts)]
    logprobs: tuple[Logprobs, ...]
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Heartbeat of an engine, and what routing and the metrics page need. Counters only grow."""

    engine: str
    state: str  # ready | draining
    ping: float  # `sent_at` of the newest Ping from this gateway, 0 before the first
    running: int  # requests in the batch
    waiting: int
    parked: int  # out of credit
    blocks_used: int  # referenced by requests
    num_blocks: int
    step: int  # steps so far
    step_ms: float  # of the newest step
    prompt_tokens: int  # counter: computed, without cached ones
    cached_tokens: int  # counter
    output_tokens: int  # counter
    prefix_queries: int  # counter: prompt tokens looked up
    prefix_hits: int  # counter: of those, found
    preemptions: int  # counter
    refused_frames: int  # counter
    busy_s: float  # counter: seconds in which a step was made or in flight
    overhead_s: float = 0.0  # counter: of those, charged to no request
    draft_steps: int = 0  # counter: steps that verified drafts
    draft_rows: int = 0  # counter: rows of requests whose drafts were verified
    drafted: int = 0  # counter: draft tokens verified
    accepted: tuple[int, ...] = ()  # counters: draft tokens accepted, by their place in the row


ToEngine = Hello | Submit | Credit | Cancel | Ping | Goodbye
ToGateway = Welcome | Refused | Rejected | Tokens | Load | Goodbye
