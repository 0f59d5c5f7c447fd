"""Routes generations to engines: one link per engine, least-loaded first, a bounded number of open streams.

Knows no HTTP and no text. The API handlers submit here; the links call their listeners.
"""

from collections.abc import Sequence
from time import monotonic

from headrace.gateway.handle import Generation, Handle, Listener, NoEngine, TooManyStreams
from headrace.gateway.link import Connect, EngineLink

__all__ = ["Dispatcher", "Generation", "Handle", "Listener", "NoEngine", "TooManyStreams"]

REROUTED = ("queue_full", "draining")  # rejections that another engine may not share


class Dispatcher:
    """Takes generations, picks an engine for each, and steers them through their handles.

    Engines that are lost, draining, refused or serve another model get no new work. All methods belong to the
    event loop that called `start`.

    Args:
        addresses: one ZeroMQ address per engine; the position is the engine's `engine` label.
        connect: makes the socket of an address.
        max_streams: open generations at most; one more raises TooManyStreams.
    """

    def __init__(self, addresses: Sequence[str], connect: Connect, max_streams: int) -> None:
        self._links = [
            EngineLink(index, address, connect, self._on_rejected) for index, address in enumerate(addresses)
        ]
        self._max_streams = max_streams
        self._turn = 0  # among equals the engines take turns
        self._draining = False

    def start(self) -> None:
        """Connect to every engine; needs the running event loop."""
        for link in self._links:
            link.start()

    def close(self) -> None:
        """Say goodbye to every engine; listeners of what is still open hear `on_lost`."""
        for link in self._links:
            link.close()

    def drain(self) -> None:
        """Take no new generations from now on; those that run go on."""
        self._draining = True

    def submit(self, generation: Generation, listener: Listener) -> Handle:
        """Send a generation to the least-loaded ready engine.

        Raises:
            TooManyStreams: `max_streams` are open.
            NoEngine: the worker drains, or no engine takes work; the message says why.
        """
        if self._draining:
            raise NoEngine("the server is shutting down")
        if self.num_streams >= self._max_streams:
            raise TooManyStreams(f"{self._max_streams} generations are open, the limit of this worker")
        handle = Handle(generation, listener, self, monotonic())
        self._place(handle)
        return handle

    @property
    def engines(self) -> Sequence[EngineLink]:
        """Every engine's link: state, reason, welcome and newest load are for reading."""
        return self._links

    @property
    def ready(self) -> bool:
        """True when a new generation would find an engine."""
        return not self._draining and bool(self._candidates())

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_streams(self) -> int:
        """Open generations, those that are ending included."""
        return sum(link.num_streams for link in self._links)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt + output that every known engine can hold; 0 before the first answered."""
        return min((link.welcome.max_model_len for link in self._links if link.welcome), default=0)

    @property
    def vocab_size(self) -> int:
        """Of the model served; 0 before the first engine answered."""
        return next((link.welcome.vocab_size for link in self._links if link.welcome), 0)

    def why_not_ready(self) -> str:
        """One clause per engine, for a person."""
        if self._draining:
            return "the server is shutting down"
        return "; ".join(f"engine {link.index}: {self._state(link)}" for link in self._links)

    def cancel(self, handle: Handle, *, report: bool) -> None:
        if handle.open:
            self._links[handle.engine].cancel(handle, report=report)

    def grant(self, handle: Handle, limit: int) -> None:
        if handle.open:
            self._links[handle.engine].grant(handle, limit)
        else:
            handle.credit = max(handle.credit, limit)  # a resubmission takes it along

    def resubmit(self, handle: Handle, generated: bytes) -> None:
        assert not handle.open, "resubmit follows on_lost"
        handle.generated = generated
        handle.refused_by = ()
        handle.outcome = ""
        self._place(handle)

    def _place(self, handle: Handle) -> None:
        for link in self._candidates():
            if link.index not in handle.refused_by and link.submit(handle):
                return
        raise NoEngine(f"no engine takes work now ({self.why_not_ready()})")

    def _candidates(self) -> list[EngineLink]:
        """Engines that take new work and serve one and the same model, least loaded first."""
        ready = [link for link in self._links if link.state == "ready" and link.welcome is not None]
        if len(ready) < 2:
            return ready
        self._turn += 1
        count = len(self._links)
        served = self._fingerprint(ready)
        ready = [link for link in ready if link.welcome is not None and link.welcome.fingerprint == served]
        return sorted(ready, key=lambda link: (link.pressure, (link.index - self._turn) % count))

    def _fingerprint(self, ready: Sequence[EngineLink]) -> str:
        """The model of the ready engine with the lowest index is the one served."""
        return next(link.welcome.fingerprint for link in ready if link.welcome is not None)

    def _state(self, link: EngineLink) -> str:
        return f"{link.state} ({link.reason})" if link.reason else link.state

    def _on_rejected(self, link: EngineLink, handle: Handle, code: str, message: str) -> None:
        """Try the engines that have not turned it away; the listener hears of it when none is left."""
        if code in REROUTED:
            handle.refused_by = (*handle.refused_by, link.index)
            try:
                self._place(handle)
            except NoEngine:
                pass
            else:
                return
        link.stats.rejected[code] = link.stats.rejected.get(code, 0) + 1
        handle.listener.on_rejected(code, message)
