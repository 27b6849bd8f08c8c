"""RemoteReward against a scripted server on a loopback socket: repetitions, refusals, bounds, and what is sent."""

from __future__ import annotations

import math
import random
import threading

import pytest

from lightrl.rewards import RemoteReward, RewardError
from tests.rewards.conftest import Loopback, scored


class Scripted(Loopback):
    """Answers each request with the next entry of `script`; when it is used up, with the lengths of the completions.

    An entry is a status code, "break" (the connection is cut) or a JSON body. Requests with the completion `failing`
    are always answered with 500.
    """

    def __init__(self) -> None:
        self.script = []
        self.failing = None
        self.running = self.most = 0
        self.lock = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        super().__init__()

    def answer(self, body):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            entry = self.script.pop(0) if self.script else {"rewards": [len(text) for text in body["completions"]]}
            if self.failing in body["completions"]:
                entry = 500
            self.lock.notify_all()
        self.gate.wait(20)
        with self.lock:
            self.running -= 1
        if entry == "break":
            return None
        return (entry, b"try again") if isinstance(entry, int) else (200, entry)


@pytest.fixture
def server():
    scripted = Scripted()
    yield scripted
    scripted.gate.set()
    scripted.close()


def test_what_passes_is_tried_again(server):
    server.script = [503, "break", 429]
    assert scored(RemoteReward(server.url, backoff=0.001), ["abc"]).total == [3.0]
    assert len(server.bodies) == 4
    assert all(body == server.bodies[0] for body in server.bodies)


def test_on_failure_none_loses_only_the_rows_of_that_request(server, caplog):
    server.failing = "ab"
    reward = RemoteReward(server.url, backoff=0.001, retries=1, on_failure="skip")
    scores = [scored(reward, [text]) for text in ("abc", "ab", "abcd")]
    assert [scores[0].total, scores[2].total] == [[3.0], [4.0]] and math.isnan(scores[1].total[0])
    assert len(server.bodies) == 4  # three, and one repetition
    assert [one.metrics for one in scores] == [{"reward/RemoteReward/unanswered": lost} for lost in (0.0, 1.0, 0.0)]
    assert "failed to score 1 completion after 2 attempts" in caplog.text


def test_the_last_failure_is_shown_without_secrets(monkeypatch, caplog):
    import httpx

    monkeypatch.setenv("MY_TOKEN", "a-very-secret-one")
    reward = RemoteReward("http://127.0.0.1:9", token_env="MY_TOKEN", retries=0, on_failure="skip")

    def post(self, *_, **__):
        raise httpx.LocalProtocolError(f"Illegal header value {self.headers['Authorization'].encode()!r}")

    monkeypatch.setattr(httpx.AsyncClient, "post", post)
    assert math.isnan(scored(reward, ["a"]).total[0])
    assert "Illegal header value b'Bearer ***'" in caplog.text and "a-very-secret-one" not in caplog.text


@pytest.mark.parametrize("status", [401, 422])
def test_a_refusal_is_an_error_at_once(server, status):
    server.script = [status]
    with pytest.raises(RewardError, match=f"rejected the request with status {status}: try again"):
        scored(RemoteReward(server.url, on_failure="skip"), ["a"])
    assert len(server.bodies) == 1


@pytest.mark.parametrize("body", [{"rewards": [1.0]}, {"scores": [1.0, 2.0]}])
def test_an_answer_that_is_no_rewards(server, body):
    server.script = [body]
    with pytest.raises(RewardError, match="returned .*for 2 completions"):
        scored(RemoteReward(server.url), ["a", "b"])


def test_waits_double_up_to_the_bound_with_jitter(server, monkeypatch):
    import asyncio

    waits, sleep = [], asyncio.sleep

    async def record(seconds, *result):
        if seconds >= 1:  # servers in this process sleep, too
            waits.append(seconds)
        return await sleep(0 if seconds >= 1 else seconds, *result)

    monkeypatch.setattr("lightrl.rewards.remote.asyncio.sleep", record)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    server.script = [500] * 5
    scored(RemoteReward(server.url, retries=5, backoff=4.0), ["a"])
    assert waits == [6.0, 12.0, 24.0, 48.0, 60.0]  # 1.5 * 4 * 2^k, at most 60
    waits.clear()
    server.script, server.sent = [429] * 4, {"Retry-After": "20"}
    scored(RemoteReward(server.url, retries=4, backoff=4.0), ["a"])
    assert waits == [20.0, 20.0, 24.0, 48.0]


def test_what_is_sent(server, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    reward = RemoteReward(server.url, columns=["level"], reference_column="answer", token_env="MY_TOKEN")
    scored(reward, ["a", "b"], [5, 5], level=[1, 2], answer=["x", "y"], unsent=[0, 0])
    assert server.bodies == [
        {
            "queries": ["ppa", "ppb"],
            "prompts": ["pp", "pp"],
            "completions": ["a", "b"],
            "group_ids": [5, 5],
            "references": ["x", "y"],
            "columns": {"level": [1, 2]},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    scored(RemoteReward(server.url, label_column="kind"), ["a"], kind=["k"])
    assert server.bodies[1]["labels"] == ["k"]
    assert "Authorization" not in server.headers[1]
