"""The workers of one service tell each other what they counted, over unix sockets in the run directory.

Any worker can then answer /metrics with the sum. What is shown was first written to a file, and a restarted
worker goes on from its file: the sums never fall. Used by the worker process; health.py asks it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.gateway.tally import Tally, TallyError

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
SAVE_EVERY_S = 1.0
MAX_TALLY_BYTES = 4 << 20


class Peers:
    """This worker's side of the exchange.

    Args:
        run_dir: where every worker has `worker-<i>.sock` and `worker-<i>.tally`.
        index: this worker.
        count: workers of the service.
        tally: makes this worker's tally.
    """

    def __init__(self, run_dir: Path, index: int, count: int, tally: Callable[[], Tally]) -> None:
        self._run_dir = run_dir
        self._index = index
        self._others = [i for i in range(count) if i != index]
        self._tally = tally
        self._server: asyncio.Server | None = None
        self._saver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen for the other workers, and save once a second from now on."""
        path = socket_path(self._run_dir, self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path)
        self._saver = asyncio.create_task(self._save_regularly())

    async def close(self) -> None:
        if self._saver is not None:
            self._saver.cancel()
            with suppress(asyncio.CancelledError):
                await self._saver
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self.save()

    async def ask(self) -> list[Tally]:
        """The other workers' tallies: from themselves, else from their files; without either, left out."""
        self.save()
        found = await asyncio.gather(*(self._ask_one(index) for index in self._others))
        return [tally for tally in found if tally is not None]

    def save(self) -> bytes:
        """Write this worker's tally to its file, whole or not at all."""
        data = self._tally().to_json()
        path = tally_path(self._run_dir, self._index)
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(data)
            fresh.replace(path)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
        return data

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self.save()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(self.save())
            await writer.drain()
        writer.close()

    async def _ask_one(self, index: int) -> Tally | None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._read_socket(index)
        except (OSError, TimeoutError, TallyError):
            tally = load_tally(self._run_dir, index)
            if tally is not None:
                tally.gauges.clear()
            return tally

    async def _read_socket(self, index: int) -> Tally:
        reader, writer = await asyncio.open_unix_connection(socket_path(self._run_dir, index))
        try:
            chunks: list[bytes] = []
            size = 0
            while chunk := await reader.read(1 << 16):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_TALLY_BYTES:
                    raise TallyError(f"worker {index} sent more than {MAX_TALLY_BYTES} bytes")
            return Tally.from_json(b"".join(chunks))
        finally:
            writer.close()


def socket_path(run_dir: Path, index: int) -> Path:
    return run_dir / f"worker-{index}.sock"


def tally_path(run_dir: Path, index: int) -> Path:
    return run_dir / f"worker-{index}.tally"


def load_tally(run_dir: Path, index: int) -> Tally | None:
    """What a worker saved last; None when it saved nothing that can be read."""
    try:
        return Tally.from_json(tally_path(run_dir, index).read_bytes())
    except (OSError, TallyError):
        return None
