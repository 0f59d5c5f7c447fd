"""docs/api.md names what the code does: fields, error codes, routes."""

import re
from pathlib import Path

import headrace.gateway
from headrace.gateway.errors import REJECTED
from headrace.gateway.openai.routes import NOT_BUILT as UNBUILT_ROUTES
from headrace.gateway.openai.sampling import NOT_BUILT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_every_field_that_is_not_built_is_listed() -> None:
    listed = PAGE.partition("Not built (501): ")[2].partition("\n\n")[0]
    assert [name for name in NOT_BUILT if f"`{name}`" not in listed] == []


def test_every_route_that_is_not_built_is_listed() -> None:
    row = next(line for line in PAGE.splitlines() if "501: not built yet" in line)
    assert [path for _, path, _ in UNBUILT_ROUTES if path.split("/")[2] not in row] == []


def test_every_error_code_of_the_http_side_is_listed() -> None:
    folder = Path(headrace.gateway.__file__).parent
    sources = [path for path in folder.rglob("*.py") if not path.name.startswith(("ws_", "websocket"))]
    code = re.compile(r'code="(\w+)"|(?:busy|unavailable)\([^()]*(?:\([^()]*\))?[^()]*"(\w+)"\)')
    found = {name for path in sources for match in code.findall(path.read_text()) for name in match if name}
    assert {"engine_lost", "tokenizer_busy", "timeout"} <= found, "the pattern finds all three ways to raise"
    found |= {code for _, code in REJECTED.values()}
    assert sorted(name for name in found if f"`{name}`" not in PAGE) == []
