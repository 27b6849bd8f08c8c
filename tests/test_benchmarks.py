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
    assert runs.keys() == {"langgraph", "code", "verifiers"}
    for name, seeds in runs.items():
        starts, ends = ([run["eval_reward"][i] for run in seeds] for i in (0, 1))  # the second is after 8 rollouts
        page = " ".join((ROOT / "examples" / name / "README.md").read_text().split())
        assert f"rises from {between(starts)} to {between(ends)} in 8 rollouts" in page
        assert min(ends) > max(starts) + 0.2


def test_the_few_shot_example_quotes_its_committed_run() -> None:
    run = json.loads((ROOT / "benchmarks" / "results" / "few_shot.json").read_text())
    page = " ".join((ROOT / "examples" / "few_shot" / "README.md").read_text().split())
    start, *_, end = run["solved"]
    assert f"rises from {start:.2f} to {end:.2f} in {len(run['train_reward'])} rollouts" in page


def between(values: list[float]) -> str:
    """The range of values, or the only one, with two digits."""
    return "-".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def test_the_benchmark_page_has_the_time_to_quality_of_the_committed_runs() -> None:
    systems = json.loads((ROOT / "benchmarks" / "results" / "quality.json").read_text())["systems"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, system in (
        ("grpo", "GRPO"),
        ("rloo", "RLOO"),
        ("ppo", "PPO"),
        ("trl, 4e-05", "GRPO in TRL 1.16, `generate`"),
    ):
        found = systems[name]["summary"]
        low, high = found["seconds_interval"]
        seconds = f"{found['seconds']:.0f} ({max(low, 0):.0f}-{high:.0f})"
        row = f"| {system} | {found['runs']} | {found['rollouts']} | {seconds} |"
        assert row in page
        assert found["failures"] == 0


def test_the_benchmark_page_has_the_steps_compared_with_trl() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "vs_trl.json").read_text())["cases"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, shown in (
        ("smollm2 256/50", "SmolLM2 | 50 | 256"),
        ("smollm2 48/500", "SmolLM2 | 500 | 48"),
        ("gemma3 48/50", "Gemma 3 | 50 | 48"),
    ):
        sides = [cases[name][side] for side in ("lightrl, transformers", "lightrl, vllm", "trl, micro-batch 8")]
        cells = [f"{side['wall']:.1f} s, {side['peak_gb']:.1f} GB" for side in sides]
        times = ", ".join(f"{sides[2]['wall'] / side['wall']:.1f}x" for side in sides[:2])
        assert f"| {shown} | {' | '.join(cells)} | {times} |" in page


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
