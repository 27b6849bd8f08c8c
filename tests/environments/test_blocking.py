"""Users' code that blocks holds up neither other environments nor the engine, and outlives no time limit."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from lightrl.environments import Environment, Reply, Step, ToolCall, ToolEnvironment, calling
from lightrl.records import CompletionGroup, GenerationRequest, Trajectory
from tests.environments.scripted import ScriptedAttempts, ScriptedEngine, Turn, alone
from tests.environments.test_attempts import SAMPLING, TOKENIZER, said

SECONDS = 0.4
NUMBER = 8


@pytest.fixture
def held() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def play(environment: Callable[[], Environment], *turns: Turn, number: int = 1, **settings: Any) -> list[Trajectory]:
    """Plays a group of attempts, each with the given replies."""
    attempts = ScriptedAttempts(environment, **settings)
    attempts.turns = turns
    attempts.setup(TOKENIZER)
    asked: dict[int, int] = {}

    async def ask(request: GenerationRequest) -> CompletionGroup:
        attempt = request.seed // 100
        asked[attempt] = asked.get(attempt, -1) + 1
        return await ScriptedEngine([turns[asked[attempt]]])(request)

    return asyncio.run(alone(attempts, ask, {"prompt": "Go."}, SAMPLING, number=number))


class Quick(Environment):
    """Ends after one reply."""

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Go."}]

    async def step(self, reply: Reply) -> Step:
        return Step(reward=1.0, done=True)


def blocking(method: str, kind: str, wait: Callable[[], object]) -> type[Environment]:
    """A class whose method blocks, as `async def` or as plain `def`."""
    before = getattr(Quick, method)

    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        return await before(self, *args, **kwargs)

    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        return (
            Step(done=True) if method == "step" else 0.0 if method == "finish" else [{"role": "user", "content": "?"}]
        )

    def make(self: Any) -> None:
        wait()

    function: Any = make if method == "__init__" else coroutine if kind == "async" else plain
    function.__name__ = method
    return type("Blocking", (Quick,), {method: function})


@pytest.mark.filterwarnings("ignore:.*blocks")
def test_a_method_without_an_await_never_waits_for_another() -> None:
    class Sleeps(Quick):
        async def step(self, reply: Reply) -> Step:
            time.sleep(SECONDS)
            return Step(done=True)

    began = time.monotonic()
    assert [t.stop_reason for t in play(Sleeps, said("hello"), number=NUMBER)] == ["stop"] * NUMBER
    assert time.monotonic() - began < 4 * SECONDS


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("method", ["__init__", "reset", "step", "finish"])
@pytest.mark.filterwarnings("ignore:.*blocks")
def test_methods_that_block_run_at_the_same_time(method: str, kind: str) -> None:
    began = time.monotonic()
    group = play(blocking(method, kind, lambda: time.sleep(SECONDS)), said("hello"), number=NUMBER)
    assert [t.stop_reason for t in group] == ["stop"] * NUMBER, group[0].failure
    assert time.monotonic() - began < NUMBER * SECONDS * 0.6


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_step_that_blocks_ends_at_max_seconds_and_is_named(kind: str, held: threading.Event) -> None:
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"Blocking: .*`step`"):
        (trajectory,) = play(blocking("step", kind, lambda: held.wait(60)), said("hello"), max_seconds=0.3)
    assert (trajectory.stop_reason, trajectory.failure) == ("time", None)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("method", ["__init__", "reset", "finish"])
@pytest.mark.filterwarnings("ignore:.*(blocks|still running)")
def test_other_methods_that_block_fail_at_their_limit(method: str, kind: str, held: threading.Event) -> None:
    began = time.monotonic()
    (trajectory,) = play(blocking(method, kind, lambda: held.wait(60)), said("hello"), environment_timeout=0.3)
    assert trajectory.stop_reason == "failure" and "took longer than environment_timeout" in str(trajectory.failure)
    assert time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore:.*blocks")
def test_the_engine_is_asked_while_an_environment_blocks(held: threading.Event) -> None:
    class Waits(Quick):
        async def step(self, reply: Reply) -> Step:
            return Step(reward=float(held.wait(30)), done=True)

    turn = said("hello")
    attempts = ScriptedAttempts(Waits)
    attempts.turns = [turn]
    attempts.setup(TOKENIZER)

    async def ask(request: GenerationRequest) -> CompletionGroup:
        if request.seed // 100:  # the second attempt's, which is answered while the first one's step blocks
            await asyncio.sleep(0.3)
            held.set()
        return await ScriptedEngine([turn])(request)

    group = asyncio.run(alone(attempts, ask, {}, SAMPLING, number=2))
    assert [t.turn_rewards for t in group] == [[1.0], [1.0]]


def test_async_methods_share_one_loop_with_their_clients_and_locks() -> None:
    class Shares(Quick):
        places: asyncio.Semaphore | None = None

        async def step(self, reply: Reply) -> Step:
            Shares.places = Shares.places or asyncio.Semaphore(1)  # a lock is bound to the loop of who waits for it
            async with Shares.places:
                await asyncio.sleep(0.01)
            return Step(done=True)

    for _ in range(2):  # also in another rollout
        assert [t.failure for t in play(Shares, said("hello"), number=4)] == [None] * 4


@pytest.mark.filterwarnings("ignore:.*blocks")
def test_a_step_that_never_returns_leaves_a_loop_to_the_others(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(Quick):
        async def step(self, reply: Reply) -> Step:
            await asyncio.sleep(0.01)
            held.wait(60)
            return Step(done=True)

    class Waits(Quick):
        async def step(self, reply: Reply) -> Step:
            await asyncio.sleep(0.01)
            return Step(done=True)

    assert play(Waits, said("hello"))[0].stop_reason == "stop"
    monkeypatch.setattr(calling, "STUCK", 0.3)
    assert play(Hangs, said("hello"), max_seconds=0.3)[0].stop_reason == "time"
    began = time.monotonic()
    assert play(Waits, said("hello"), max_seconds=30)[0].stop_reason == "stop" and time.monotonic() - began < 10


def test_an_environment_is_made_in_the_thread_that_calls_it() -> None:
    class Database(Quick):
        def __init__(self) -> None:
            self.connection = sqlite3.connect(":memory:")  # which other threads cannot use

        async def step(self, reply: Reply) -> Step:
            (value,) = self.connection.execute("select 3").fetchone()
            return Step(reward=float(value), done=True)

    (trajectory,) = play(Database, said("hello"))
    assert trajectory.turn_rewards == [3.0], trajectory.failure


@pytest.mark.filterwarnings("ignore:.*blocks")
def test_an_async_tool_that_blocks_holds_up_no_other_environment_and_ends_at_its_limit(held: threading.Event) -> None:
    class Tools:
        def reset(self, **row: Any) -> None: ...

        async def sleep(self) -> str:
            """Sleeps."""
            time.sleep(SECONDS)
            return "slept"

        async def hang(self) -> str:
            """Hangs."""
            held.wait(60)
            return "late"

    slept, hung = (said("", ToolCall(name, {}, "call00000")) for name in ("sleep", "hang"))
    began = time.monotonic()
    group = play(lambda: ToolEnvironment(Tools), slept, said("done"), number=NUMBER)
    assert [t.messages[-2]["content"] for t in group] == ["slept"] * NUMBER
    assert time.monotonic() - began < NUMBER * SECONDS * 0.6
    (trajectory,) = play(lambda: ToolEnvironment(Tools, tool_timeout=0.3), hung, said("done"))
    assert trajectory.messages[-2]["content"] == "Error: hang took longer than 0.3 seconds."
    assert time.monotonic() - began < 20
