"""The part of `benchmarks/environments.py` that needs no machine to itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.records import Completion, CompletionGroup, GenerationRequest, SamplingParams
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


def test_runs_of_an_example_are_judged_by_their_end_and_their_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    examples: Any = importlib.import_module("examples_over_seeds")
    curve = [0.5, 0.95, 0.90, 0.92]
    assert examples.extremes(curve) == {"start": 0.5, "best": 0.95, "end": 0.92, "lowest_after": 0.90}
    runs = [
        {"seed": 1, "threads": 1, "cpu_seconds": 70, **examples.extremes(curve)},
        {"seed": 2, "threads": 1, "cpu_seconds": 80, **examples.extremes([0.4, 0.99, 0.89])},
    ]
    assert examples.failures(runs, bar=0.9, fall=0.03) == [
        "seed 2, 1 thread(s): ended at 0.890, below the bar of 0.9.",
        "seed 2, 1 thread(s): ended at 0.890, more than 0.03 below its best, 0.990.",
    ]
    assert examples.failures(runs[:1], bar=0.9, fall=0.03) == []
    assert examples.table(runs).splitlines()[-1] == "| **worst** | | 0.400 | 0.950 | 0.890 | 0.890 | 80 |"
    for example in examples.EXAMPLES.values():
        for path in (part for step in example.steps for part in step if part.endswith(".yaml")):
            assert (ROOT / path).is_file()


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


def test_an_example_is_run_in_an_empty_folder_and_its_curve_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    examples: Any = importlib.import_module("examples_over_seeds")
    script = tmp_path / "step.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "assert pathlib.Path('configs/quickstart/ppo.yaml').is_file() and os.environ['OMP_NUM_THREADS'] == '2'\n"
        "pathlib.Path('outputs').mkdir()\n"
        "rows = [f'0,0.5,1', f'1,0.{sys.argv[1]},1']\n"
        "pathlib.Path('outputs/metrics.csv').write_text('\\n'.join(['step,eval/reward,reward/mean', *rows]))\n"
    )
    example = examples.Example(((str(script), "{seed}"),), "outputs")
    run = examples.train(example, tmp_path / "work", seed=7, threads=2, engine="")
    assert (run["start"], run["best"], run["end"], run["curve"]) == (0.5, 0.7, 0.7, {0: 0.5, 1: 0.7})
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"ended with 3; its output is in .*step0\.log"):
        examples.train(example, tmp_path / "work", seed=7, threads=2, engine="")


def test_learning_curves_are_put_together_over_their_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    curves: Any = importlib.import_module("algorithms")

    def run(seed: int, final: float, seconds: float, goal: float | None = None) -> dict[str, Any]:
        points = [{"accuracy": 0.5, "cpu": 0.0}, {"accuracy": final, "cpu": seconds}]
        kept = {"start": 0.5, "final": final, "rollouts": 10 * seed, "seconds_to_goal": goal, "points": points}
        return {"algorithm": "grpo", "seed": seed, **kept}

    runs = [run(1, 0.9, 10.0, 8.0), run(2, 0.8, 20.0)]
    # Standard deviation 0.1 / sqrt(2), so that half the interval is 12.706 x 0.05.
    assert curves.table(runs).splitlines()[-1] == (
        "| GRPO | 2 | 0.500 | 0.850 ± 0.635 | 0.800 | 0.900 | 15 | 1 reached it |"
    )
    assert curves.table(runs[:1]).splitlines()[-1] == "| GRPO | 1 | 0.500 | 0.900 | 0.900 | 0.900 | 10 | 8 |"
    grid, accuracies = curves.on_grid(runs, "cpu")
    assert grid[-1] == 10 and accuracies[:, -1].tolist() == pytest.approx([0.9, 0.65])
    curves.draw(runs, "cpu", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
