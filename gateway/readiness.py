"""Waits until every worker of a service says that an engine takes work, and the lines that then greet the user.

Asks over the workers' own unix sockets: on the shared port there is no choosing a worker. serve.py calls.
"""

import asyncio
import json
from pathlib import Path

import aiohttp

from headrace.config import Config

POLL_S = 0.1
TIMEOUT = aiohttp.ClientTimeout(total=2)


def http_path(run_dir: Path, index: int) -> Path:
    """Where worker `index` answers HTTP besides the port."""
    return run_dir / f"worker-{index}.http"


async def wait_ready(run_dir: Path, workers: int) -> None:
    """Return when /ready of every worker is 200; wait for ever otherwise."""
    for index in range(workers):
        while not await _is_ready(http_path(run_dir, index)):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(POLL_S)


async def _is_ready(path: Path) -> bool:
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=TIMEOUT) as session,
            session.get("http://worker/ready") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def greeting(config: Config, port: int, seconds: float) -> str:
    """One line that says where, and a command to paste."""
    url = base_url(config.gateway.host, port)
    parts = [
        f"model {config.model.served_name}",
        f"{len(config.engine_addresses())} engine(s)",
        f"{config.gateway.workers} gateway worker(s)",
        f"after {seconds:.1f} s",
    ]
    body = json.dumps(
        {
            "model": config.model.served_name,
            "stream": True,
            "messages": [{"role": "user", "content": "Tell me a story about a mill."}],
        }
    )
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.gateway.api_keys else ""
    return (
        f"ready: {url} ({', '.join(parts)})\n"
        f"\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'\n"
    )


def base_url(host: str, port: int) -> str:
    """A URL that works on this machine: a wildcard address is shown as the loopback one."""
    if host in ("0.0.0.0", "", "*"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
