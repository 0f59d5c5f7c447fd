"""The floor of aiohttp: one handler without checks, template, detokeniser, log or metrics, writing directly.

Speaks to the same synthetic engine over the same wire as our gateway. What our gateway costs above it is what its
features cost. `python -P -m headrace.loadtest.peers.aiohttp_server --config FILE --port N`.
"""

import argparse
import asyncio
import json
import time
from array import array
from itertools import count
from pathlib import Path

import orjson
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

from headrace.config import Config
from headrace.ipc.messages import Cancel, Credit, Rejected, Sampling, Submit, ToGateway, Tokens
from headrace.ipc.sockets import GatewaySocket

SPACE = "\u0120"  # how a byte-level tokenizer writes one


class Answer:
    """One open stream: bytes around each text, and the transport they go to."""

    __slots__ = ("credit", "ended", "head", "tail", "taken", "transport")

    def __init__(self, transport: asyncio.Transport, head: bytes, tail: bytes, credit: int) -> None:
        self.transport = transport
        self.head = head
        self.tail = tail
        self.credit = credit
        self.taken = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Backend:
    """The engine's tokens, written as they come."""

    def __init__(self, config: Config) -> None:
        path = Path(config.model.path)
        self.model = config.model.served_name
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        vocab_size = self.tokenizer.get_vocab_size()
        texts = [(self.tokenizer.id_to_token(i) or "").replace(SPACE, " ") for i in range(vocab_size)]
        self.texts = [orjson.dumps(text) for text in texts]
        self.window = config.gateway.credit_window
        self.answers: dict[int, Answer] = {}
        self.numbers = count(1)
        address = config.engine_addresses()[0]
        self.socket = GatewaySocket(
            address, "aiohttp", config.wire, self.on_message, lambda _state, _reason: None
        )

    def on_message(self, message: ToGateway) -> None:
        """Write every token of the step to its stream's transport."""
        if isinstance(message, Rejected):
            self.answers[message.stream].end()
        if not isinstance(message, Tokens):
            return
        token_ids, at = array("i", message.token_ids), 0
        for stream, number in zip(array("I", message.streams), message.counts, strict=True):
            answer = self.answers.get(stream)
            if answer is not None:
                texts = [answer.head + self.texts[i] + answer.tail for i in token_ids[at : at + number]]
                payload = b"".join(texts)
                answer.transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))
                answer.taken += number
                if answer.taken >= answer.credit - self.window * 3 // 4:
                    answer.credit = answer.taken + self.window
                    self.socket.send(Credit(stream, answer.credit))
            at += number
        for finished in message.finished:
            answer = self.answers.get(finished.stream)
            if answer is not None:
                answer.end()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt = self.tokenizer.encode("\n".join(message["content"] for message in body["messages"])).ids
        stream, transport = next(self.numbers), request.transport
        assert transport is not None
        head = orjson.dumps(
            {
                "id": f"chatcmpl-{stream:x}",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": self.model,
                "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}],
            }
        )
        before, _, after = head.partition(b'"content":""')
        answer = Answer(transport, b'data: %b"content":' % before, b"%b\n\n" % after, self.window)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        max_tokens = body["max_tokens"]
        self.answers[stream] = answer
        sampling = Sampling(max_tokens=max_tokens, seed=stream)
        packed = array("i", prompt).tobytes()
        self.socket.send(Submit(stream, f"r{stream}", "", "", 0, packed, b"", sampling, self.window))
        try:
            await answer.ended
        finally:
            del self.answers[stream]
            if not answer.ended.done():
                self.socket.send(Cancel(stream))
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": answer.taken,
            "total_tokens": len(prompt) + answer.taken,
        }
        last = orjson.dumps(
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage}
        )
        await response.write_eof(b"data: %b\n\ndata: [DONE]\n\n" % last)
        return response


async def serve(config: Config, port: int) -> None:
    backend = Backend(config)

    async def ready(_request: web.Request) -> web.Response:
        return web.Response(status=200 if backend.socket.state == "ready" else 503)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", backend.chat)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    backend.socket.start()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await asyncio.Event().wait()
    finally:
        backend.socket.close()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    config = Config.from_dict(json.loads(arguments.config.read_text()))
    uvloop.run(serve(config, arguments.port))


if __name__ == "__main__":
    main()
