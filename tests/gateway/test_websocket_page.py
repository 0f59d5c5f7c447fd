"""docs/websocket.md is true: every example on it is played against the server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.ws_format import JSON_PROTOCOL, MSGPACK_PROTOCOL
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import say
from tests.gateway.ws_service import talking, ws_serving

PAGE = Path(__file__).parents[2] / "docs" / "websocket.md"
EXAMPLE = re.compile(r"^```ws ?(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = EXAMPLE.findall(PAGE.read_text())
FRAME_TYPES = {
    "client": {"start", "cancel", "ack", "ping", "auth", "begin"},  # the last shows what is no frame type
    "server": {"started", "token", "done", "error", "authenticated", "pong"},
}


class PatientEngine(FakeEngine):
    """Makes no token, answers cancels only."""

    def _schedule(self) -> None:
        if any(stream.cancelled for stream in self.running.values()):
            super()._schedule()


def test_every_frame_has_an_example() -> None:
    shown: dict[str, set[str]] = {"client": set(), "server": set()}
    for _, lines in EXAMPLES:
        for line in lines.splitlines():
            shown["client" if line[0] == ">" else "server"].add(json.loads(line[2:])["type"])
    assert shown == FRAME_TYPES


@pytest.mark.parametrize("protocol", [JSON_PROTOCOL, MSGPACK_PROTOCOL])
@pytest.mark.parametrize(("setting", "lines"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
async def test_the_server_speaks_as_the_page_says(setting: str, lines: str, protocol: str) -> None:
    keys = ("secret-key",) if setting == "auth" else ()
    make_engine = PatientEngine if setting == "endless" else FakeEngine
    engine = make_engine(say("Hello there."))
    async with ws_serving(engine, api_keys=keys) as service, talking(service, protocol) as talk:
        for line in lines.splitlines():
            expected = json.loads(line[2:])
            if line[0] == ">":
                await talk.send(expected)
            else:
                assert_same_shape(await talk.receive(), expected)


def assert_same_shape(found: Any, expected: Any) -> None:
    """Equal but for what the page abbreviates with `...`."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{found} is not like {expected}"
        for key, value in expected.items():
            assert_same_shape(found[key], value)
    elif isinstance(expected, str) and "..." in expected:
        assert found.startswith(expected.split("...")[0][:5])
    else:
        assert found == expected
