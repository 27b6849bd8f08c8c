"""Servers that answer anything: to a remote reward, to a judge, to an engine that samples."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import socketserver
import threading
from typing import Any

from hypothesis import strategies as st

from lightrl.engines.base import EngineDiedError, StaleWeightsError
from lightrl.engines.server.http import Server, ServerError
from lightrl.engines.server.pool import ServerPool
from lightrl.engines.server.protocols import PROTOCOLS, Facts
from lightrl.records import GenerationRequest, SamplingParams
from lightrl.rewards import GenerativeJudge, RemoteReward, RewardError
from tests.fuzz.data import ANY, GOOD_NUMBER, NUMBER, SCALAR, TEXT, often, score
from tests.fuzz.verdicts import DROPPED, ERROR, WORKS

Answer = tuple[int, bytes]
"""Status and body; status 0 closes the connection."""


class AnyServer(socketserver.ThreadingTCPServer):
    """Answers what it is told; paths that it was told nothing about get what stands under ""."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Answer] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        start = self.rfile.readline().split()
        length = 0
        while (line := self.rfile.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.rfile.read(length)
        answers: dict[str, Answer] = self.server.answers  # type: ignore[attr-defined]
        status, body = answers.get(start[1].decode().partition("?")[0], answers[""]) if len(start) > 1 else (0, b"")
        if status:
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.wfile.write(head.encode() + body)


@functools.cache
def any_server() -> AnyServer:
    return AnyServer()


STATUS = st.sampled_from([200, 200, 200, 200, 200, 200, 201, 204, 301, 400, 404, 413, 429, 500, 503, 0])
JSON_NUMBER = st.one_of(NUMBER.filter(lambda x: isinstance(x, int | float | str | None)), GOOD_NUMBER)


def _body(value: Any) -> bytes:
    try:
        return json.dumps(value, default=str).encode("utf-8", "surrogatepass")
    except ValueError:  # an integer of thousands of digits
        return b"1" * 5000


def _answers(good: Any, *shapes: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    other = st.one_of(
        st.one_of(*shapes, ANY).map(_body),
        st.sampled_from([b"", b"{", b"NaN", b"\xff\xfe", b"<html>", b"[" * 5000, b'{"rewards":' + b"[" * 3000]),
        st.binary(max_size=12),
    )
    return often(st.just(_body(good)), other)


REWARDS_BODY = _answers(
    {"rewards": [1.5, None]},
    st.fixed_dictionaries({"rewards": st.lists(GOOD_NUMBER, min_size=2, max_size=2)}),
    st.fixed_dictionaries({"rewards": st.one_of(st.lists(JSON_NUMBER, min_size=1, max_size=3), ANY)}),
)
JUDGE_BODY = _answers(
    {"choices": [{"message": {"content": "Score: 7"}}]},
    st.fixed_dictionaries(
        {
            "choices": st.lists(
                st.fixed_dictionaries(
                    {
                        "message": st.fixed_dictionaries(
                            {"content": st.one_of(st.sampled_from(["Score: 7", "score 1e9", "Score: -0", ""]), SCALAR)}
                        )
                    }
                ),
                max_size=2,
            )
        }
    ),
)
IDS = st.one_of(st.lists(st.integers(0, 15), min_size=1, max_size=4), st.lists(SCALAR, max_size=3), SCALAR)
LOGPROBS = st.one_of(st.lists(st.floats(-5, 0), min_size=1, max_size=4), st.lists(SCALAR, max_size=3), SCALAR)
REASON = st.one_of(st.sampled_from(["stop", "stop", "length", "abort"]), SCALAR)
TOKENS = st.one_of(st.just(([3, 4], [-1.0, -0.5])), st.tuples(IDS, LOGPROBS))
CHOICE = st.builds(
    lambda tokens, text, reason, index: {
        "index": index,
        "token_ids": tokens[0],
        "logprobs": {"token_logprobs": tokens[1]},
        "text": text,
        "finish_reason": reason,
    },
    TOKENS,
    TEXT,
    REASON,
    st.one_of(st.integers(0, 3), SCALAR),
)
NATIVE = st.builds(
    lambda tokens, text, reason: {
        "text": text,
        "meta_info": {
            "output_token_logprobs": list(zip(tokens[1], tokens[0], strict=False))
            if isinstance(tokens[0], list) and isinstance(tokens[1], list)
            else tokens[0],
            "finish_reason": {"type": reason},
            "weight_version": "w",
        },
    },
    TOKENS,
    TEXT,
    REASON,
)
GOOD_CHOICE = {"index": 0, "token_ids": [3], "logprobs": {"token_logprobs": [-1]}, "text": "a", "finish_reason": "stop"}
GOOD_NATIVE = {"output_token_logprobs": [[-1.0, 3]], "finish_reason": {"type": "stop"}, "weight_version": "w"}
SAMPLE_BODY = {
    "vllm": _answers(
        {"choices": [GOOD_CHOICE]}, st.fixed_dictionaries({"choices": st.lists(CHOICE, min_size=1, max_size=2)})
    ),
    "sglang": _answers([{"text": "a", "meta_info": GOOD_NATIVE}], st.lists(NATIVE, min_size=1, max_size=2)),
}
SERVERS = st.one_of(
    st.tuples(st.just("remote"), STATUS, REWARDS_BODY, st.sampled_from(["error", "none"])),
    st.tuples(st.just("judge"), STATUS, JUDGE_BODY, st.sampled_from(["error", "none"])),
    st.tuples(st.just("vllm"), STATUS, SAMPLE_BODY["vllm"], _answers({"weight_version": "w"})),
    st.tuples(st.just("sglang"), STATUS, SAMPLE_BODY["sglang"], st.just(b"")),
)


def judge_servers(case: tuple[str, int, bytes, Any]) -> str:
    """Asks a server that answers so."""
    kind, status, body, more = case
    server = any_server()
    server.answers = {"": (status, body), "/weight_info": (200, more), "/health": (200, b"")}
    return _judge_engine(server, kind) if kind in PROTOCOLS else _judge_reward(server, kind, more)


def _judge_reward(server: AnyServer, kind: str, on_failure: str) -> str:
    settings: dict[str, Any] = {"retries": 1, "backoff": 1e-3, "timeout": 5.0, "on_failure": on_failure}
    if kind == "remote":
        reward: Any = RemoteReward(server.url, **settings)
    else:
        reward = GenerativeJudge(server.url, "m", "Judge: {completion}", **settings)
    try:
        scores = score(reward)
    except RewardError as error:
        assert type(reward).__name__ in str(error) and len(str(error)) < 2000, error
        return ERROR
    values = scores.total
    assert len(values) == 2 and all(math.isnan(value) or math.isfinite(value) for value in values)
    return DROPPED if any(map(math.isnan, values)) else WORKS


def _judge_engine(server: AnyServer, kind: str) -> str:
    request = GenerationRequest([1, 2], sampling=SamplingParams(max_new_tokens=8), num_completions=1, seed=0)

    async def ask() -> Any:
        known = Server(server.url, {}, patience=5.0, progress_timeout=None)
        known.facts, known.loaded = Facts("m"), "w"
        pool = ServerPool([known], PROTOCOLS[kind](), max_groups=1, retries=0)
        pool.token = "w"
        try:
            return await pool.group(request)
        finally:
            await known.close()

    try:
        group = asyncio.run(asyncio.wait_for(ask(), 10))
    except (ServerError, StaleWeightsError, EngineDiedError, ValueError) as error:
        assert type(error) is not ValueError or server.url in str(error), repr(error)
        assert len(str(error)) < 2000
        return ERROR
    (completion,) = group.completions
    ids, logprobs = completion.token_ids, completion.logprobs
    assert len(ids) == len(logprobs) > 0 and all(type(i) is int and i >= 0 for i in ids), completion
    assert all(type(p) is float and math.isfinite(p) for p in logprobs) and isinstance(completion.text, str), completion
    return WORKS
