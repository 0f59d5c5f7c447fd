"""An engine without a model: real wire, real credit and cancel, made-up tokens at a chosen pace.

`python -P -m headrace.loadtest.synthetic --config FILE --index I --step-ms 20` stands in for an engine process;
`SyntheticEngine` runs the same on a thread, for tests. Batch and tokens are loadtest/synthetic_batch.py's.
"""

import argparse
import json
import logging
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from headrace.config import Config, WireConfig
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.messages import Tokens
from headrace.loadtest.synthetic_batch import SyntheticBatch
from headrace.loadtest.synthetic_options import SyntheticOptions
from headrace.loadtest.synthetic_tokens import printable_ids

MAX_WAIT_S = 0.02  # how late a stop is noticed


class SyntheticLoop:
    """Socket and batch, turned by `run` until `stop`. The switches may be called from any thread.

    Args:
        address: to bind.
        wire: as the gateways have it.
        options: limits, speed, tokens.
        on_step: told the time (time.monotonic) at which each step ended, before its tokens are sent.
    """

    def __init__(
        self,
        address: str,
        wire: WireConfig,
        options: SyntheticOptions,
        on_step: Callable[[float], None] | None = None,
    ) -> None:
        self.socket = EngineSocket(address, options.welcome(), wire)
        self._batch = SyntheticBatch(options, time.monotonic)
        self._stopping = threading.Event()
        self._thawed = threading.Event()
        self._thawed.set()
        self._goodbye = True
        self._on_step = on_step
        self._drain_until: float | None = None

    def stop(self, *, goodbye: bool = True) -> None:
        """End `run` soon, whatever is open; without a goodbye it vanishes as a killed process does."""
        self._goodbye = goodbye
        self._stopping.set()
        self._thawed.set()

    def drain(self, seconds: float) -> None:
        """Take nothing new; end `run` when what is open has ended, or after `seconds`."""
        self._drain_until = time.monotonic() + seconds

    def freeze(self) -> None:
        """Hang: stay connected and do nothing until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def run(self) -> None:
        """Serve until told to stop, then close the socket."""
        batch = self._batch
        started = 0.0
        deadline: float | None = None  # of the step in flight
        try:
            while not self._stopping.is_set() and not self._drained():
                self._thawed.wait()
                now = time.monotonic()
                if deadline is None and (step_s := batch.begin()) is not None:
                    started, deadline = now, now + step_s
                self._receive(MAX_WAIT_S if deadline is None else max(0.0, min(MAX_WAIT_S, deadline - now)))
                if deadline is None:
                    self._send(batch.flush())
                elif (now := time.monotonic()) >= deadline:
                    deadline = None
                    if self._on_step is not None:
                        self._on_step(now)
                    self._send(batch.commit(now - started))
                if self.socket.load_due:
                    self.socket.send_load(batch.load())
        finally:
            self.socket.close(goodbye=self._goodbye)

    def _receive(self, timeout_s: float) -> None:
        for gateway, message in self.socket.receive(timeout_s):
            answer = self._batch.handle(gateway, message)
            if answer is not None:
                self.socket.send(gateway, answer)
        for gateway in self.socket.lost():
            self._batch.drop(gateway)

    def _send(self, messages: Sequence[tuple[bytes, Tokens]]) -> None:
        for gateway, tokens in messages:
            self.socket.send(gateway, tokens)

    def _drained(self) -> bool:
        """Whether a drain has come to its end; tells the gateways when one begins."""
        if self._drain_until is None:
            return False
        if not self._batch.draining:
            self._batch.draining = True
            self.socket.send_load(self._batch.load())
        return self._batch.num_open == 0 or time.monotonic() >= self._drain_until


class SyntheticEngine:
    """The loop on a thread of this process, for tests; a context manager.

    Args:
        address: ipc://PATH or tcp://HOST:PORT; read `address` for the port that was bound.
        options: limits, speed, tokens.
        wire: as the gateways have it.
    """

    def __init__(self, address: str, options: SyntheticOptions, wire: WireConfig) -> None:
        self.options = options
        self._loop = SyntheticLoop(address, wire, options)
        self._thread = threading.Thread(target=self._loop.run, name=options.engine, daemon=True)

    @property
    def address(self) -> str:
        """As bound."""
        return self._loop.socket.address

    def start(self) -> None:
        """Serve. The socket is bound already, since the constructor."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye and end; what is open is lost."""
        self._loop.stop()
        self._thread.join()

    def kill(self) -> None:
        """Vanish without a word, as a killed process does."""
        self._loop.stop(goodbye=False)
        self._thread.join()

    def drain(self, seconds: float) -> None:
        """Take nothing new, end when what is open has ended; returns at once."""
        self._loop.drain(seconds)

    def join(self) -> None:
        """Wait for the end of a drain."""
        self._thread.join()

    def freeze(self) -> None:
        """Hang until `thaw`: connected, silent."""
        self._loop.freeze()

    def thaw(self) -> None:
        self._loop.thaw()

    def __enter__(self) -> "SyntheticEngine":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def options_from(config: Config, arguments: argparse.Namespace) -> SyntheticOptions:
    """What the configuration says an engine is, with the pace of the command line."""
    path = Path(config.model.path)
    model = json.loads((path / "config.json").read_text())
    token_ids = arguments.token_ids or printable_ids(path)
    max_model_len = config.model.max_model_len or int(model["max_position_embeddings"])
    limits = config.scheduler.for_device(card=False)
    max_num_seqs = limits.max_num_seqs
    blocks = max_num_seqs * -(-max_model_len // config.cache.block_size)
    return SyntheticOptions(
        token_ids=tuple(token_ids),
        step_ms=arguments.step_ms,
        token_ms=arguments.token_ms,
        tokens_per_row=arguments.tokens_per_row,
        engine=f"engine-{arguments.index}",
        model=config.model.served_name,
        vocab_size=int(model["vocab_size"]),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        num_blocks=config.cache.num_blocks or blocks,
        block_size=config.cache.block_size,
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line of one engine process."""
    parser = argparse.ArgumentParser(
        prog="headrace.loadtest.synthetic", description="An engine without a model."
    )
    parser.add_argument("--config", type=Path, required=True, help="the service's configuration, JSON")
    parser.add_argument("--index", type=int, required=True, help="which of the configured engines this is")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="fixed time of a step; 0 = as fast as it can"
    )
    parser.add_argument("--token-ms", type=float, default=0.0, help="more for each query token of the step")
    parser.add_argument("--tokens-per-row", type=int, default=1, choices=range(1, 256), metavar="1..255")
    parser.add_argument("--step-log", type=Path, help="append the end of each step to this file, as doubles")
    parser.add_argument(
        "--token-ids",
        type=_int_list,
        default=(),
        help="the tokens to choose from, comma-separated; default: words",
    )
    return parser.parse_args(argv)


def _log_to(path: Path) -> Callable[[float], None]:
    """Appends doubles, unbuffered: a reader may look at any time."""
    file = path.open("ab", buffering=0)  # open to the end of the process

    def log(now: float) -> None:
        file.write(struct.pack("d", now))

    return log


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT, then drain for at most `gateway.drain_s`."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = Config.from_dict(json.loads(arguments.config.read_text()))
    address = config.engine_addresses()[arguments.index]
    on_step = None if arguments.step_log is None else _log_to(arguments.step_log)
    loop = SyntheticLoop(address, config.wire, options_from(config, arguments), on_step)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: loop.drain(config.gateway.drain_s))
    logging.getLogger(__name__).info("engine %d ready", arguments.index)
    loop.run()


if __name__ == "__main__":
    main(sys.argv[1:])
