"""The engine's message loop: what gateways ask becomes requests, what steps make becomes Tokens messages.

Owns the map from (gateway, stream) to requests. Knows no tensor and no HTTP. One thread; run by core/main.py.
"""

import logging
import time
from collections.abc import Callable

from headrace.core.engine import Engine
from headrace.core.outbox import Tag, finished, pack
from headrace.core.rejection import BadRequest, Rejection
from headrace.core.request import FinishReason, Request
from headrace.core.speculator import SpeculationCounters
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.messages import Cancel, Credit, Goodbye, Load, Rejected, Submit, ToEngine, Tokens
from headrace.ipc.packed import unpack_int32

log = logging.getLogger(__name__)


class EngineServer:
    """Serves one engine over one socket.

    Args:
        engine: warmed up.
        socket: bound; closed by `run` when it returns.
        name: of this engine, in its Load.
        vocab_size: token ids of a prompt must be below it.
        beat_s: longest wait for a message while there is nothing to compute, seconds.
        clock: seconds, monotonic; the same that requests are stamped with.
    """

    def __init__(
        self,
        engine: Engine,
        socket: EngineSocket,
        *,
        name: str,
        vocab_size: int,
        beat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._name = name
        self._vocab_size = vocab_size
        self._beat_s = beat_s
        self._clock = clock
        self._open: dict[bytes, dict[int, Request]] = {}  # by gateway, by stream
        self._drain_until: float | None = None

    def drain(self, seconds: float) -> None:
        """Take no new work; `run` returns when the running requests ended, or after `seconds`. Safe in a signal
        handler; a second call ends at once."""
        self._drain_until = self._clock() + (seconds if self._drain_until is None else 0.0)

    def run(self) -> None:
        """Serve until drained."""
        try:
            while not self._drained():
                self.turn()
        finally:
            self._socket.close()

    def turn(self) -> None:
        """Hear the gateways, run one step, answer."""
        for gateway, message in self._socket.receive(0 if self._engine.has_work else self._beat_s):
            self._take(gateway, message)
        for gateway in self._socket.lost():
            self._drop(gateway)
        if self._engine.has_work:
            outputs = self._engine.step()
            for gateway, tokens in pack(self._engine.clock.steps, outputs).items():
                for ended in tokens.finished:
                    self._forget(gateway, ended.stream)
                self._socket.send(gateway, tokens)
        if self._socket.load_due:
            self._socket.send_load(self.load())

    def load(self) -> Load:
        """How busy this engine is; the socket fills in the heartbeat fields."""
        scheduler, clock = self._engine.scheduler, self._engine.clock
        counters = scheduler.counters
        speculator = self._engine.speculator
        drafts = SpeculationCounters() if speculator is None else speculator.counters
        return Load(
            engine=self._name,
            state="ready" if self._drain_until is None else "draining",
            ping=0.0,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            parked=scheduler.num_parked,
            blocks_used=self._engine.kv.num_used,
            num_blocks=self._engine.kv.num_blocks,
            step=clock.steps,
            step_ms=clock.last_ms,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            refused_frames=0,
            busy_s=self._engine.charges.busy_s,
            overhead_s=self._engine.charges.overhead_s,
            draft_steps=drafts.steps,
            draft_rows=drafts.rows,
            drafted=drafts.drafted,
            accepted=tuple(drafts.accepted),
        )

    def _take(self, gateway: bytes, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(gateway, message)
        elif isinstance(message, Credit):
            request = self._find(gateway, message.stream)
            if request is not None:
                self._engine.scheduler.grant_credit(request.request_id, message.limit)
        elif isinstance(message, Cancel):
            self._cancel(gateway, message.stream)
        elif isinstance(message, Goodbye):
            self._drop(gateway)

    def _submit(self, gateway: bytes, submit: Submit) -> None:
        try:
            if self._drain_until is not None:
                raise Draining("the engine shuts down")
            if self._find(gateway, submit.stream) is not None:
                raise BadRequest(f"stream {submit.stream} is open already")
            request = self._request(gateway, submit)
            self._engine.submit(request)
        except Rejection as error:
            self._socket.send(gateway, Rejected(submit.stream, error.code, str(error)))
            return
        if request.finish_reason is not None:
            self._end(gateway, submit.stream, request, request.finish_reason)
            return
        self._open.setdefault(gateway, {})[submit.stream] = request

    def _request(self, gateway: bytes, submit: Submit) -> Request:
        prompt, generated = unpack_int32(submit.prompt), unpack_int32(submit.generated)
        largest = max(max(prompt, default=0), max(generated, default=0))
        if largest >= self._vocab_size:
            raise BadRequest(f"token id {largest} is not below the vocabulary of {self._vocab_size}")
        return Request(
            # The gateway's own id may come twice; this one cannot.
            f"{gateway.hex()}/{submit.stream}",
            prompt,
            submit.sampling,
            priority=submit.priority,
            tenant=submit.tenant,
            cache_salt=submit.cache_salt,
            generated=generated,
            credit=submit.credit,
            arrival=self._clock(),
            tag=Tag(gateway, submit.stream),
        )

    def _cancel(self, gateway: bytes, stream: int) -> None:
        request = self._find(gateway, stream)
        if request is None:
            return
        self._engine.cancel(request.request_id)
        self._forget(gateway, stream)
        self._end(gateway, stream, request, FinishReason.CANCELLED)

    def _drop(self, gateway: bytes) -> None:
        """A gateway is gone: end all that it had."""
        requests = self._open.pop(gateway, {})
        for request in requests.values():
            self._engine.cancel(request.request_id)
        if requests:
            log.warning("a gateway left; cancelled its %d requests", len(requests))

    def _end(self, gateway: bytes, stream: int, request: Request, reason: FinishReason) -> None:
        end = (finished(stream, request, reason),)
        self._socket.send(gateway, Tokens(self._engine.clock.steps, b"", b"", b"", b"", (), end))

    def _find(self, gateway: bytes, stream: int) -> Request | None:
        return self._open.get(gateway, {}).get(stream)

    def _forget(self, gateway: bytes, stream: int) -> None:
        self._open.get(gateway, {}).pop(stream, None)

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        return self._clock() >= self._drain_until or not any(self._open.values())


class Draining(Rejection):
    """The engine is about to stop."""

    code = "draining"
