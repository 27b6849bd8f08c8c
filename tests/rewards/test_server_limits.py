"""Requests that are slow to read, malformed, or hostile: the server stays there for others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import tracemalloc

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


def score(server, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = {"prompts": ["p"], "completions": ["abc"]}
    return httpx.post(server.url, json=body, headers=headers, trust_env=False, timeout=60)


@pytest.fixture(scope="module")
def server_of_lengths(serve):
    return serve("length")


def test_a_request_that_takes_long_to_read_keeps_no_other_waiting():
    from lightrl.rewards.calls import RewardFunction
    from lightrl.rewards.server.app import create_app

    begun, others_answered, waited = threading.Event(), threading.Event(), []

    class SlowToRead(RewardFunction):
        def missing(self, rows):  # the last step of reading a request
            begun.set()
            waited.append(others_answered.wait(30))
            return super().missing(rows)

    function = SlowToRead("length", lambda completions: [len(text) for text in completions])
    limits = {"max_rows": 8, "max_bytes": 1000, "max_concurrency": 1, "timeout": None}
    app = create_app(function, token=None, **limits)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            large = asyncio.create_task(client.post("/score", json={"prompts": ["p"], "completions": ["abc"]}))
            assert await asyncio.to_thread(begun.wait, 30)
            assert (await client.get("/health")).json()["status"] == "ok"
            others_answered.set()
            assert (await large).json() == {"rewards": [3.0]}

    asyncio.run(main())
    assert waited and all(waited)


def listed(entry: str, size: int = 200_000) -> str:
    """JSON of a list of one entry again and again, of about `size` characters."""
    return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"


ONE = '{"prompts":["p"],"completions":["c"]'
KEYS = ",".join(f'"{i:x}":1' for i in range(20_000))


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (f'{{"prompts":{listed("1")},"completions":[]}}', 413, "prompts: 100000 rows are more than max_rows=8"),
        ('{"prompts":["p"],"completions":[1]}', 422, "completions, row 0: int, where str is due"),
        ('{"prompts":["p"]}', 422, "completions: is missing"),
        (f'{ONE},"completion_ids":[{listed(chr(34) * 2)}]}}', 422, "row 0: list, where list of integers is due"),
        (f'{ONE},"completion_ids":{listed("[]")}}}', 413, "more than max_rows=8"),
        (f'{ONE},"group_ids":{listed("null")}}}', 413, "group_ids"),
        (f'{ONE},"group_ids":["a"]}}', 422, "group_ids, row 0: str, where int is due"),
        (f'{ONE},"labels":[1,2]}}', 422, "labels: 2 values for 1 completions"),
        (f'{ONE},"columns":{{{KEYS}}}}}', 422, "0: must be a list"),
        (f'{ONE},"columns":{listed("1")}}}', 422, "must be JSON objects"),
        (f"{ONE},{KEYS}}}", 200, ""),
        (f'{ONE},"references":[{listed("{}")}]}}', 200, ""),
        (f'{ONE},"labels":[{listed(chr(123) + chr(34) * 2 + ":[]}")}]}}', 200, ""),
        (listed("1"), 422, "must be JSON objects"),
        ("[" * 200_000, 422, "recursion limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_memory_of_a_request_is_bounded_by_its_body(body, status, said):
    """One error for each entry took 500 times the body, and half a minute for 2 MB."""
    from fastapi import HTTPException

    from lightrl.rewards.calls import RewardFunction
    from lightrl.rewards.server.app import _parse

    function = RewardFunction("length", lambda completions: [len(text) for text in completions])
    tracemalloc.start()
    try:
        rows = _parse(body.encode(), function, 8, 1000)
        assert status == 200 and rows["completions"] == ["c"] and rows["group_ids"] == [0]
    except HTTPException as error:
        assert (error.status_code, said in error.detail) == (status, True), error.detail
        assert len(error.detail) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(body) + 100_000


BODY = b'{"prompts": ["p"], "completions": ["abc"]}'
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), b"200"),
        (CHUNKED, b"-5\r\nabc", b"400"),
        (CHUNKED, b"5;" + b"a" * (1 << 20) + b"\r\nabcde\r\n", b"400"),
        (CHUNKED, (b"10000\r\n" + b" " * 65536 + b"\r\n") * 300, b"413"),
        (b"Content-Length: -5\r\n", BODY, b"400"),
        (b"Content-Length: %d\r\n" % 10**30, BODY, b"400"),
        (b"X: " + b"a" * (1 << 20) + b"\r\n", b"", b"400"),
        (b"Content-Length: 400000\r\n", b"[" * 400_000, b"422"),
    ],
    ids=["chunked", "negative chunk", "1 MB of chunk", "19 MB", "negative", "huge", "1 MB of header", "nested"],
)
def test_hostile_framing_is_answered(server_of_lengths, headers, body, status):
    with socket.create_connection(("127.0.0.1", server_of_lengths.port), timeout=60) as client:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            client.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body)
        assert client.recv(4096).startswith(b"HTTP/1.1 " + status)
    assert score(server_of_lengths).json() == {"rewards": [3.0]}
