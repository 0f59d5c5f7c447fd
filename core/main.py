"""The engine process: `python -P -m headrace.core.main --config FILE --index I`.

Reads the resolved configuration, builds the engine, serves until SIGTERM has drained it.
"""

import argparse
import gc
import json
import logging
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.config import Config, ConfigError
from headrace.core.build import Built, build
from headrace.core.server import EngineServer
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.messages import PROTOCOL_VERSION, Welcome

log = logging.getLogger("headrace.engine")

EXIT_CONFIG = 2  # restarting cannot help


def main() -> int:
    """Run one engine; the exit status is 0 after a drain, EXIT_CONFIG where the configuration cannot work."""
    parser = argparse.ArgumentParser(prog="headrace engine process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True)
    arguments = parser.parse_args()
    config = Config.from_dict(json.loads(arguments.config.read_bytes()))
    name = str(arguments.index)
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(), format=f"engine {name}: %(levelname)s %(message)s"
    )
    try:
        built = _build(config, name)
        socket = EngineSocket(
            config.engine_addresses()[arguments.index], _welcome(config, built, name), config.wire
        )
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    server = EngineServer(
        built.engine,
        socket,
        name=name,
        vocab_size=built.model.spec.vocab_size,
        beat_s=config.wire.heartbeat_s,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.drain(config.gateway.drain_s))
    # What start-up made stays for good: collections during a step need not look at it.
    gc.collect()
    gc.freeze()
    log.info("ready: %s at %s, context %d", config.model.served_name, socket.address, built.max_model_len)
    server.run()
    return 0


def _build(config: Config, name: str) -> Built:
    console = Console(stderr=True)
    columns = (
        TextColumn("engine {task.fields[engine]}: weights"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("weights", total=None, engine=name)
        return build(config, lambda done, total: bar.update(task, completed=done, total=total))


def _welcome(config: Config, built: Built, name: str) -> Welcome:
    return Welcome(
        version=PROTOCOL_VERSION,
        engine=name,
        fingerprint=built.fingerprint,
        model=config.model.served_name,
        vocab_size=built.model.spec.vocab_size,
        max_model_len=built.max_model_len,
        max_num_seqs=built.max_num_seqs,
        num_blocks=built.engine.kv.num_blocks,
        block_size=config.cache.block_size,
    )


if __name__ == "__main__":
    sys.exit(main())
