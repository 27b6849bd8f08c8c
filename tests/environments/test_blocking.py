"""Users' code that blocks holds up neither other environments nor the engine, and outlives no time limit."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from lightrl.environments import Environment, Reply, Step, ToolCall, ToolEnvironment
from lightrl.records import CompletionGroup, GenerationRequest
from tests.environments.scripted import (
    ScriptedEngine,
    play_group,
    play_one,
    said,
)

NUMBER = 4


@pytest.fixture
def held() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Quick(Environment):
    """Ends after one reply."""

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Go."}]

    async def step(self, reply: Reply) -> Step:
        return Step(reward=1.0, done=True)


ANSWERS = {"reset": [{"role": "user", "content": "?"}], "step": Step(done=True), "finish": 0.0, "__init__": None}


def blocking(method: str, kind: str, wait: Callable[[], object]) -> type[Environment]:
    """A class whose method blocks, as plain `def`, or as `async def` with or without an `await`."""

    async def awaits(self: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        wait()
        return ANSWERS[method]

    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        return ANSWERS[method]

    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        return ANSWERS[method]

    function: Any = {"async": coroutine, "awaits": awaits, "plain": plain}[kind]
    function.__name__ = method
    return type("Blocking", (Quick,), {method: function})


PLACES = [("__init__", "plain"), ("reset", "async"), ("step", "async"), ("finish", "plain")]


@pytest.mark.parametrize(("method", "kind"), PLACES)
def test_methods_that_block_run_at_the_same_time(method: str, kind: str) -> None:
    everyone = threading.Barrier(NUMBER, timeout=60)  # which one after another never pass
    group = play_group(blocking(method, kind, everyone.wait), [said("hello")], number=NUMBER)
    assert [t.stop_reason for t in group] == ["stop"] * NUMBER, group[0].failure


@pytest.mark.parametrize(("method", "kind"), [("__init__", "plain"), ("step", "async"), ("reset", "awaits")])
@pytest.mark.filterwarnings("ignore:.*(blocks|still running)")
def test_what_blocks_ends_at_its_limit(method: str, kind: str, held: threading.Event) -> None:
    limits: dict[str, Any] = {"max_seconds": 0.3} if method == "step" else {"environment_timeout": 0.3}
    trajectory = play_one(blocking(method, kind, lambda: held.wait(60)), [said("hello")], **limits)
    assert not held.is_set()
    if kind == "awaits":
        assert "blocks the event loop" in str(trajectory.failure)
    elif method == "step":
        assert (trajectory.stop_reason, trajectory.failure) == ("time", None)
    else:
        assert "took longer than environment_timeout" in str(trajectory.failure)


def test_the_engine_is_asked_while_an_environment_blocks(held: threading.Event) -> None:
    class Waits(Quick):
        async def step(self, reply: Reply) -> Step:
            await asyncio.sleep(0)
            return Step(reward=float(held.wait(30)), done=True)

    turn = said("hello")

    async def ask(request: GenerationRequest) -> CompletionGroup:
        if request.seed // 100:  # the second attempt's, which is answered while the first one's step blocks
            await asyncio.sleep(0.3)
            held.set()
        return await ScriptedEngine([turn])(request)

    group = play_group(Waits, [turn], engine=ask, number=2)
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
        assert [t.failure for t in play_group(Shares, [said("hello")], number=NUMBER)] == [None] * NUMBER


@pytest.mark.filterwarnings("ignore:.*blocks")
def test_a_step_that_blocks_the_loop_fails_the_others_and_leaves_a_loop_to_later_ones(held: threading.Event) -> None:
    made: list[Environment] = []

    class Hangs(Quick):
        def __init__(self) -> None:
            made.append(self)

        async def step(self, reply: Reply) -> Step:
            await asyncio.sleep(0.01)
            if self is made[0]:
                held.wait(60)
            await asyncio.sleep(0 if held.is_set() else 30)
            return Step(done=True)

    both = play_group(Hangs, [said("hello")], number=2, max_seconds=6)
    assert all("blocks the event loop" in str(trajectory.failure) for trajectory in both)  # neither is scored
    assert play_one(blocking("step", "awaits", lambda: None), [said("hello")], max_seconds=30).stop_reason == "stop"


def test_what_does_not_await_runs_in_one_thread_per_environment() -> None:
    class Database(Quick):
        def __init__(self) -> None:
            self.connection = sqlite3.connect(":memory:")  # which other threads can't use

        def reset(self, row: Mapping[str, Any], *, seed: int) -> Any:
            self.connection.execute("select 1")
            return ANSWERS["reset"]

        async def step(self, reply: Reply) -> Step:
            (value,) = self.connection.execute("select 3").fetchone()
            return Step(reward=float(value), done=True)

    trajectory = play_one(Database, [said("hello")])
    assert trajectory.turn_rewards == [3.0], trajectory.failure


def test_an_async_tool_that_blocks_holds_up_no_other_environment_and_ends_at_its_limit(held: threading.Event) -> None:
    everyone = threading.Barrier(NUMBER, timeout=60)

    class Tools:
        def reset(self, **row: Any) -> None: ...

        async def meet(self) -> str:
            """Meets the others."""
            everyone.wait()
            return "met"

        async def hang(self) -> str:
            """Hangs."""
            held.wait(60)
            return "late"

    met, hung = (said("", ToolCall(name, {}, "call00000")) for name in ("meet", "hang"))
    group = play_group(lambda: ToolEnvironment(Tools), [met, said("done")], number=NUMBER)
    assert [t.messages[-2]["content"] for t in group] == ["met"] * NUMBER
    with pytest.warns(UserWarning, match="still running"):
        trajectory = play_one(lambda: ToolEnvironment(Tools, tool_timeout=0.3), [hung, said("done")])
    assert trajectory.messages[-2]["content"] == "Error: hang took longer than 0.3 seconds." and not held.is_set()
