"""Tools of a real MCP server and an environment of a real OpenEnv server, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightrl.environments import MCPEnvironment, OpenEnvironment, Reply, ToolCall
from lightrl.records import CompletionGroup, GenerationRequest, Trajectory
from tests.environments.scripted import TOKENIZER, ScriptedAttempts, ScriptedEngine, Turn, alone, play_one, said
from tests.ports import held_port

HERE = Path(__file__).resolve().parent


def calls(*names: str, **arguments: Any) -> Turn:
    return said("", *(ToolCall(name, arguments, f"call{i:05d}") for i, name in enumerate(names)))


def results(trajectory: Trajectory) -> list[Any]:
    """What the environment said after the first message."""
    return [message["content"] for message in trajectory.messages[1:] if message["role"] != "assistant"]


class Server:
    def __init__(self, file: str, *arguments: str) -> None:
        self.holder = held_port()
        self.port = int(self.holder.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
        self.process = subprocess.Popen([sys.executable, str(HERE / file), str(self.port), *arguments], env=environment)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        raise AssertionError("the server did not come up")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.holder.close()


# ---- MCP -------------------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, str(HERE / "mcp_server.py")]


def children() -> set[int]:
    import psutil

    return {process.pid for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE}


def test_the_tools_of_an_mcp_server_are_called_and_its_errors_told() -> None:
    pytest.importorskip("mcp")
    before = children()
    turns = [calls("add", a=2), calls("add", a="x"), calls("fails"), calls("nothing"), calls("sleeps"), said("done")]
    made: list[MCPEnvironment] = []

    def make() -> MCPEnvironment:
        made.append(MCPEnvironment(COMMAND, tool_timeout=4))
        return made[-1]

    trajectory = play_one(make, turns)
    first, wrong, fails, unknown, late = results(trajectory)
    assert trajectory.stop_reason == "stop" and first == "total 2"
    assert wrong.startswith("Error: ") and "valid integer" in wrong
    assert fails.startswith("Error: ") and "out of paper" in fails
    assert unknown == "Error: unknown tool 'nothing'. Available tools: add, fails, sleeps, dies."
    assert late == "Error: sleeps took longer than 4 seconds."
    assert trajectory.metrics["tools/calls"] == 5 and trajectory.metrics["tools/errors"] == 3
    add = made[0].tools[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Adds to the total.")
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    assert children() <= before, "the server's process has ended with the attempt"


def test_an_mcp_server_that_dies_in_a_call_is_a_failure_and_leaves_no_process() -> None:
    pytest.importorskip("mcp")
    before = children()
    trajectory = play_one(lambda: MCPEnvironment(COMMAND), [calls("add", a=1), calls("dies"), said("done")])
    assert trajectory.stop_reason == "failure" and "MCP server" in str(trajectory.failure)
    absent = play_one(lambda: MCPEnvironment([sys.executable, "-c", "raise SystemExit(1)"]), [said("done")])
    assert absent.stop_reason == "failure" and "MCP server" in str(absent.failure)
    assert children() <= before


def test_an_mcp_server_over_http_has_own_tools_and_rewards_beside_it_and_may_be_killed() -> None:
    pytest.importorskip("mcp")

    class Scored:
        def reset(self, **row: Any) -> str:
            self.good = 0.0
            return " Count."

        def praise(self) -> str:
            """Praises."""
            self.good = 1.0
            return "thanks"

        def get_reward(self) -> float:
            return self.good

    server = Server("mcp_server.py")
    try:
        environment = lambda: MCPEnvironment(f"{server.url}/mcp", Scored, tool_timeout=600)  # noqa: E731
        trajectory = play_one(environment, [calls("add", "praise"), said("done")])
        assert trajectory.turn_rewards == [0.0, 1.0] and trajectory.messages[0]["content"] == "Go. Count."
        assert "required" in results(trajectory)[0] and results(trajectory)[1] == "thanks"

        class Kills(ScriptedEngine):
            async def __call__(self, request: GenerationRequest) -> CompletionGroup:
                if len(self.asked) == 1:
                    server.kill()
                return await super().__call__(request)

        turns = [calls("add", a=1), calls("add", a=1), said("done")]
        began = time.monotonic()
        killed = play_one(environment, turns, engine=Kills(turns))
        assert killed.stop_reason == "failure" and "MCP server" in str(killed.failure)
        assert time.monotonic() - began < 100
    finally:
        server.kill()


# ---- OpenEnv ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guess() -> Iterator[Server]:
    pytest.importorskip("openenv")
    server = Server("openenv_server.py")
    yield server
    server.kill()


def test_an_environment_of_openenv_is_played(guess: Server) -> None:
    make = partial(OpenEnvironment, guess.url, observation_field="text")
    trajectory = play_one(make, [said("1"), said("2"), said("7")], seed=2**40 + 7)
    assert trajectory.messages[0]["content"] == "Go.Guess a digit."
    assert trajectory.stop_reason == "stop" and results(trajectory) == ["no, 1 tries", "no, 2 tries"]
    assert trajectory.turn_rewards == [-0.1, -0.1, 1.0]


def test_columns_of_the_row_reach_the_reset_of_openenv(guess: Server) -> None:
    make = partial(OpenEnvironment, guess.url, observation_field="text")
    asked = play_one(make, [said("3")], {"prompt": "Go. ", "question": "Which?", "answer": None, "seed": 3})
    assert asked.messages[0]["content"] == "Go. Which?" and asked.turn_rewards == [1.0]


def test_an_action_that_openenv_does_not_take_is_told_to_the_policy(guess: Server) -> None:
    make = partial(OpenEnvironment, guess.url, observation_field="text")
    trajectory = play_one(make, [said("a long way round to a seven"), said("7")], seed=7)
    assert (trajectory.stop_reason, trajectory.failure, trajectory.turn_rewards) == ("stop", None, [0.0, 1.0])
    assert results(trajectory)[0].startswith("Error: message: ")
    assert trajectory.metrics["invalid_actions"] == 1.0


def test_remote_environments_are_given_back_whatever_ends_an_attempt(guess: Server) -> None:
    """The server has two places: attempts that fail, run into limits or are cancelled must not keep theirs."""

    make = partial(OpenEnvironment, guess.url, observation_field="text")
    for _ in range(2):
        failed = play_one(make, [said("broken dice")])
        assert failed.stop_reason == "failure" and "the dice are gone" in str(failed.failure)
        assert play_one(make, [said("x"), said("x")], max_turns=2).stop_reason == "turns"

    async def cancelled() -> None:
        attempts = ScriptedAttempts(make, turns=[said("x")], tokenizer=TOKENIZER)
        asked = asyncio.Event()

        async def never(request: GenerationRequest) -> CompletionGroup:
            asked.set()
            await asyncio.sleep(60)
            raise AssertionError

        task = asyncio.ensure_future(alone(attempts, never, {}, number=2))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert play_one(make, [said("x"), said("x")], max_turns=2).stop_reason == "turns"


def test_typed_actions_of_openenv_are_json_and_a_lost_session_is_no_other_game() -> None:
    pytest.importorskip("openenv")
    server = Server("openenv_server.py", "corner")

    make = partial(OpenEnvironment, server.url, observation_field="text")

    class Dropped(OpenEnvironment):
        async def step(self, reply: Reply) -> Any:
            if reply.content.startswith("drop"):
                await self._client.disconnect()
            return await super().step(Reply(reply.content.removeprefix("drop ")))

    corner = '{"row": 2, "col": 2}'
    try:
        bad = ["2, 2", "[2, 2]", '{"row": 2}', '{"row": 2, "col": 3}', '{"row": 2, "cow": 2, "col": 0}']
        found = play_one(make, [said(text) for text in (*bad, '{"row": 0, "col": 2}', corner)])
        assert (found.stop_reason, found.turn_rewards) == ("stop", [0.0] * 6 + [1.0])
        assert [text.startswith("Error: ") for text in results(found)] == [True] * 5 + [False]
        assert "row, col, note" in results(found)[0] and results(found)[2].startswith("Error: col: ")
        assert found.metrics["invalid_actions"] == 5.0
        swore = play_one(make, [said('{"row": 2, "col": 2, "note": "damn"}')])
        assert (swore.stop_reason, swore.failure, swore.turn_rewards) == ("stop", None, [0.0])
        lost = play_one(lambda: Dropped(server.url, observation_field="text"), [said(f"drop {corner}")])
        assert lost.stop_reason == "failure" and "session" in str(lost.failure)
    finally:
        server.kill()


def test_an_openenv_server_that_is_not_there_or_dies_is_a_failure() -> None:
    pytest.importorskip("openenv")
    server = Server("openenv_server.py")

    class Kills(OpenEnvironment):
        async def step(self, reply: Reply) -> Any:
            server.kill()
            return await super().step(reply)

    died = play_one(lambda: Kills(server.url), [said("1"), said("2")])
    assert died.stop_reason == "failure" and died.failure
    absent = play_one(lambda: OpenEnvironment(server.url), [said("1")])
    assert absent.stop_reason == "failure" and absent.failure
