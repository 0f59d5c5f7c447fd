"""The usual way to stream tokens in Python: FastAPI, a queue for each request, a pydantic chunk for each token.

Speaks to the same synthetic engine over the same wire as our gateway, grants credit as its queues are read, and needs
no detokeniser: its texts are looked up. `python -P -m headrace.loadtest.peers.fastapi_server --config FILE --port N`.
"""

import argparse
import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from tokenizers import Tokenizer

from headrace.config import Config
from headrace.ipc.messages import Cancel, Credit, Rejected, Sampling, Submit, ToGateway, Tokens
from headrace.ipc.sockets import GatewaySocket

SPACE = "\u0120"  # how a byte-level tokenizer writes one


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    max_tokens: int = 16
    temperature: float = 1.0
    stream: bool = True


class Backend:
    """The engine's tokens, a queue for each stream; None ends one."""

    def __init__(self, config: Config) -> None:
        path = Path(config.model.path)
        self.model = config.model.served_name
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        vocab_size = self.tokenizer.get_vocab_size()
        self.texts = [(self.tokenizer.id_to_token(i) or "").replace(SPACE, " ") for i in range(vocab_size)]
        self.window = config.gateway.credit_window
        self.queues: dict[int, asyncio.Queue[int | None]] = {}
        self.numbers = count(1)
        self.socket = GatewaySocket(
            config.engine_addresses()[0],
            "fastapi",
            config.wire,
            self.on_message,
            lambda _state, _reason: None,
        )

    def on_message(self, message: ToGateway) -> None:
        """Put every token of the step into its stream's queue."""
        if isinstance(message, Rejected):
            self.queues[message.stream].put_nowait(None)
        if not isinstance(message, Tokens):
            return
        token_ids, at = array("i", message.token_ids), 0
        for stream, number in zip(array("I", message.streams), message.counts, strict=True):
            queue = self.queues.get(stream)
            for token_id in token_ids[at : at + number]:
                if queue is not None:
                    queue.put_nowait(token_id)
            at += number
        for finished in message.finished:
            queue = self.queues.get(finished.stream)
            if queue is not None:
                queue.put_nowait(None)

    async def generate(self, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        """The tokens of one generation."""
        stream = next(self.numbers)
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        self.queues[stream] = queue
        sampling = Sampling(max_tokens=max_tokens, seed=stream)
        self.socket.send(
            Submit(stream, f"r{stream}", "", "", 0, array("i", prompt).tobytes(), b"", sampling, self.window)
        )
        taken, ended = 0, False
        try:
            while (token_id := await queue.get()) is not None:
                taken += 1
                if taken % (self.window // 4) == 0:
                    self.socket.send(Credit(stream, taken + self.window))
                yield token_id
            ended = True
        finally:
            del self.queues[stream]
            if not ended:
                self.socket.send(Cancel(stream))


def make_app(config: Config) -> FastAPI:
    backend = Backend(config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        backend.socket.start()
        yield
        backend.socket.close()

    async def chat(request: Request) -> StreamingResponse:
        body = ChatRequest.model_validate(await request.json())
        prompt = backend.tokenizer.encode("\n".join(message.content for message in body.messages)).ids
        name, created = f"chatcmpl-{time.monotonic_ns():x}", int(time.time())

        def line(choices: list[Choice], usage: Usage | None = None) -> str:
            chunk = Chunk(id=name, created=created, model=body.model, choices=choices, usage=usage)
            return f"data: {chunk.model_dump_json()}\n\n"

        async def stream() -> AsyncIterator[str]:
            yield line([Choice(delta=Delta(role="assistant", content=""))])
            produced = 0
            async for token_id in backend.generate(prompt, body.max_tokens):
                produced += 1
                yield line([Choice(delta=Delta(content=backend.texts[token_id]))])
            yield line([Choice(delta=Delta(), finish_reason="length")])
            total = Usage(
                prompt_tokens=len(prompt), completion_tokens=produced, total_tokens=len(prompt) + produced
            )
            yield line([], total)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def ready() -> Response:
        return Response(status_code=200 if backend.socket.state == "ready" else 503)

    app = FastAPI(lifespan=lifespan)
    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
    app.add_api_route("/ready", ready, methods=["GET"], response_model=None)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    data: dict[str, Any] = json.loads(arguments.config.read_text())
    uvicorn.run(
        make_app(Config.from_dict(data)),
        host="127.0.0.1",
        port=arguments.port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
