"""Clients that send half a request, too long headers, or too many at once: the server stays there for others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import tracemalloc

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

HALVES = {
    "nothing": b"",
    "headers": b"POST /score HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "body": b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 1000\r\n\r\n{",
}


def connect(server, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(sent)
    return client


def closed(client: socket.socket) -> bool:
    """Whether the server has closed the connection, perhaps after an answer."""
    client.settimeout(60)
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def score(server, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = {"prompts": ["p"], "completions": ["abc"]}
    return httpx.post(server.url, json=body, headers=headers, trust_env=False, timeout=60)


def open_files(server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.fixture(scope="module")
def server_of_lengths(serve):
    return serve("length")


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("half", HALVES)
def test_three_hundred_half_sent_requests_hold_nothing(serve, half, token):
    server = serve("length", token=token, read_timeout=2.0, max_connections=100)
    before = open_files(server)
    clients = []
    for _ in range(300):
        clients.append(connect(server, HALVES[half]))
    # 300 are more than 100 connections: the oldest ones made room, and a whole request still gets its answer.
    assert score(server, token).json() == {"rewards": [3.0]}
    assert open_files(server) <= before + 101
    start = time.monotonic()
    assert all(closed(client) for client in clients)
    assert time.monotonic() - start < 60
    assert open_files(server) <= before + 2
    assert score(server, token).json() == {"rewards": [3.0]}


def test_bytes_that_drip_in_do_not_lengthen_the_time(serve):
    server = serve("length", read_timeout=1.0)
    client = connect(server, HALVES["headers"])
    start = time.monotonic()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while time.monotonic() - start < 60:
            client.sendall(b"a")
            time.sleep(0.05)


def test_a_second_request_on_a_kept_connection_has_its_own_time(serve):
    server = serve("length", read_timeout=1.5)
    with httpx.Client(trust_env=False, timeout=60) as client:
        body = {"prompts": ["p"], "completions": ["abc"]}
        for _ in range(3):  # 3 x 0.8 seconds are more than 1.5
            assert client.post(server.url, json=body).json() == {"rewards": [3.0]}
            time.sleep(0.8)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    kept = connect(server, whole)
    assert kept.recv(4096).startswith(b"HTTP/1.1 200")
    kept.sendall(whole[:10])
    start = time.monotonic()
    assert closed(kept) and time.monotonic() - start < 60  # the rest never came


def test_a_function_may_take_longer_than_reading(serve):
    server = serve("pause", read_timeout=2.0)
    assert score(server).json() == {"rewards": [3.0]}


def test_headers_beyond_the_limit_are_refused(serve):
    server = serve("length")
    client = connect(server, b"POST /score HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000)
    start = time.monotonic()
    assert closed(client) and time.monotonic() - start < 9  # their time ends after ten


@pytest.mark.parametrize("size", [17_000, 50_000])
def test_headers_beyond_the_limit_that_come_at_once_are_refused(server_of_lengths, size):
    client = connect(server_of_lengths, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * size + b"\r\n\r\n")
    client.settimeout(60)
    assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
    whole = connect(server_of_lengths, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 15_000 + b"\r\n\r\n")
    assert whole.recv(4096).startswith(b"HTTP/1.1 200 ")


async def _answers(scope, receive, send):
    """As many bytes as the path says, the last one after the others are written."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * (int(scope["path"][1:]) - 1), "more_body": True})
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("read_timeout", [60.0, 0.5])
def test_clients_that_read_no_answer_make_room_and_are_cut_off(read_timeout):
    from uvicorn import Config
    from uvicorn.server import ServerState

    from lightrl.compat.uvicorn import bounded_protocol

    make, state = bounded_protocol(read_timeout, 2), ServerState()
    config = Config(_answers, http=make, ws="none", lifespan="off", log_config=None)

    async def ask(port: int, size: int):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % size)
        return reader, writer

    async def waiting(holds) -> None:
        end = time.monotonic() + 60
        while not holds() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert holds()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        config.load()
        server = await loop.create_server(lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent = [await ask(port, 50_000_000) for _ in range(2)]
        if read_timeout < 1:
            await waiting(lambda: state.connections == set())
        else:
            await waiting(lambda: [each.flow.write_paused for each in state.connections] == [True, True])
            for _ in range(3):
                reader, writer = await ask(port, 3)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                writer.close()
            assert sum(each.flow.write_paused for each in state.connections) <= 1
        for _, writer in silent:
            writer.transport.abort()
        server.close()

    asyncio.run(main())


async def _answers_slowly(scope, receive, send) -> None:
    """Never where the path says so."""
    if scope["path"] == "/never":
        await asyncio.Event().wait()
    await _answers({"path": "/3"}, receive, send)


def test_clients_that_send_requests_before_they_are_answered_make_room():
    from uvicorn import Config
    from uvicorn.server import ServerState

    from lightrl.compat.uvicorn import bounded_protocol

    state = ServerState()
    config = Config(_answers_slowly, http=bounded_protocol(60.0, 2), ws="none", lifespan="off", log_config=None)

    async def main() -> None:
        config.load()
        make = config.http_protocol_class
        server = await asyncio.get_running_loop().create_server(
            lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        port, writers = server.sockets[0].getsockname()[1], []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            writers.append(writer)
        end = time.monotonic() + 60
        while [each.pipelines for each in state.connections] != [True, True] and time.monotonic() < end:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert len(state.connections) == 2
        for each in [*writers, writer]:
            each.transport.abort()
        for task in state.tasks:
            task.cancel()
        server.close()

    asyncio.run(main())


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


def test_requests_that_wait_for_the_function_are_not_all_in_memory():
    from lightrl.rewards.calls import RewardFunction
    from lightrl.rewards.server.app import create_app

    read, go_on = [], threading.Event()

    class Counted(RewardFunction):
        def missing(self, rows):  # the last step of reading a request
            read.append(1)
            return super().missing(rows)

    async def wait(completions):
        await asyncio.to_thread(go_on.wait, 60)
        return [0.0] * len(completions)

    app = create_app(Counted("wait", wait), token=None, max_rows=8, max_bytes=1000, max_concurrency=1, timeout=None)

    async def main() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", timeout=60
        ) as client:
            body = {"prompts": ["p"], "completions": ["abc"]}
            asked = [asyncio.create_task(client.post("/score", json=body)) for _ in range(20)]
            end = time.monotonic() + 60
            while len(read) < 6 and time.monotonic() < end:  # 5 are read, of which the one that runs looks twice
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert len(read) == 6
            go_on.set()
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 20

    asyncio.run(main())


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


def test_a_body_that_never_comes_is_waited_for_as_long_as_any(serve):
    server = serve("length", read_timeout=2.0)
    client = connect(server, b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % 10**18)
    assert closed(client) and score(server).json() == {"rewards": [3.0]}
