"""The part of `benchmarks/environments.py` that needs no machine to itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightrl.types import Completion, CompletionGroup, GenerationRequest, SamplingParams
from tests.rollout.conftest import ScriptedEngine

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("environments")


def test_a_replay_asks_for_each_turn_once_and_after_the_one_before(environments: Any) -> None:
    def turn(attempt: int, number: int) -> CompletionGroup:
        name = f"turn {number} of attempt {attempt} at prompt 0"
        request = GenerationRequest([1] * (number + 1), SamplingParams(), seed=attempt, name=name)
        return CompletionGroup(request, [Completion([5, 6], [0.0, 0.0], "", "stop")], 0)

    played = [turn(0, 0), turn(1, 0), turn(1, 1), turn(0, 1), turn(0, 2)]
    engine = ScriptedEngine()
    assert environments.replay(engine.generate, played) == 10
    assert sorted(map(id, engine.asked)) == sorted(id(answer.request) for answer in played)
    for attempt in (0, 1):
        lengths = [len(request.token_ids) for request in engine.asked if request.seed == attempt]
        assert lengths == sorted(lengths)
