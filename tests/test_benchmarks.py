"""The committed runs of examples are those that pages show, and reach their bars."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_examples_of_agents_quote_their_committed_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "agent_examples.json").read_text())["runs"]
    assert runs.keys() >= {"langgraph", "code"}
    for name, run in runs.items():
        start, *_, end = run["eval_reward"]
        page = " ".join((ROOT / "examples" / name / "README.md").read_text().split())
        assert f"rises from {start:.2f} to {end:.2f} in {len(run['train_reward'])} rollouts" in page
        assert end > start + 0.4


def test_the_committed_runs_of_examples_end_above_their_bars_and_near_their_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    examples: Any = importlib.import_module("examples_over_seeds")
    shown = (ROOT / "benchmarks" / "README.md").read_text()
    committed = json.loads((ROOT / "benchmarks" / "results" / "examples.json").read_text())
    for name, runs in committed.items():
        assert examples.failures(runs, examples.EXAMPLES[name].bar, fall=0.03) == []
        for threads in {run["threads"] for run in runs}:
            assert {run["seed"] for run in runs if run["threads"] == threads} == {1, 2, 3, 4, 5}
        assert examples.table(runs) in shown
