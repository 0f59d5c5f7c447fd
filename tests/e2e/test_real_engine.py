"""The whole service with the real engine: the embedded model, by itself and behind tcp:// with keys."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp

from headrace.gateway.listen import reserve_port
from headrace.ipc.keys import create_keys
from tests.e2e.service import running, stream_tokens

SMALL = ("--engine", "core", "--kv-memory", "32M", "--threads", "1")


async def texts(url: str, prompt: str = "Once") -> str:
    async with aiohttp.ClientSession() as session:
        return "".join([text async for _, text, _ in stream_tokens(session, url, 3, 24, prompt)])


async def test_the_embedded_model_streams_the_same_text_for_the_same_seed(tmp_path: Path) -> None:
    """Alone, and among ten others in the batch."""
    async with running(tmp_path, *SMALL, "--workers", "2") as service:
        alone = await texts(service.url)
        assert len(alone.split()) > 5
        words = ("miller", "cat", "river", "king", "girl", "boat", "owl", "wheel", "stone", "moon")
        prompts = [f"The {word} went" for word in words]
        crowd = await asyncio.gather(texts(service.url), *(texts(service.url, prompt) for prompt in prompts))
        assert crowd[0] == alone
        assert len(set(crowd)) == len(crowd)


async def test_an_engine_elsewhere_is_reached_with_keys(tmp_path: Path) -> None:
    """`headrace engine` on tcp:// for `headrace serve --engine-address`; without the right keys, nothing."""
    keys, other = tmp_path / "keys", tmp_path / "other"
    create_keys(keys)
    create_keys(other)
    with reserve_port("127.0.0.1", 0) as held:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", "engine", "--address", address, "--served-name", "tiny"),
        *("--curve-dir", str(keys), "--kv-memory", "32M", "--threads", "1"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert engine.stderr is not None
    while b"ready" not in await engine.stderr.readline():
        pass
    flags = ("--engine-address", address, "--curve-dir")
    async with running(tmp_path / "run", *flags, str(keys)) as service:
        assert not service.children("headrace.core.main")
        assert len(await texts(service.url)) > 20
    async with running(tmp_path / "run2", *flags, str(other), greeted=False) as service:
        await service.says("engine 0 .*refused.*hung up on in the handshake")
    engine.terminate()
    assert await engine.wait() == 0
