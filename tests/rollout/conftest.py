"""A scripted engine, for tests of what asks it, and the folder of a model that chats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from lightrl.engines.base import Engine, RequestQueue
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest
from tests.rollout.tasks import chat_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("model"))


class ScriptedEngine(Engine):
    """Answers each request as `answer` says, which may raise, in the order in which they come.

    Attributes:
        asked: every request that it took.
        cancelled: requests that were cancelled after they were taken.
        hold: requests that are taken but not answered before `release` is set.
    """

    def __init__(self, answer: Callable[[GenerationRequest], str] = lambda request: "12", beside: bool = False) -> None:
        super().__init__()
        self.answer = answer
        self.beside = beside
        self.asked: list[GenerationRequest] = []
        self.cancelled: list[GenerationRequest] = []
        self.hold: Callable[[GenerationRequest], bool] = lambda request: False
        self.threads: set[str] = set()

    policy_version = 3
    started = True
    max_model_len = 64

    @property
    def concurrent(self) -> bool:
        return self.beside

    def start(self, context: EngineContext) -> None:
        pass

    def check_request(self, request: GenerationRequest) -> None:
        pass

    def generate(self, requests: Iterable[GenerationRequest] | RequestQueue) -> Iterator[CompletionGroup]:
        queue = requests if isinstance(requests, RequestQueue) else RequestQueue(requests, closed=True)
        self.threads.add(threading.current_thread().name)
        running: list[GenerationRequest] = []
        while True:
            ready = [request for request in running if not self.hold(request)]
            new = queue.take(wait=not running)
            if not new and not running:
                return
            if not new and not ready:
                time.sleep(0.001)
            self.asked += new
            running += new
            for request in queue.take_cancelled():
                if request in running:
                    running.remove(request)
                    self.cancelled.append(request)
            for request in ready:
                if request in running:
                    running.remove(request)
                    text = self.answer(request)
                    ids = [ord(c) for c in text]
                    one = Completion(ids, [-0.5] * len(ids), text, "stop")
                    yield CompletionGroup(request, [one] * request.num_completions, self.policy_version)

    def logprobs(self, sequences: Any) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]

    def load_weights(self, named_tensors: Any, *, policy_version: int, partial: bool = False) -> None:
        self.policy_version = policy_version

    def close(self) -> None:
        pass
