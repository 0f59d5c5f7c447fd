"""The gateway's tests run on the event loop that production runs on."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
