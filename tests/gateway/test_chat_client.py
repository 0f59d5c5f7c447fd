"""`headrace chat` and `headrace models` against a running gateway, over pipes and on a terminal."""

import asyncio
import os
import pty
import sys
from collections.abc import Sequence

import pytest

from headrace.gateway.chat import Answer, Chat, ChatSettings
from headrace.gateway.client import Client, ClientError
from headrace.ipc.messages import Submit
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import MODEL, Service, embedded_text, say, serving


async def headrace(*arguments: str, lines: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command with `lines` as its input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(lines.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def prompts(service: Service) -> list[str]:
    """What the engine was asked, as text."""
    return [
        embedded_text().decode(memoryview(stream.submit.prompt).cast("i").tolist())
        for stream in service.engine.seen
    ]


async def test_piped_questions_are_answered_on_stdout() -> None:
    async with serving(say("Hello there.")) as service:
        code, out, err = await headrace("chat", "--url", service.url, lines="Hi.\nAnd again.\n/exit\nnever\n")
    assert code == 0
    assert out == "Hello there.\nHello there.\n"
    assert err.count("tokens/s") == 2
    assert len(service.engine.seen) == 2


async def test_the_conversation_is_remembered_until_reset() -> None:
    async with serving(say("Hello there.")) as service:
        lines = "First.\nSecond.\n/reset\nThird.\n/system Be brief.\nFourth.\n"
        await headrace("chat", "--url", service.url, lines=lines)
        asked = prompts(service)
    assert "First." in asked[1]
    assert "Hello there." in asked[1]
    assert "First." not in asked[2]
    assert "Third." in asked[3]
    assert "Be brief." in asked[3]


async def test_flags_reach_the_request() -> None:
    async with serving(say("Hello there.")) as service:
        flags = ("--max-tokens", "2", "--temperature", "0", "--system", "Sing.")
        _, out, err = await headrace("chat", "--url", service.url, *flags, lines="Hi.\n")
        assert "Sing." in prompts(service)[0]
    assert out == "Hello there\n"
    assert "2 tokens" in err
    assert "cut at the length limit" in err
    assert service.engine.seen[0].submit.sampling.temperature == 0


async def test_a_failed_question_is_said_and_not_remembered() -> None:
    async with serving(say("Hello there.")) as service:
        lines = f"{'word ' * 400}\nShort.\n"
        code, out, err = await headrace("chat", "--url", service.url, lines=lines)
        assert "word" not in prompts(service)[0]
    assert code == 1
    assert out == "Hello there.\n"
    assert "context" in err


async def test_a_stream_that_breaks_off_is_said() -> None:
    engine = FakeEngine(say("Hello there."))
    engine.error_after = 2
    async with serving(engine=engine) as service:
        code, out, err = await headrace("chat", "--url", service.url, lines="Hi.\n")
    assert code == 1
    assert out.startswith("Hello there")
    assert "NaN logits" in err


async def test_keys_are_sent() -> None:
    async with serving(say("Hello there."), api_keys=("right",)) as service:
        code, out, _ = await headrace("chat", "--url", service.url, "--api-key", "right", lines="Hi.\n")
        assert (code, out) == (0, "Hello there.\n")
        code, _, err = await headrace("models", "--url", service.url)
        assert code == 1
        assert "401" in err


async def test_models_lists_what_is_served() -> None:
    async with serving() as service:
        _, out, _ = await headrace("models", "--url", service.url)
    assert MODEL in out
    assert "256" in out


async def test_on_a_terminal_it_greets_prompts_and_leaves() -> None:
    """A pseudo-terminal, as tmux has one."""
    async with serving(say("Hello there.")) as service:
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "headrace", "chat", "--url", service.url),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        screen = Screen(ours)
        await screen.shows(f"{MODEL} at {service.url}")
        for typed, shown in (("Hi.\n", "tokens/s"), ("/help\n", "/reset forgets")):
            await screen.shows("> ")  # the terminal is in the line editor's hands from here on
            screen.type(typed)
            await screen.shows(shown)
        await screen.shows("> ")
        screen.type("\x04")
        assert await process.wait() == 0
        screen.close()


class Screen:
    """The other end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = ""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def shows(self, text: str) -> None:
        """Wait for a text after what was waited for before."""
        while text not in self._text:
            self._news.clear()
            await self._news.wait()
        self._text = self._text.partition(text)[2]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        try:
            self._text += os.read(self._descriptor, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._news.set()


async def test_a_cancelled_answer_keeps_what_came() -> None:
    """Ctrl-C: the pieces shown so far belong to the conversation."""

    def endless(submit: Submit) -> Sequence[int]:
        return [*say("Hello there.", stop=False)(submit)] * 40

    async with serving(engine=FakeEngine(endless, step_s=0.005)) as service:
        client = Client(service.url, "")
        talk = Chat(client, ChatSettings(service.url), MODEL, "")
        shown = asyncio.Event()
        turn = asyncio.create_task(talk.turn("Hi.", lambda _piece: shown.set()))
        await shown.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert [message["role"] for message in talk.messages] == ["user", "assistant"]
        await service.engine.cancelled.wait()
        await client.close()


async def test_an_answer_cut_off_without_done_is_an_error() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: {}\n\n: x\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}", "")
    with pytest.raises(ClientError, match="in the middle of an answer"):
        async for _ in client.stream("/x", {}):
            pass
    await client.close()
    server.close()


def test_figures_without_tokens_divide_by_nothing() -> None:
    assert Answer(0.0).figures() == "no tokens"
    answer = Answer(1.0, text="a", first_at=1.5, last_at=1.5, tokens=1)
    assert answer.figures() == "1 tokens, first token after 500 ms"
