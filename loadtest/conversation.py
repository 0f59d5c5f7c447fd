"""Plays one session: builds each turn's call, with the real answers in the history, and sends it.

Knows neither load nor figures; driver.py starts one for each user.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from headrace.loadtest.client import Client
from headrace.loadtest.exchange import Call, Exchange, Kind
from headrace.loadtest.recorder import CUT
from headrace.loadtest.workload import Session, Turn


@dataclass(frozen=True, slots=True)
class Asking:
    """How calls are made of turns."""

    kind: Kind = "chat"
    temperature: float = 1.0
    ignore_eos: bool = True  # the answer gets as long as the workload says

    def call(self, messages: list[dict[str, str]], turn: Turn) -> Call:
        """The call for a history that ends with the turn."""
        body: dict[str, Any] = {"max_tokens": turn.max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.kind == "chat":
            body["messages"] = list(messages)
        else:
            body["prompt"] = "\n".join(message["content"] for message in messages)
        return Call(self.kind, body)


async def play(
    session: Session,
    intended: float,
    client: Client,
    asking: Asking,
    claim: Callable[[], bool],
    done: Callable[[Exchange], None],
) -> None:
    """Send the session's turns, one after the other.

    Args:
        session: what is said.
        intended: when the first turn should be sent, seconds of perf_counter; it is now, or past.
        client: to send by.
        asking: how.
        claim: asked before each turn; False ends the session.
        done: called with each exchange at its end, also if it is cancelled.
    """
    if session.recorded is not None:
        if claim():
            await _send(Exchange(session.recorded, intended), client, done)
        return
    messages = [{"role": "system", "content": session.system}] if session.system else []
    for index, turn in enumerate(session.turns):
        if turn.think_s:
            await asyncio.sleep(max(0.0, intended + turn.think_s - perf_counter()))
            intended += turn.think_s
        if not claim():
            return
        messages.append({"role": "user", "content": turn.prompt})
        more = index + 1 < len(session.turns)
        exchange = Exchange(asking.call(messages, turn), intended, keep_text=more)
        await _send(exchange, client, done)
        if exchange.error:
            return
        if more:
            messages.append({"role": "assistant", "content": exchange.text()})
            intended = exchange.ended


async def _send(exchange: Exchange, client: Client, done: Callable[[Exchange], None]) -> None:
    try:
        await client.send(exchange)
    except asyncio.CancelledError:
        exchange.fail(CUT, "")
        raise
    finally:
        done(exchange)
