"""The HTTP side: errors in one shape, keys, CORS, limits, what is not built, and the page."""

import asyncio
import gzip
import json
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest

from headrace.gateway.openai.routes import NOT_BUILT, Routes
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import CHAT, Service, say, serving, settle

URL = "/v1/chat/completions"


def assert_error(answer: Any, code: str | None, told: str = "") -> None:
    """OpenAI's error object, whole."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert told in error["message"]
    assert "Traceback" not in error["message"]


async def test_unknown_routes_and_methods_have_the_error_shape() -> None:
    async with serving() as service:
        status, answer, _ = await service.get("/v1/nothing")
        assert status == 404
        assert_error(answer, "not_found", "GET /v1/nothing")
        status, answer, headers = await service.get(URL)
        assert status == 405
        assert_error(answer, "method_not_allowed", "use POST")
        assert headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b'{"messages": [}', "not valid JSON"),
        (b'{"model": "\xff"}', "byte 0xff at position 11 is not UTF-8"),
        (b'{"model": "\xed\xa0\x80"}', "is not UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[" * 5000, "not valid JSON"),
        (b"\x00", "not valid JSON"),
    ],
)
async def test_bad_bodies_are_told_what_is_wrong(body: bytes, told: str) -> None:
    async with serving() as service:
        status, answer, _ = await service.post(URL, body)
    assert status == 400
    assert told in answer["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
async def test_the_content_type_does_not_matter(content_type: str) -> None:
    """`curl -d` sends that of forms."""
    async with serving() as service:
        status, _, _ = await service.post(URL, json.dumps(CHAT).encode(), **{"Content-Type": content_type})
    assert status == 200


async def test_a_large_body_is_refused_with_both_numbers() -> None:
    async with serving(max_body_bytes=2048) as service:
        status, answer, headers = await service.post(URL, b" " * 3000)
        assert status == 413
        assert headers["Connection"] == "close"
        assert_error(answer, "body_too_large", "3000 bytes, the limit is 2048")


async def test_a_compressed_bomb_is_refused() -> None:
    async with serving(max_body_bytes=100_000) as service:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        status, answer, _ = await service.post(URL, bomb, **{"Content-Encoding": "gzip"})
        assert status == 413
        assert_error(answer, "body_too_large", "the limit is 100000")


async def test_compressed_bodies_are_read() -> None:
    async with serving() as service:
        body = gzip.compress(json.dumps(CHAT).encode())
        status, _, _ = await service.post(URL, body, **{"Content-Encoding": "gzip"})
        assert status == 200
        status, _, _ = await service.post(URL, b"no gzip at all", **{"Content-Encoding": "gzip"})
        assert status == 400


@pytest.mark.parametrize(("method", "path", "what"), NOT_BUILT)
async def test_what_is_not_built_answers_501(method: str, path: str, what: str) -> None:
    async with (
        serving() as service,
        service.session.request(method, service.url + path.replace("{id}", "x")) as response,
    ):
        assert response.status == 501
        assert_error(await response.json(), "not_implemented", what)


async def test_without_an_engine_there_is_a_503_that_says_why() -> None:
    engine = FakeEngine(say("x"))
    engine.ready = False
    async with serving(engine=engine) as service:
        for stream in (False, True):
            status, answer, headers = await service.post(URL, {**CHAT, "stream": stream})
            assert status == 503
            assert headers["Retry-After"] == "1"
            assert_error(answer, "no_engine", "engine 0: connecting")
        engine.welcome()
        engine.die()
        status, answer, _ = await service.post(URL, CHAT)
        assert status == 503
        assert_error(answer, "no_engine", "lost")
        status, models, _ = await service.get("/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "tiny")


async def test_too_many_streams_are_a_429() -> None:
    async with serving(engine=FakeEngine(say("x"), step_s=0.05), max_streams=2) as service:
        status, answer, headers = await service.post(URL, {**CHAT, "n": 3})
        assert status == 429
        assert headers["Retry-After"] == "1"
        assert_error(answer, "too_many_streams", "2 generations are open")


async def test_a_bug_is_a_500_that_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_self: Routes, _request: object) -> None:
        raise RuntimeError("secret path /etc/passwd")

    monkeypatch.setattr(Routes, "tokenize", broken)
    async with serving() as service:
        status, answer, headers = await service.post("/tokenize", {})
    assert status == 500
    assert_error(answer, "internal_error", headers["X-Request-Id"])
    assert "secret" not in str(answer)
    assert headers["X-Request-Id"] in caplog.text
    assert "secret" in caplog.text, "the log has it"


KEYS = ("alpha-key", "beta-key")


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"Authorization": "Bearer alpha-key2"}, "invalid_api_key"),
        ({"Authorization": "Bearer schlüssel"}, "invalid_api_key"),
        ({"Authorization": "Basic alpha-key"}, "missing_api_key"),
        ({"Authorization": "alpha-key"}, "missing_api_key"),
    ],
)
async def test_a_missing_or_wrong_key_is_a_401(header: dict[str, str], code: str) -> None:
    async with serving(api_keys=KEYS) as service:
        for path, method in ((URL, service.post), ("/nowhere", service.post)):
            status, answer, headers = await method(path, CHAT, **header)
            assert status == 401
            assert headers["WWW-Authenticate"] == "Bearer"
            assert_error(answer, code)
            assert "alpha" not in str(answer)


async def test_each_key_opens_and_names_its_tenant() -> None:
    async with serving(api_keys=KEYS) as service:
        for key in ("alpha-key", "beta-key", "alpha-key"):
            status, _, _ = await service.post(URL, CHAT, Authorization=f"bearer {key}")
            assert status == 200
        tenants = [stream.submit.tenant for stream in service.engine.seen]
    assert tenants[0] == tenants[2] != tenants[1]
    assert "alpha" not in tenants[0], "a digest, not the key"


async def test_the_page_needs_no_key_and_may_load_nothing_from_elsewhere() -> None:
    async with serving(api_keys=KEYS) as service, service.session.get(service.url + "/") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = response.headers["Content-Security-Policy"]
        page = await response.text()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert "http://" not in page
    assert "https://" not in page
    assert " style=" not in page, "the policy would refuse it"
    assert " onclick=" not in page


ORIGIN = "https://app.example"


async def preflight(service: Service, origin: str) -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    async with service.session.options(service.url + URL, headers=headers) as response:
        return response.status, response.headers


async def test_cors_answers_preflights_without_a_key_and_marks_answers() -> None:
    async with serving(cors_origins=(ORIGIN,), api_keys=KEYS) as service:
        status, headers = await preflight(service, ORIGIN)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        _, _, headers = await service.post(URL, CHAT, Origin=ORIGIN)
        assert headers["Access-Control-Allow-Origin"] == ORIGIN, "the browser must be able to read the 401"
        auth = {"Origin": ORIGIN, "Authorization": "Bearer beta-key"}
        async with service.session.post(
            service.url + URL, json={**CHAT, "stream": True}, headers=auth
        ) as response:
            assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert response.headers["Vary"] == "Origin"
            await response.read()


async def test_cors_is_silent_to_other_origins_and_when_off() -> None:
    async with serving(cors_origins=(ORIGIN,)) as service:
        status, headers = await preflight(service, "https://evil.example")
        assert status == 405
        assert "Access-Control-Allow-Origin" not in headers
    async with serving() as service:
        _, _, headers = await service.post(URL, CHAT, Origin=ORIGIN)
        assert "Access-Control-Allow-Origin" not in headers
        assert "Vary" not in headers


async def test_cors_star_allows_any_origin() -> None:
    async with serving(cors_origins=("*",)) as service:
        status, headers = await preflight(service, "https://anyone.example")
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, "https://anyone.example")


@pytest.mark.parametrize(
    ("site", "origin", "status"),
    [
        ("cross-site", "https://evil.example", 403),
        ("cross-site", ORIGIN, 200),
        ("same-origin", "http://proxied.example", 200),
        ("none", "", 200),
    ],
)
async def test_pages_of_other_sites_cannot_make_a_browser_generate(
    site: str, origin: str, status: int
) -> None:
    async with serving(cors_origins=(ORIGIN,)) as service:
        headers = {
            "Sec-Fetch-Site": site,
            "Content-Type": "text/plain",
            **({"Origin": origin} if origin else {}),
        }
        found, answer, _ = await service.post(URL, json.dumps(CHAT).encode(), **headers)
        assert found == status
        if status == 403:
            assert_error(answer, "origin_not_allowed", origin)
            assert not service.engine.seen


async def test_a_disconnect_cancels_the_generation() -> None:
    """With production's runner settings: aiohttp's test server would hide a missing `handler_cancellation`."""
    engine = FakeEngine(say("fox " * 200), step_s=0.01)
    async with serving(engine=engine) as service:
        for stream in (True, False):
            engine.cancelled.clear()
            count = len(engine.seen)
            request = asyncio.create_task(service.post(URL, {**CHAT, "stream": stream, "n": 2}))
            await settle(lambda: len(engine.seen) == count + 2 and engine.seen[-1].sent > 0)  # noqa: B023
            request.cancel()
            await asyncio.wait_for(engine.cancelled.wait(), 10)
            assert all(running.cancelled for running in engine.seen[count:])
            await settle(lambda: not engine.running)


async def test_a_disconnect_while_waiting_in_the_queue_cancels_too() -> None:
    """No byte has been sent yet."""
    engine = FakeEngine(say("fox"), step_s=0.5)
    async with serving(engine=engine) as service:
        request = asyncio.create_task(service.post(URL, {**CHAT, "stream": True}))
        await settle(lambda: bool(engine.seen))
        request.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 10)
        assert engine.seen[0].sent == 0
