"""Attempts in environments: tools, limits, failures, and what the policy sees of them."""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightrl.environments import Environment, EnvironmentFailedError, Reply, Step, ToolEnvironment
from lightrl.records import Prompts, Scores, Trajectory
from lightrl.rollout.collector import ScoredGroup
from tests.environments.families import FAMILIES, make_tokenizer
from tests.environments.scripted import (
    TOKENIZER,
    Script,
    ScriptedAttempts,
    ScriptedEngine,
    Turn,
    alone,
    call,
    play_group,
    play_one,
    said,
    spell,
)

HELD = threading.Event()


class Calculator:
    """As TRL's documentation writes environments."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, **kwargs: Any) -> str | None:
        self.total = kwargs["start"]
        return f" Begin at {self.total}."

    def add(self, a: int) -> str:
        """
        Adds to the total.

        Args:
            a: what to add

        Returns:
            The new total.
        """
        self.total += a
        return f"total {self.total}"

    async def double(self) -> str:
        """Doubles the total."""
        await asyncio.sleep(0.01)
        self.total *= 2
        return f"total {self.total}"

    def fail(self) -> str:
        """Raises."""
        raise ValueError("no such thing")

    def hang(self) -> str:
        """Takes as long as it is held."""
        HELD.wait(60)
        return "late"

    def server(self) -> str:
        """Asks a server that is down."""
        raise ConnectionRefusedError("tool server is down")

    def get_reward(self) -> float:
        return float(self.total)

    def _private(self) -> None:
        raise AssertionError


def test_a_class_written_for_trl_plays_unchanged() -> None:
    turns = [said("", call(0, a=2)), said("", ToolCallOf("double")), said("done")]
    row = {"prompt": [{"role": "user", "content": "Count."}], "start": 5}
    trajectory = play_one(lambda: ToolEnvironment(Calculator), turns, row)
    assert trajectory.stop_reason == "stop"
    assert trajectory.messages[0]["content"] == "Count. Begin at 5."
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["total 7", "total 14"]
    assert trajectory.turn_rewards == [0.0, 0.0, 14.0]
    assert row["prompt"] == [{"role": "user", "content": "Count."}]  # the data set's row is not changed
    assert trajectory.metrics["tool_calls"] == 2


@pytest.mark.parametrize("base", [object, Calculator])
def test_a_tool_class_without_a_reward_leaves_scoring_to_the_functions(base: type) -> None:
    class Tools(base):  # type: ignore[misc]
        def reset(self, **row: Any) -> None:
            pass

        if base is Calculator:

            def get_reward(self) -> None:
                pass

    malformed = [said("<tool_call>{", errors=["the tool call cannot be read."]), said("done")]
    played = [play_one(lambda: ToolEnvironment(Tools), turns) for turns in ([said("done")], malformed)]
    assert [t.turn_rewards for t in played] == [[], []] and not any(t.failed for t in played)
    punished = play_one(lambda: ToolEnvironment(Tools), malformed, parse_error_reward=-0.5)
    assert punished.turn_rewards == [-0.5, 0.0]

    class Steps(ToolEnvironment):
        async def step(self, reply: Reply) -> Step:
            return Step(reward=0.0, done=True)

    if base is object:
        assert play_one(lambda: Steps(Tools), [said("wrong")]).turn_rewards == [0.0]
    unscored, zero = Scores([math.nan] * 2, {}), Scores([0.0, 0.5], {})
    prompt = Prompts([[3]], [""])
    assert all(map(math.isnan, ScoredGroup(prompt, played, unscored).rewards))
    assert ScoredGroup(prompt, played, zero).rewards == [0.0, 0.5]


def ToolCallOf(name: str, **arguments: Any) -> Any:
    from lightrl.environments import ToolCall

    return ToolCall(name, arguments, "call00000")


def test_wrong_calls_are_told_to_the_policy_and_counted() -> None:
    turns = [
        said("", ToolCallOf("fail")),
        said("", ToolCallOf("nothing")),
        said("", ToolCallOf("add", b=1)),
        said("", ToolCallOf("add", a="x")),
        said("done"),
    ]
    trajectory = play_one(lambda: ToolEnvironment(Calculator), turns, {"start": 0})
    told = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert told[0] == "Error: ValueError: no such thing"
    assert told[1].startswith("Error: unknown tool 'nothing'. Available tools: add,")
    assert told[2].startswith("Error: add: a: Field required") and "b: Unexpected argument" in told[2]
    assert told[3].startswith("Error: add: a: ") and '"x"' in told[3]
    assert trajectory.metrics["tools/errors"] == 4
    assert trajectory.failure is None


def test_a_hanging_sync_tool_is_left_behind_and_counted_and_the_policy_is_told() -> None:
    turns = [said("", ToolCallOf("hang")), said("done")]
    HELD.clear()
    try:
        trajectory = play_one(lambda: ToolEnvironment(Calculator, tool_timeout=0.1), turns, {"start": 0})
        assert [thread for thread in threading.enumerate() if thread.name == "Calculator"], "it is still held"
    finally:
        HELD.set()
    assert trajectory.messages[-2]["content"] == "Error: hang took longer than 0.1 seconds."
    assert trajectory.metrics["tools/left_behind"] == 1
    assert trajectory.stop_reason == "stop"


def test_infrastructure_failures_are_failures_and_never_reward_zero() -> None:
    trajectory = play_one(lambda: ToolEnvironment(Calculator), [said("", ToolCallOf("server"))], {"start": 4})
    assert trajectory.stop_reason == "failure"
    assert trajectory.failure == "ConnectionRefusedError: tool server is down"
    assert len(trajectory.rows) == 1  # what was sampled is kept for the record

    class Broken(Script):
        async def step(self, reply: Reply) -> Step:
            raise EnvironmentFailedError("sandbox is gone")

    trajectory = play_one(lambda: Broken([]), [said("hello")])
    assert (trajectory.stop_reason, trajectory.failure) == ("failure", "EnvironmentFailedError: sandbox is gone")

    class Told(Script):
        async def step(self, reply: Reply) -> Step:
            return Step(reward=1.0, done=True, failure="judge is down")

    assert play_one(lambda: Told([]), [said("hello")]).failure == "judge is down"

    def absent() -> Environment:
        raise OSError("no container")

    trajectory = play_one(absent, [])
    assert (trajectory.stop_reason, trajectory.failure) == ("failure", "OSError: no container")


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "finish", "state_key", "close"])
def test_what_is_no_exception_fails_the_attempt_and_not_the_loop(method: str) -> None:
    """Such as `sys.exit` of a parser of command lines."""

    async def leaves_later(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit("out")

    def leaves(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit("out")

    plain = {"__init__": leaves, "state_key": leaves}
    made: Any = type("Leaves", (Script,), {method: plain.get(method, leaves_later)})
    if method == "close":
        with pytest.warns(UserWarning, match="Failed to close an environment: SystemExit: out"):
            assert play_one(lambda: made([said("hello")]), [said("hello")]).stop_reason == "stop"
        return
    trajectory = play_one(lambda: made([said("hello")]), [said("hello")])
    assert trajectory.stop_reason == "failure"
    assert str(trajectory.failure).endswith("SystemExit: out")


def test_calls_of_one_turn_end_with_the_one_that_fails() -> None:
    """A tool server that is down ends the attempt; what its other calls were about to do does not happen behind it."""
    seen: list[str] = []

    class Tools:
        def reset(self, **row: Any) -> None: ...

        async def down(self) -> str:
            """Fails."""
            await asyncio.sleep(0)
            raise EnvironmentFailedError("the sandbox is gone")

        async def slow(self) -> str:
            """Takes long, and needs a moment to clean up."""
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                seen.append("slow cleaned up")
            return ""

        def thread(self) -> str:
            """Is left to its end: threads cannot be ended."""
            time.sleep(0.3)
            return ""

        def later(self) -> str:
            """Would come after `thread`."""
            seen.append("later began")
            return ""

    turn = said("", *(ToolCallOf(name) for name in ("thread", "later", "slow", "down")))
    trajectory = play_one(lambda: ToolEnvironment(Tools), [turn])
    assert trajectory.failure == "EnvironmentFailedError: the sandbox is gone"
    time.sleep(0.5)
    assert seen == ["slow cleaned up"]


def test_states_are_equal_where_pictures_are_whatever_object_holds_them() -> None:
    def state(picture: Any) -> str:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "a"}]
        return Script([]).state_key([{"role": "user", "content": content}])

    def picture(value: int, mode: str = "RGB") -> Image.Image:
        return Image.fromarray(np.full((4, 6, 3), value, np.uint8)).convert(mode)

    buffer = io.BytesIO()
    picture(7).save(buffer, format="PNG")
    values = [picture(7), picture(8), picture(7, "L"), picture(7).resize((6, 5)), b"7", b"8"]
    keys = [state(value) for value in values]
    assert len(set(keys)) == len(keys), "what differs differs"
    assert state(Image.open(buffer)) == state(picture(7)) == state(np.asarray(picture(7))) == keys[0]
    with pytest.raises(TypeError, match="Environment.state_key"):
        state(object())


def test_two_calls_where_the_template_takes_one_are_a_malformed_reply() -> None:
    tokenizer = make_tokenizer(FAMILIES["llama3"])
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    turns = [
        Turn(Reply("", None, [call(0, a=1), call(1, a=2)]), [*spell(tokenizer, "two calls"), end]),
        Turn(Reply("done"), [*spell(tokenizer, "done"), end]),
    ]
    attempts = ScriptedAttempts(lambda: ToolEnvironment(Calculator), turns=turns, tokenizer=tokenizer)
    (trajectory,) = asyncio.run(alone(attempts, ScriptedEngine(turns), {"start": 0}))
    assert trajectory.messages[1] == {"role": "assistant", "content": "two calls"}
    assert "takes one tool call at a time" in trajectory.messages[2]["content"]
    assert trajectory.metrics["parse_errors"] == 1


def test_results_are_one_user_message_for_templates_without_tool_messages() -> None:
    turns = [said("", call(0, a=1), call(1, a=2)), said("done")]
    trajectory = play_one(lambda: ToolEnvironment(Calculator, result_role="user"), turns, {"start": 0})
    assert trajectory.messages[-2] == {"role": "user", "content": "total 1\ntotal 3"}


class Patient(Script):
    """Asks on and on, and rewards how it ended."""

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(0.02)
        return Step([{"role": "user", "content": "And then?"}], reward=1.0)

    async def finish(self, stop_reason: str) -> float:
        return {"turns": 10.0, "tokens": 20.0, "time": 30.0, "length": 40.0}[stop_reason]


def test_timeouts_and_limits_that_the_policy_caused_are_scored_with_their_name() -> None:
    turns = [said("hello") for _ in range(9)]
    ended = play_one(lambda: Patient([]), turns, max_turns=3)
    assert (ended.stop_reason, ended.turn_rewards, ended.failure) == ("turns", [1.0, 1.0, 11.0], None)
    ended = play_one(lambda: Patient([]), turns, max_seconds=0.03)
    assert (ended.stop_reason, ended.turn_rewards[-1], ended.failure) == ("time", 30.0, None)
    ended = play_one(lambda: Patient([]), turns, max_tokens=300)
    assert (ended.stop_reason, ended.failure) == ("tokens", None)
    assert ended.turn_rewards[-1] == 21.0
    assert len(ended.rows[0].token_ids) <= 300
    ended = play_one(lambda: Patient([]), [said("hel", finish="length")])
    assert (ended.stop_reason, ended.turn_rewards) == ("length", [40.0])


def test_text_that_is_no_unicode_is_a_failure() -> None:
    class Names(Script):
        async def step(self, reply: Reply) -> Step:
            return Step([{"role": "user", "content": "caf\udce9"}])

    trajectory = play_one(lambda: Names([]), [said("hello")] * 2)
    assert trajectory.stop_reason == "failure" and "can't be tokenized" in str(trajectory.failure)
    json.dumps(trajectory.messages, ensure_ascii=False).encode()  # so that they can be saved


def test_a_malformed_call_is_told_ended_or_punished_as_configured() -> None:
    turns = [said("<tool_call>{", errors=["the tool call cannot be read."]), said("done")]
    told = play_one(lambda: ToolEnvironment(Calculator), turns, {"start": 1}, parse_error_reward=-0.5)
    assert told.messages[-2] == {"role": "user", "content": "Error: the tool call cannot be read."}
    assert told.turn_rewards == [-0.5, 1.0]
    assert told.metrics["parse_errors"] == 1
    assert {0, 1} <= set(told.rows[0].turn_ids)
    ended = play_one(lambda: ToolEnvironment(Calculator), turns, {"start": 1}, on_parse_error="end")
    assert (ended.stop_reason, len(ended.turn_rewards), ended.failure) == ("stop", 1, None)


class Answering(Environment):
    """Gives what it is told to."""

    def __init__(self, step: Any = None, last: Any = 0.0) -> None:
        self.answers = step or Step(done=True), last

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> Any:
        return [{"role": "user", "content": "?"}]

    async def step(self, reply: Reply) -> Any:
        return self.answers[0]

    async def finish(self, stop_reason: str) -> Any:
        return self.answers[1]


class ForgetsToReturn(Answering):
    async def step(self, reply: Reply) -> Any:
        pass


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Answering(Step(reward=float("nan"), done=True)), "Answering: `step` returned the reward nan"),
        (Answering(last=float("inf")), "Answering: `finish` returned the reward inf"),
        (ForgetsToReturn(), "ForgetsToReturn: `step` returned None"),
        (Answering(Step()), r"Answering: `step` returned \(\)"),
    ],
)
def test_an_environment_that_breaks_its_contract_ends_the_run_by_name(environment: Any, message: str) -> None:
    """A reward that is no number would be taken for an attempt that nothing scored, no answer for one that is late."""
    with pytest.raises(ValueError, match=message):
        play_one(lambda: environment, [said("1"), said("2")])


def test_reset_draws_one_task_for_a_group_or_the_run_stops() -> None:
    class Random(Script):
        number = 0

        async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
            Random.number += 1
            return [{"role": "user", "content": f"Task {seed if 'row' in row else Random.number}"}]

    def play(row: Mapping[str, Any]) -> list[Trajectory]:
        return play_group(lambda: Random([Turn(Reply("x"), [1])]), [said("hello")], row, number=3, seed=5)

    group = play({"row": 1})
    assert [t.messages[0]["content"] for t in group] == ["Task 5"] * 3
    with pytest.raises(ValueError, match="different messages for two trajectories of a group"):
        play({})


def test_no_more_environments_than_allowed_live_at_once_and_all_are_closed() -> None:
    alive: list[int] = [0, 0, 0]

    class Counted(Script):
        async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
            alive[0] += 1
            alive[1] = max(alive[:2])
            assert alive[0] <= attempts.playing <= 2
            await asyncio.sleep(0.01)
            if seed == 3:
                raise OSError("gone")
            return await super().reset(row, seed=seed)

        async def close(self) -> None:
            alive[0] -= 1
            alive[2] += 1

    attempts = ScriptedAttempts(
        lambda: Counted([Turn(Reply("x"), [1])]), max_environments=2, turns=[said("hello")], tokenizer=TOKENIZER
    )

    async def several() -> None:
        await asyncio.gather(*(alone(attempts, ScriptedEngine([said("hi")]), {}, seed=i) for i in range(6)))

    asyncio.run(several())
    asyncio.run(several())  # in another event loop
    assert alive == [0, 2, 12] and attempts.playing == 0


def test_an_environment_is_closed_when_its_attempt_is_cancelled() -> None:
    closed = []
    stepping = threading.Event()

    class Stuck(Script):
        async def step(self, reply: Reply) -> Step:
            stepping.set()
            await asyncio.sleep(3600)
            return Step(done=True)

        async def close(self) -> None:
            closed.append(True)

    attempts = ScriptedAttempts(lambda: Stuck([]), turns=[said("hello")], tokenizer=TOKENIZER)

    async def cancel() -> None:
        run = asyncio.ensure_future(alone(attempts, ScriptedEngine([said("hi")]), {}))
        while not stepping.is_set():  # set on the environments' loop
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancel())
    assert closed == [True]


def test_rendering_a_turn_does_not_cost_more_with_more_turns_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    original = type(TOKENIZER).apply_chat_template

    def counted(self: Any, messages: Any, **kwargs: Any) -> Any:
        lengths.append(len(messages))
        return original(self, messages, **kwargs)

    monkeypatch.setattr(type(TOKENIZER), "apply_chat_template", counted)
    turns = [said("", call(0, a=1)) for _ in range(20)] + [said("done")]
    trajectory = play_one(lambda: ToolEnvironment(Calculator), turns, {"start": 0}, max_turns=30)
    assert trajectory.metrics["turns"] == 21
    assert max(lengths) <= 7  # the longest conversation that is rendered, of 42 messages
