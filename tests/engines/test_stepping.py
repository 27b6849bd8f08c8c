"""`SteppingEngine`: what reaches the engine together, who is told of answers and errors, and who can stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightrl.engines.base import EngineDiedError, SteppingEngine
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest, SamplingParams
from tests.waiting import no_thread_left, until


class Counting(SteppingEngine):
    """Counts up from the prompt's first token, a token each step, until the request's limit.

    Attributes:
        batches: seeds of the requests that were added together.
    """

    started = True
    max_model_len = 64

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.under_way: dict[GenerationRequest, list[int]] = {}
        self.error: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()

    def start(self, context: EngineContext) -> None: ...

    def check_request(self, request: GenerationRequest) -> None:
        if not request.token_ids:
            raise ValueError("token_ids=[]")

    def add(self, requests: list[GenerationRequest]) -> None:
        self.batches.append([request.seed for request in requests])
        self.under_way |= {request: [] for request in requests}

    def step(self) -> list[CompletionGroup]:
        self.gate.wait(600)
        if (error := self.error) is not None:
            self.error = None
            raise error
        for request, tokens in self.under_way.items():
            tokens.append(request.token_ids[0] + len(tokens))
        done = [request for request, tokens in self.under_way.items() if len(tokens) == request.sampling.max_new_tokens]
        return [self.group(request, self.under_way.pop(request), "length") for request in done]

    def abort(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            del self.under_way[request]

    def partials(self) -> list[CompletionGroup]:
        return [self.group(request, tokens, "suspended") for request, tokens in self.under_way.items()]

    def group(self, request: GenerationRequest, tokens: list[int], reason: Any) -> CompletionGroup:
        return CompletionGroup(request, [Completion(list(tokens), [0.0] * len(tokens), "", reason)], 0)

    def logprobs(self, sequences: Any, routes: Any = ()) -> list[list[float]]:
        return []

    def load_weights(self, named_tensors: Any, *, policy_version: int) -> None:
        with self.lock:
            self.policy_version = policy_version

    def close(self) -> None:
        self.end_driver()


def request(seed: int, tokens: int = 3) -> GenerationRequest:
    return GenerationRequest([10 * seed + 10], SamplingParams(max_new_tokens=tokens), seed)


@pytest.fixture
def engine() -> Iterator[Counting]:
    with no_thread_left("lightrl-sampling"):
        engine = Counting()
        yield engine
        engine.gate.set()
        engine.close()


def test_requests_of_one_tick_reach_the_engine_together_and_those_that_answers_lead_to(engine: Counting) -> None:
    async def turns(seed: int) -> CompletionGroup:
        first = await engine.generate(request(seed))
        engine.gate.clear() if seed == 0 else None
        second = engine.generate(request(seed + 10))
        threading.Timer(0.1, engine.gate.set).start()
        assert first.completions[0].token_ids == [10 * seed + 10 + i for i in range(3)]
        return await second

    async def scenario() -> None:
        await asyncio.gather(*(turns(seed) for seed in range(5)))

    asyncio.run(scenario())
    assert engine.batches == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]


def test_a_cancelled_request_is_dropped_and_the_others_go_on(engine: Counting) -> None:
    async def scenario() -> None:
        engine.gate.clear()
        dropped = [asyncio.ensure_future(engine.generate(request(seed, 50))) for seed in range(2)]
        kept = asyncio.ensure_future(engine.generate(request(2, 50)))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(engine.generate(request(3)))
        await asyncio.sleep(0)
        for task in (*dropped, late):
            task.cancel()
        engine.gate.set()
        assert len((await kept).completions[0].token_ids) == 50
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*dropped, late, return_exceptions=True)
        )

    asyncio.run(scenario())
    assert engine.batches == [[0, 1, 2]] and not engine.under_way


def test_an_error_reaches_all_who_wait_and_the_next_requests_are_served(engine: Counting) -> None:
    async def scenario() -> None:
        engine.gate.clear()
        tasks = [asyncio.ensure_future(engine.generate(request(seed))) for seed in range(3)]
        await asyncio.sleep(0.05)
        engine.error = SystemExit(3)
        engine.gate.set()
        told = [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)]
        assert told == ["Counting.step raised SystemExit: 3"] * 3
        assert len((await engine.generate(request(4))).completions[0].token_ids) == 3

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="token_ids"):
        asyncio.run(engine.generate(GenerationRequest([], SamplingParams(), 0)))


def test_a_dead_engine_serves_nothing_before_weights_are_pushed(engine: Counting) -> None:
    engine.error = EngineDiedError("gone")
    engine.under_way = {}
    for seed in range(2):
        with pytest.raises(EngineDiedError, match="gone"):
            asyncio.run(engine.generate(request(seed)))
        engine.under_way = {}
    assert engine.batches == [[0]]
    engine.load_weights([], policy_version=1)
    assert len(asyncio.run(engine.generate(request(2))).completions[0].token_ids) == 3


def test_a_paused_engine_stands_still_and_tells_what_has_come(engine: Counting) -> None:
    async def scenario() -> None:
        task = asyncio.ensure_future(engine.generate(request(0, 10_000)))
        while not engine.under_way.get(next(iter(engine.under_way), request(9))):
            await asyncio.sleep(0.001)
        (group,) = engine.pause()
        late = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0.05)
        assert (
            group.completions[0].finish_reason == "suspended"
            and engine.pause()[0].completions == group.completions
            and engine.batches == [[0]]
        )
        engine.resume()
        await late
        task.cancel()

    asyncio.run(scenario())


def test_ctrl_c_ends_a_wait_for_an_engine_that_steps_in_its_thread(engine: Counting) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever an earlier test left
    engine.gate.clear()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):  # while the gate is closed
        engine.generate_all([request(0)])
    engine.gate.set()
    assert until(lambda: not engine.under_way)
