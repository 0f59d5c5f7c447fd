"""`headrace chat`: a conversation with a running server in the terminal, or over pipes.

Knows the public API only. The words go to stdout; prompts, figures and complaints go to stderr.
"""

import asyncio
import readline  # noqa: F401 - gives input() line editing and history
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.console import Console

from headrace.gateway.client import Client, ClientError

HELP = "/reset forgets, /system TEXT sets the system prompt, /exit leaves; Ctrl-C stops an answer."


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Where to talk to, and how."""

    url: str
    api_key: str = ""
    model: str = ""  # "" = the first one the server lists
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Answer:
    """What came, and when."""

    started: float
    text: str = ""
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    finish_reason: str = ""

    def take(self, event: dict[str, Any]) -> str:
        """Account for one event; returns its piece of text."""
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
        if not event.get("choices"):
            return ""
        choice = event["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        piece: str = choice.get("delta", {}).get("content") or ""
        if piece:
            self.last_at = monotonic()
            self.first_at = self.first_at or self.last_at
            self.text += piece
        return piece

    def figures(self) -> str:
        """One line: tokens, time to the first, tokens per second after it."""
        if not self.first_at:
            return "no tokens"
        parts = [f"first token after {1000 * (self.first_at - self.started):.0f} ms"]
        if self.tokens:
            parts.insert(0, f"{self.tokens} tokens")
        if self.tokens > 1 and self.last_at > self.first_at:
            parts.append(f"{(self.tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at the length limit")
        return ", ".join(parts)


@dataclass(slots=True)
class Chat:
    """One conversation with one model."""

    client: Client
    settings: ChatSettings
    model: str
    system: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; returns what to say about it."""
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.messages.clear()
            return "forgotten"
        if name == "/system":
            self.system = rest.strip()
            return "system prompt set" if self.system else "system prompt removed"
        return HELP

    async def turn(self, text: str, show: Callable[[str], None]) -> Answer:
        """Ask, and show the answer as it comes.

        Raises:
            ClientError: the server failed; the question is not kept.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer(monotonic())
        try:
            async for event in self.client.stream("/v1/chat/completions", self._body()):
                piece = answer.take(event)
                if piece:
                    show(piece)
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        return answer

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        optional = {"max_tokens": self.settings.max_tokens, "temperature": self.settings.temperature}
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }


def chat(settings: ChatSettings) -> int:
    """Talk until /exit or the end of input; returns the exit code: 1 when a piped question failed.

    Raises:
        ClientError: the server cannot be reached at the start.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    interactive = sys.stdin.isatty()
    failures = 0
    with asyncio.Runner() as runner:
        talk = runner.run(_open(settings))
        try:
            if interactive:
                console.print(f"{talk.model} at {settings.url}. {HELP}", style="dim")
            while (line := _read_line("> " if interactive else "")) not in (None, "/exit"):
                if line.startswith("/"):
                    console.print(talk.command(line), style="dim")
                elif line:
                    failures += not _answer(runner, talk, line, console)
        finally:
            runner.run(talk.client.close())
    return int(failures > 0 and not interactive)


def _answer(runner: asyncio.Runner, talk: Chat, line: str, console: Console) -> bool:
    """One question; False when it failed."""
    try:
        answer = runner.run(talk.turn(line, _show))
    except KeyboardInterrupt:
        _show("\n")
        console.print("stopped", style="dim")
        return True
    except ClientError as error:
        console.print(str(error), style="red")
        return False
    _show("\n")
    console.print(answer.figures(), style="dim")
    return True


async def _open(settings: ChatSettings) -> Chat:
    client = Client(settings.url, settings.api_key)
    model = settings.model
    try:
        if not model:
            model = (await client.get_json("/v1/models"))["data"][0]["id"]
    except BaseException:
        await client.close()
        raise
    return Chat(client, settings, model, settings.system)


def _read_line(prompt: str) -> str | None:
    """The next line without blanks around it; None at the end of input."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
