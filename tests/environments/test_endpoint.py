"""The endpoint: programs written with official clients, and the rows that come of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from lightrl.environments import AgentProgram, EnvironmentEpisode, ToolEnvironment
from lightrl.environments.endpoint import callers
from lightrl.records import Completion, CompletionGroup, GenerationRequest, SamplingParams, Trajectory
from tests.environments import plain_program, programs
from tests.environments.scripted import TOKENIZER, alone, closing, spell
from tests.waiting import gone, no_thread_left, until

END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TWO_CALLS = f"{CALL}\n{CALL}"
FILE, PLAIN = Path(programs.__file__), Path(plain_program.__file__)
ASK = [{"role": "user", "content": "Hello"}]


class Engine:
    """Says the text of a turn, whatever it is asked, in ids that encoding would not give."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked: list[GenerationRequest] = []
        self.cancelled = 0
        self.wait: Callable[[GenerationRequest], Any] | None = None

    async def __call__(self, request: GenerationRequest) -> CompletionGroup:
        self.asked.append(request)
        if self.wait is not None:
            try:
                await self.wait(request)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        turn = request.seed % 100
        ids = [*spell(TOKENIZER, self.texts[turn % len(self.texts)]), END]
        finish: Any = "stop" if len(ids) <= request.sampling.max_new_tokens else "length"
        ids = ids[: request.sampling.max_new_tokens]
        logprobs = [-(request.seed + 1) - i / 1000 for i in range(len(ids))]
        return CompletionGroup(request, [Completion(ids, logprobs, "", finish)], turn)


def play(
    run: Any,
    engine: Any,
    row: dict[str, Any] | None = None,
    number: int = 1,
    max_model_len: int = 1 << 30,
    **settings: Any,
) -> list[Trajectory]:
    program = AgentProgram(run, **settings)
    program.setup(TOKENIZER)
    return asyncio.run(closing(program, group(program, engine, row or {}, number, max_model_len)))


async def group(
    attempts: Any, engine: Any, row: Any, number: int = 1, max_model_len: int = 1 << 30
) -> list[Trajectory]:
    sampling = SamplingParams(max_new_tokens=300)
    return await alone(attempts, engine, row, sampling, number, max_model_len=max_model_len)


def sound(trajectory: Trajectory, engine: Engine) -> None:
    """What was asked and sampled is what is trained, each token once."""
    seen = []
    for row in trajectory.rows:
        for turn in sorted(set(row.turn_ids) - {-1}):
            places = [i for i, t in enumerate(row.turn_ids) if t == turn]
            seen.append(turn)
            sampled = row.token_ids[places[0] : places[-1] + 1]
            assert places == list(range(places[0], places[-1] + 1))
            assert row.token_ids[: places[0]] in [request.token_ids for request in engine.asked]
            assert row.logprobs[places[0]] == pytest.approx(row.logprobs[places[-1]] + (len(places) - 1) / 1000)
            assert TOKENIZER.decode(sampled).removesuffix("<|im_end|>") in [*engine.texts]
        assert all(row.logprobs[i] == 0 for i, t in enumerate(row.turn_ids) if t < 0)
    assert sorted(seen) == list(range(len(seen)))


def native(engine: Engine, number: int = 1) -> list[Trajectory]:
    class Calculator:
        def reset(self, **row: Any) -> str | None:
            self.right = 1.0
            return None

        def add(self, a: int, b: int):  # type: ignore[no-untyped-def]  # a return type would be in the schema
            """
            Adds.

            Args:
                a: one
                b: two
            """
            return str(programs.add(a, b))

        def get_reward(self) -> float:
            return self.right

    attempts = EnvironmentEpisode(lambda: ToolEnvironment(Calculator))
    attempts.setup(TOKENIZER)
    return asyncio.run(group(attempts, engine, {"prompt": programs.QUESTION}, number))


# ---- the three interfaces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
@pytest.mark.parametrize(
    ("program", "more"), [("chat", {}), ("responses", {}), ("responses", {"items": True}), ("messages", {})]
)
def test_a_program_and_a_native_environment_give_the_same_rows(
    program: str, more: dict[str, Any], stream: bool
) -> None:
    said = (TWO_CALLS, "Let me see.\n" + CALL, "3")
    engine = Engine(*said)
    there = play(getattr(programs, program), engine, {"stream": stream, **more}, number=2)
    here = native(Engine(*said), number=2)
    for mine, theirs in zip(there, here, strict=True):
        assert mine.rows == theirs.rows
        assert mine.messages == theirs.messages
        assert (mine.stop_reason, mine.completion, mine.turn_rewards) == ("stop", "3", [0.0, 0.0, 1.0])
        assert mine.turn_rewards == theirs.turn_rewards
        assert len(mine.rows) == 1 and mine.metrics["forks"] == 0
        sound(mine, engine)


def test_thoughts_are_kept_whether_or_not_a_program_sends_them_back() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        said: list[Any] = list(ASK)
        for _ in range(2):
            message: Any = client.chat.completions.create(model="m", messages=said).choices[0].message
            assert message.reasoning_content == "hm"
            back = {"role": "assistant", "content": message.content}
            if row["back"]:
                back["reasoning_content"] = message.reasoning_content
            said += [back, {"role": "user", "content": "more"}]
        return 1.0

    for back in (True, False):
        (trajectory,) = play(main, Engine("<think>hm</think>ok"), {"back": back}, reasoning_parser="deepseek_r1")
        assert trajectory.failure is None
        assert trajectory.messages[1]["reasoning_content"] == "hm"
        assert trajectory.metrics["turns"] == 2


def test_an_answer_that_is_cut_says_so_in_each_interface() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        chat = client.chat.completions.create(model="m", messages=ASK, max_tokens=2)  # type: ignore[arg-type]
        assert chat.choices[0].finish_reason == "length" and chat.usage and chat.usage.completion_tokens == 2
        response = client.responses.create(model="m", input="Hello", max_output_tokens=3)
        assert response.status == "incomplete" and response.usage and response.usage.output_tokens == 3
        messages = anthropic.Anthropic(base_url=base_url, api_key=api_key).messages
        message = messages.create(model="m", messages=ASK, max_tokens=4)  # type: ignore[arg-type]
        assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 4
        return 1.0

    (trajectory,) = play(main, Engine("a long answer"))
    assert trajectory.failure is None
    assert trajectory.stop_reason == "length"
    assert [len(row.turn_ids) - row.turn_ids.count(-1) for row in trajectory.rows] == [2, 3, 4]


def test_a_token_limit_below_the_runs_minimum_lowers_it() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        client.chat.completions.create(model="m", messages=ASK, max_completion_tokens=2)  # type: ignore[arg-type]
        client.chat.completions.create(model="m", messages=ASK)  # type: ignore[arg-type]
        return 1.0

    engine, program = Engine("a long answer"), AgentProgram(main)
    program.setup(TOKENIZER)
    sampling = SamplingParams(max_new_tokens=30, min_new_tokens=4)
    (trajectory,) = asyncio.run(closing(program, alone(program, engine, {}, sampling)))
    assert trajectory.failure is None
    limits = [(request.sampling.min_new_tokens, request.sampling.max_new_tokens) for request in engine.asked]
    assert limits == [(2, 2), (4, 30)]


# ---- lineage -------------------------------------------------------------------------------------------------------


def test_sub_agents_compactions_and_repeated_requests_begin_rows_and_train_each_token_once() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)

        def ask(*said: Any) -> list[Any]:
            message = client.chat.completions.create(model="m", messages=list(said)).choices[0].message
            return [*said, {"role": "assistant", "content": message.content}]

        user = [{"role": "user", "content": text} for text in ("task", "go on", "sub-task", "finish")]
        main_one = ask(user[0])  # turn 0, row 0
        ask(user[2])  # turn 1, row 1: a sub-agent
        main_one = ask(*main_one, user[1])  # turn 2, row 0: goes on
        ask(user[0])  # turn 3, row 2: the first question again
        ask({"role": "user", "content": "summary: " + main_one[-1]["content"]}, user[3])  # turn 4, row 3: compacted
        ask(*main_one, user[3])  # turn 5, row 0
        ask(main_one[0], {"role": "assistant", "content": "edited"}, user[1])  # turn 6, row 4
        return 1.0

    engine = Engine("zero", "one", "two", "three", "four", "five", "six")
    (trajectory,) = play(main, engine)
    assert trajectory.failure is None
    assert [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows] == [[0, 2, 5], [1], [3], [4], [6]]
    assert trajectory.turn_rewards == [0.0] * 6 + [1.0]
    assert trajectory.metrics["forks"] == 4
    sound(trajectory, engine)


# ---- refusals ------------------------------------------------------------------------------------------------------


class Open:
    """An attempt whose program waits, so that a test can ask in its place."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.engine = engine
        self.settings = settings
        self.leave = threading.Event()
        self.there = threading.Event()
        self.trajectory: Any = None

    def __enter__(self) -> Open:
        def main(row: Any, base_url: str, api_key: str) -> float:
            self.url, self.key = base_url, api_key
            self.there.set()
            self.leave.wait(60)
            return 1.0

        def run() -> None:
            (self.trajectory,) = play(main, self.engine, **self.settings)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.there.wait(60)
        return self

    def end(self) -> None:
        self.leave.set()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def __exit__(self, *error: Any) -> None:
        self.end()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} | headers
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60)


def named(tool: str) -> dict[str, Any]:
    """A request for a call of a tool that it doesn't offer."""
    tools, choice = ({"type": "function", "function": {"name": name}} for name in ("other", tool))
    return {"tools": [tools], "tool_choice": choice}


def test_malformed_requests_are_refused_in_the_shape_of_their_interface_and_fail_nothing() -> None:
    with Open(Engine("Hi")) as attempt:
        bad: list[tuple[str, Any, str]] = [
            ("/chat/completions", b"{", "not valid JSON"),
            ("/chat/completions", {}, "'messages'"),
            ("/chat/completions", {"messages": [{"role": "x"}]}, "role='x'"),
            ("/chat/completions", {"messages": [{"role": "tool", "content": ""}]}, "tool_call_id"),
            ("/responses", {"input": "x", "previous_response_id": "r"}, "no response 'r'"),
            ("/responses", {"input": [{"type": "file"}]}, "is not supported"),
            ("/messages", {"messages": [{"role": "user", "content": 3}], "max_tokens": 1}, "malformed"),
            ("/chat/completions", b"[" * 10**5, "not valid JSON"),
            ("/chat/completions", {"messages": ASK, "stop": ["x", ""]}, "stop"),
            ("/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 21}, "top_logprobs=21"),
            ("/chat/completions", {"messages": ASK, **named("add")}, "add, which is not in tools"),
            ("/messages", {"messages": ASK, "tool_choice": {"type": "any"}}, "not in tools"),
            ("/chat/completions", {"messages": ASK, "n": 0}, "at least 1"),
        ]
        for path, body, message in bad:
            answer = attempt.post(path, body)
            assert answer.status_code == 400, (body, answer.text)
            said = answer.json()
            assert message in said["error"]["message"]
            assert ("type" in said) == (path == "/messages")
            assert said["error"]["type"] == "invalid_request_error"
            assert answer.headers["x-should-retry"] == "false"
        answer = attempt.post("/embeddings", {})
        assert answer.status_code == 404 and "/v1/embeddings" in answer.json()["error"]["message"]
        assert httpx.get(attempt.url + "/responses/r").status_code == 401
        assert attempt.post("/chat/completions", {"messages": ASK}).status_code == 200
    assert attempt.trajectory.stop_reason == "stop"
    assert attempt.trajectory.metrics["turns"] == 1


def test_keys_are_one_attempts_own_and_void_after_its_end() -> None:
    keys: list[str] = []
    late: list[int] = []

    def main(row: Any, base_url: str, api_key: str) -> float:
        keys.append(api_key)
        plain_program.once({}, base_url, api_key)
        while len(keys) < 3:
            time.sleep(0.01)
        if api_key == keys[2]:
            until(lambda: callers._keys == {api_key})  # the others end
            ask = (  # in another process: here, the key of another trajectory ends the run
                "import httpx, sys\nfor key in sys.argv[2:]:\n"
                "    print(httpx.get(sys.argv[1] + '/models', headers={'x-api-key': key}).status_code)"
            )
            said = subprocess.run([sys.executable, "-c", ask, base_url, *keys], capture_output=True, check=True).stdout
            late.extend(map(int, said.split()))
        return 1.0

    play(main, Engine("Hi"), number=3)
    assert len(set(keys)) == 3 and min(map(len, keys)) > 40
    assert late == [401, 401, 200]


# ---- limits --------------------------------------------------------------------------------------------------------


def endless(row: Any, base_url: str, api_key: str) -> float:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    said: list[Any] = list(ASK)
    while True:
        answer = client.chat.completions.create(model="m", messages=said).choices[0].message
        said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]


def test_limits_that_the_policy_ran_into_are_scored_by_their_names() -> None:
    (trajectory,) = play(endless, Engine("Hi"), max_turns=3)
    assert (trajectory.stop_reason, trajectory.turn_rewards) == ("turns", [0.0, 0.0, 0.0])
    assert trajectory.failure is None
    (trajectory,) = play(endless, Engine("Hi"), max_turns=3, limit_reward=-1.0)
    assert trajectory.turn_rewards == [0.0, 0.0, -1.0]
    (trajectory,) = play(endless, Engine("Hi"), max_turns=3, limit_reward=None)
    assert trajectory.turn_rewards == []
    (trajectory,) = play(endless, Engine("Hi"), max_model_len=200)
    assert trajectory.stop_reason == "tokens" and trajectory.metrics["turns"] > 2
    assert max(len(row.token_ids) for row in trajectory.rows) <= 200
    (trajectory,) = play(plain_program.once, Engine("Hi"), {"sleep": 5}, max_seconds=2)
    assert (trajectory.stop_reason, trajectory.turn_rewards) == ("time", [0.0])


def test_waiting_for_the_engine_takes_none_of_the_programs_time() -> None:
    engine = Engine("Hi")
    engine.wait = lambda request: asyncio.sleep(3.0)
    (trajectory,) = play(plain_program.once, engine, max_seconds=2.5)
    assert (trajectory.stop_reason, trajectory.turn_rewards) == ("stop", [0.5])


# ---- failures ------------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_is_a_failure_and_a_5xx() -> None:
    seen: list[int] = []

    def main(row: Any, base_url: str, api_key: str) -> float:
        try:
            plain_program.once({}, base_url, api_key)
        except urllib.error.HTTPError as error:
            seen.append(error.code)
        time.sleep(0.2)
        return 1.0

    async def engine(request: GenerationRequest) -> CompletionGroup:
        raise RuntimeError("the engine is gone")

    (trajectory,) = play(main, engine)
    assert trajectory.stop_reason == "failure" and trajectory.turn_rewards == []
    assert trajectory.failure == "RuntimeError: the engine is gone"
    assert until(lambda: seen == [503])


def test_a_program_that_raises_dies_or_asks_for_nothing_is_a_failure() -> None:
    (trajectory,) = play(plain_program.once, Engine("Hi"), {"raise": True})
    assert trajectory.failure == "the program failed: RuntimeError: no such file"
    assert "plain_program.py" in trajectory.raised_at and "no such file" in trajectory.raised_at
    (trajectory,) = play(lambda row, base_url, api_key: None, Engine("Hi"))
    assert trajectory.failure == "the program exited without a turn."
    (trajectory,) = play(lambda row, base_url, api_key: sys.exit(2), Engine("Hi"))
    assert "the program failed: SystemExit: 2\nIt sent no request" in str(trajectory.failure)
    (trajectory,) = play(f"{PLAIN}:once", Engine("Hi"), {"raise": True}, process=True)
    assert "RuntimeError: no such file" in str(trajectory.failure) and "Traceback" in str(trajectory.failure)
    (trajectory,) = play(f"{PLAIN}:once", Engine("Hi"), {"die": True}, process=True)
    assert "its process exited with code -9" in str(trajectory.failure)
    assert trajectory.stop_reason == "failure" and trajectory.turn_rewards == []


def test_what_is_no_reward_is_refused() -> None:
    metrics = ({"x": None}, {"x": "a"}, [1])
    for reward in ("good", float("nan"), {"good": 1.0}, *({"reward": 1.0, "metrics": each} for each in metrics)):

        def main(row: Any, base_url: str, api_key: str, reward: Any = reward) -> Any:
            plain_program.once({}, base_url, api_key)
            return reward

        with pytest.raises(ValueError, match="run: "):
            play(main, Engine("Hi"))

    def alone(row: Any, base_url: str, api_key: str) -> Any:
        return {"reward": plain_program.once({}, base_url, api_key)}

    assert play(alone, Engine("Hi"))[0].turn_rewards == [0.5]


@pytest.mark.parametrize("how", ["ends", "cancelled"])
def test_no_process_and_no_socket_is_left(how: str, tmp_path: Path) -> None:
    row = {"children": str(tmp_path / "pids"), "sleep": 0 if how == "ends" else 60}
    program = AgentProgram(f"{PLAIN}:once", process=True, max_seconds=None)
    program.setup(TOKENIZER)
    engine = Engine("Hi")

    async def run() -> None:
        task = asyncio.ensure_future(group(program, engine, row))
        if how == "cancelled":
            while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
                await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            await task
        await program.close()

    before = listening()
    with no_thread_left("endpoint", "program's process"):
        asyncio.run(run())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
    assert listening() <= before


def listening() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket")
    }


@pytest.mark.parametrize("between", [False, True])
def test_a_client_that_goes_away_gives_its_turn_up_and_asking_again_samples_the_same(between: bool) -> None:
    engine = Engine("Hi")
    slow = asyncio.Event()

    async def wait(request: GenerationRequest) -> None:
        if len(engine.asked) == 1:
            await slow.wait()

    engine.wait = wait
    with Open(engine) as attempt:
        client = http.client.HTTPConnection(urlsplit(attempt.url).netloc)
        body = json.dumps({"messages": ASK, "stream": True})
        client.request("POST", "/v1/chat/completions", body, {"x-api-key": attempt.key})
        assert until(lambda: engine.asked)
        said = [{"role": "user", "content": "Another question"}] if between else ASK
        if between:  # a turn of another conversation ends first, and the next one continues it
            assert attempt.post("/chat/completions", {"messages": said}).status_code == 200
            said = [*said, {"role": "assistant", "content": "Hi"}, *ASK]
        client.close()
        assert until(lambda: engine.cancelled == 1)
        assert attempt.post("/chat/completions", {"messages": said}).status_code == 200
    (row,) = attempt.trajectory.rows
    turns = [turn for turn in row.turn_ids if turn >= 0]
    assert turns == sorted(turns) and attempt.trajectory.metrics["turns"] == 1 + between
    assert [request.seed for request in engine.asked] == ([0, 1, 0] if between else [0, 0])
    assert between or engine.asked[0].token_ids == engine.asked[1].token_ids


def test_many_sessions_at_once_keep_their_turns_apart() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        said: list[Any] = [{"role": "user", "content": "count"}]
        with httpx.Client(headers={"x-api-key": api_key}, timeout=60) as client:
            for _ in range(3):
                answer = client.post(base_url + "/chat/completions", json={"messages": said})
                message = answer.raise_for_status().json()["choices"][0]["message"]
                said += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "more"}]
        return 1.0

    class Numbered(Engine):
        async def __call__(self, request: GenerationRequest) -> CompletionGroup:
            await asyncio.sleep(request.seed % 7 / 100)
            return await super().__call__(request)

    engine = Numbered("first", "second", "third")
    trajectories = play(main, engine, number=20)
    assert [t.failure for t in trajectories] == [None] * 20
    for attempt, trajectory in enumerate(trajectories):
        (row,) = trajectory.rows
        for i, turn in enumerate(row.turn_ids):
            if turn >= 0:
                assert -row.logprobs[i] - 1 == pytest.approx(100 * attempt + turn, abs=0.1)
        sound(trajectory, engine)
