"""A scripted engine, for tests of what asks it, and the folder of a model that chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lightrl.engines.base import Engine
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest
from tests.rollout.tasks import chat_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("model"))


class ScriptedEngine(Engine):
    """Answers each request as `answer` says, which may raise, when `hold` lets it go.

    Attributes:
        asked: every request that it got.
        cancelled: requests that were cancelled.
    """

    policy_version = 3
    started = True
    max_model_len = 64

    def __init__(self, answer: Callable[[GenerationRequest], str] = lambda request: "12") -> None:
        self.answer = answer
        self.asked: list[GenerationRequest] = []
        self.cancelled: list[GenerationRequest] = []
        self.hold: Callable[[GenerationRequest], bool] = lambda request: False

    def start(self, context: EngineContext) -> None:
        pass

    def check_request(self, request: GenerationRequest) -> None:
        pass

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        self.asked.append(request)
        try:
            await asyncio.sleep(0)
            while self.hold(request):
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        text = self.answer(request)
        ids = [ord(c) for c in text]
        one = Completion(ids, [-0.5] * len(ids), text, "stop")
        return CompletionGroup(request, [one] * request.num_completions, self.policy_version)

    def logprobs(self, sequences: Any, routes: Any = ()) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]

    def load_weights(self, named_tensors: Any, *, policy_version: int) -> None:
        self.policy_version = policy_version

    def close(self) -> None:
        pass
