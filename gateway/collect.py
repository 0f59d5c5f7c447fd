"""Answers in one piece: collects every choice's events until all have ended.

Knows no HTTP. The reader here is the process itself, so every event counts as taken at once.
"""

import asyncio
from collections.abc import Callable, Sequence

from headrace.gateway.errors import ApiError
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event


class Collection:
    """The choices of one job; `wait` returns when the last has ended or the first has failed."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.sinks = [_Collector(stream, self._ended) for stream in streams]
        self._missing = len(streams)
        self._done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> tuple[list[list[Event]], list[Outcome]]:
        """Events and outcome of each choice.

        Raises:
            ApiError: the first failure of a choice.
        """
        try:
            error = await self._done
        finally:
            sinks, self.sinks = self.sinks, []  # they know the collection; see Stream._close
        if error is not None:
            raise error
        return [sink.events for sink in sinks], [sink.outcome for sink in sinks if sink.outcome is not None]

    def _ended(self, error: ApiError | None) -> None:
        self._missing -= 1
        if not self._done.done() and (error is not None or not self._missing):
            self._done.set_result(error)


class _Collector:
    """The sink of one choice."""

    def __init__(self, stream: Stream, on_end: Callable[[ApiError | None], None]) -> None:
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        self._stream = stream
        self._on_end = on_end

    def write(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
        self._stream.acknowledge(events[-1].seq)

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._on_end(outcome.error)
