"""Attempts that share a process: one client for all of them, one event loop, and keys that are mixed up."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import ctypes
import gc
import logging
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from lightrl.environments import AgentProgram
from lightrl.environments.endpoint import callers
from tests.environments import plain_program
from tests.environments.scripted import TOKENIZER, closing
from tests.environments.test_endpoint import ASK, Engine, group, play
from tests.waiting import until

AGAIN = [*ASK, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "more"}]


def chat(client: Any, messages: Any = ASK) -> Any:
    return client.chat.completions.create(model="m", messages=messages)


# ---- keys that are mixed up -----------------------------------------------------------------------------------------


def by_module_settings(base_url: str, api_key: str) -> Callable[[Any], Any]:
    openai.base_url, openai.api_key = base_url + "/", api_key
    return lambda messages: chat(openai, messages)


class Default:
    client: Any = None


def by_default_client(base_url: str, api_key: str) -> Callable[[Any], Any]:
    Default.client = openai.OpenAI(base_url=base_url, api_key=api_key)
    return lambda messages: chat(Default.client, messages)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "api_key", None)
    monkeypatch.setattr(openai, "base_url", None)
    monkeypatch.setattr(openai, "_client", None, raising=False)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("configure", "late"), [(by_module_settings, False), (by_default_client, True)])
def test_programs_that_set_a_client_of_the_whole_process_end_the_run(configure: Any, late: bool) -> None:
    everyone = threading.Barrier(3)

    def main(row: Any, base_url: str, api_key: str) -> float:
        if late:  # a turn of its own first, as happens where attempts start one after the other
            plain_program.once({}, base_url, api_key)
        ask = configure(base_url, api_key)
        everyone.wait(30)
        ask(ASK)
        ask(AGAIN)
        return 1.0

    engine = Engine("Hi")
    with pytest.raises(ValueError, match="run: .*base_url"):
        play(main, engine, number=3)


@pytest.mark.usefixtures("restored")
def test_a_shared_client_ends_the_run_even_if_its_owner_has_ended() -> None:
    everyone, owner = threading.Barrier(2), threading.Event()

    def main(row: Any, base_url: str, api_key: str) -> float:
        plain_program.once({}, base_url, api_key)
        if everyone.wait(30):  # ends at once, which revokes its key
            Default.client = openai.OpenAI(base_url=base_url, api_key=api_key)
            owner.set()
            return 1.0
        assert owner.wait(30) and until(lambda: Default.client.api_key not in callers._keys)
        time.sleep(0.2)
        chat(Default.client, AGAIN)
        return 1.0

    with pytest.raises(ValueError, match="run: .*base_url"):
        play(main, Engine("Hi"), number=2)


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_ask_with_another_attempts_key_end_the_run(carries: bool) -> None:
    """Their context tells which attempt they belong to. Without it, that can't be told, which ends the run as well."""
    everyone = threading.Barrier(3)

    def main(row: Any, base_url: str, api_key: str) -> float:
        plain_program.once({}, base_url, api_key)
        Default.client = openai.OpenAI(base_url=base_url, api_key=api_key)
        everyone.wait(30)
        run = contextvars.copy_context().run if carries else lambda function, *args: function(*args)
        thread = threading.Thread(target=run, args=(chat, Default.client))
        thread.start()
        thread.join()
        return 1.0

    with pytest.raises(ValueError, match="run: .*process=True"):
        play(main, Engine("Hi"), number=3)


def test_executors_of_the_event_loop_ask_as_their_attempt() -> None:
    async def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        await asyncio.to_thread(chat, client)
        await asyncio.get_running_loop().run_in_executor(None, chat, client)
        return 1.0

    assert [(t.failure, t.metrics["turns"]) for t in play(main, Engine("Hi"), number=3)] == [(None, 2.0)] * 3


def test_a_program_that_outlives_its_attempt_cannot_train_the_next_one() -> None:
    later = threading.Event()
    keys: list[str] = []
    asked: list[str] = []

    def main(row: Any, base_url: str, api_key: str) -> float:
        keys.append(api_key)
        if len(keys) == 1:
            plain_program.once({}, base_url, api_key)
            later.wait(60)  # past its time; its thread is left behind
            with contextlib.suppress(Exception):
                plain_program.once({}, base_url, keys[-1])  # the key that is set by now
            asked.append(api_key)
            return 1.0
        later.set()
        while not asked:
            time.sleep(0.01)
        return 1.0

    program = AgentProgram(main, max_seconds=1)
    program.setup(TOKENIZER)

    async def run() -> Any:
        (first,) = await group(program, Engine("Hi"), {})
        assert first.stop_reason == "time"
        program.max_seconds = 60
        await group(program, Engine("Hi"), {})

    with pytest.raises(ValueError, match="run: .*base_url"):
        asyncio.run(closing(program, run()))


def test_a_reward_without_a_request_ends_the_run_also_where_threads_hide_who_asks() -> None:
    everyone = threading.Barrier(2)

    def main(row: Any, base_url: str, api_key: str) -> float:
        Default.client = openai.OpenAI(base_url=base_url, api_key=api_key)
        everyone.wait(30)
        answered = threading.Event()
        _thread.start_new_thread(lambda: (chat(Default.client), answered.set()), ())  # of which Python knows no starter
        answered.wait(5)
        return 1.0

    with pytest.raises(ValueError, match="run: "):
        play(main, Engine("Hi"), number=2)


def test_a_reward_after_requests_that_failed_does_not_end_the_run() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        with contextlib.suppress(openai.BadRequestError):
            openai.OpenAI(base_url=base_url, api_key=api_key).responses.create(model="m", input=[])
        return 1.0

    (trajectory,) = play(main, Engine("Hi"))
    assert "must not be empty" in str(trajectory.failure)


def test_one_client_for_all_threads_that_is_given_each_attempts_key_is_not_mixed_up() -> None:
    everyone = threading.Barrier(4)
    shared = openai.OpenAI(base_url="http://127.0.0.1:1", api_key="of each attempt")

    def main(row: Any, base_url: str, api_key: str) -> float:
        for messages in (ASK, AGAIN):
            everyone.wait(30)
            chat(shared.with_options(base_url=base_url, api_key=api_key), messages)
        return 1.0

    trajectories = play(main, Engine("Hi", "Hi"), number=4)
    assert [(t.failure, t.metrics["turns"], len(t.rows)) for t in trajectories] == [(None, 2.0, 1)] * 4


def test_a_child_process_does_not_get_another_attempts_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    everyone = threading.Barrier(2)

    def main(row: Any, base_url: str, api_key: str) -> float:
        plain_program.once({}, base_url, api_key)
        os.environ["OPENAI_API_KEY"] = api_key
        everyone.wait(30)
        try:
            subprocess.run(["true"], check=True, env={**os.environ, "OPENAI_API_KEY": api_key})
            subprocess.run(["true"], check=True)
        finally:
            everyone.wait(30)  # neither key is revoked before
        return 1.0

    trajectories = play(main, Engine("Hi"), number=2, max_retries=0)
    assert sorted(t.failure is None for t in trajectories) == [False, True]
    assert any("process=True" in str(t.failure) for t in trajectories)


def test_a_client_without_pythons_sockets_ends_the_run_instead_of_training_another_attempt() -> None:
    """libc connects here, as curl's bindings and uvloop do."""

    def main(row: Any, base_url: str, api_key: str) -> float:
        plain_program.once({}, base_url, api_key)
        libc, own = ctypes.CDLL(None, use_errno=True), socket.socket()
        port = int(base_url.split(":")[2].split("/")[0])
        address = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton("127.0.0.1"))
        assert libc.connect(own.fileno(), address, len(address)) == 0
        head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api_key}\r\n\r\n"
        own.sendall(head.encode())
        own.recv(1000)
        return 1.0

    with pytest.raises(ValueError, match="run: .*process=True"):
        play(main, Engine("Hi"), number=2)


# ---- one event loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False], ids=["one-client", "one-per-attempt"])
def test_async_clients_work_on_one_loop_for_all_attempts_and_groups(
    shares: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    loops: set[Any] = set()
    made: list[Any] = []

    def client(base_url: str, api_key: str) -> Any:
        if not shares:
            return openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        if not made:
            made.append(openai.AsyncOpenAI(base_url=base_url, api_key="of each attempt"))
        return made[0].with_options(base_url=base_url, api_key=api_key)

    async def main(row: Any, base_url: str, api_key: str) -> float:
        loops.add(asyncio.get_running_loop())
        mine = client(base_url, api_key)
        await chat(mine)
        await asyncio.gather(*(chat(mine, AGAIN) for _ in range(2)))
        return 1.0

    program = AgentProgram(main)
    program.setup(TOKENIZER)

    async def run() -> list[Any]:
        played = []
        for _ in range(2):
            played += await group(program, Engine("Hi", "Hi", "Hi"), {}, 4)
        await program.close()
        return played

    with caplog.at_level(logging.WARNING):
        trajectories = asyncio.run(run())
        gc.collect()
    assert [(t.failure, t.metrics["turns"]) for t in trajectories] == [(None, 3.0)] * 8
    assert len(loops) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert "closed" not in caplog.text and "never retrieved" not in caplog.text


def test_a_time_limit_ends_one_async_attempt_and_leaves_the_others() -> None:
    ended: list[str] = []

    async def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await chat(client)
        if not ended:
            ended.append("begun")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")
        return 1.0

    trajectories = play(main, Engine("Hi"), number=3, max_seconds=3)
    assert sorted(t.stop_reason for t in trajectories) == ["stop", "stop", "time"]
    assert sorted(sum(t.turn_rewards) for t in trajectories) == [0.0, 1.0, 1.0]
    assert ended == ["begun", "cancelled"]


def test_an_async_program_that_blocks_the_loop_fails_and_leaves_a_loop_to_later_ones() -> None:
    later = threading.Event()
    attempts: list[str] = []

    async def main(row: Any, base_url: str, api_key: str) -> float:
        await chat(openai.AsyncOpenAI(base_url=base_url, api_key=api_key))
        attempts.append(api_key)
        if len(attempts) == 2:
            later.wait(60)
        await asyncio.sleep(0.5)
        return 1.0

    program = AgentProgram(main, max_seconds=6, max_retries=0)
    program.setup(TOKENIZER)

    async def run() -> tuple[list[Any], list[Any]]:
        both = await group(program, Engine("Hi"), {}, 2)
        program.max_seconds = 60
        again = await group(program, Engine("Hi"), {}, 2)
        later.set()
        await program.close()
        return both, again

    with pytest.warns(UserWarning, match="blocks the event loop"):
        both, again = asyncio.run(run())
    assert all("blocks the event loop" in str(t.failure) for t in both)
    assert [t.stop_reason for t in again] == ["stop", "stop"]
