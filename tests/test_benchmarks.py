"""The committed runs of examples and of the overhead reach their bars."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


def test_the_committed_overhead_is_within_its_bounds() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "overhead_real.json").read_text())
    assert all(row["ratio"] <= 1.1 for row in found["rows"])
    assert found["speedup_of_threads"] >= 1.6
