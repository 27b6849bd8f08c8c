"""The committed runs of examples and of the overhead reach their bars."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_the_examples_of_agents_quote_their_committed_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "agent_examples.json").read_text())["runs"]
    assert runs.keys() == {"langgraph", "code", "verifiers"}
    for name, seeds in runs.items():
        starts, ends = ([run["eval_reward"][i] for run in seeds] for i in (0, 1))  # the second is after 8 rollouts
        page = " ".join((ROOT / "examples" / name / "README.md").read_text().split())
        assert f"rises from {between(starts)} to {between(ends)} in 8 rollouts" in page
        assert min(ends) > max(starts) + 0.2


def test_the_rlhf_pages_quote_their_committed_runs() -> None:
    results = ROOT / "benchmarks" / "results"
    runs = json.loads((results / "examples.json").read_text())["rlhf"]
    rates = [run["win_rate"] for run in runs]
    page = (ROOT / "examples" / "rlhf" / "README.md").read_text()
    for text in (page, (ROOT / "docs" / "rlhf.md").read_text()):
        assert f"win rate of PPO over SFT is {min(rates)}% to {max(rates)}%" in " ".join(text.split())
    assert ", ".join(f"{rate}%" for rate in rates) in page
    once = json.loads((results / "examples_once.json").read_text())
    fewer = [run for run in once["rlhf_reward_models"] if run["pairs"] == 60000 and "kl_coef" not in run]
    assert ", ".join(f"{run['win_rate']}%" for run in fewer) in page
    curve = once["distill"]["curve"]
    distilled = (ROOT / "examples" / "distill" / "README.md").read_text()
    assert all(f"{value:.1%}" in distilled for value in curve.values())


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
    page, guide = ((ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "hyperparameters.md"))
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
        assert row in guide or "TRL" in system
        assert found["failures"] == 0


def test_the_guide_has_the_learning_rates_of_the_committed_runs() -> None:
    results = ROOT / "benchmarks" / "results"
    systems = json.loads((results / "rates.json").read_text())["systems"]
    systems["grpo, 4e-05"] = json.loads((results / "quality.json").read_text())["systems"]["grpo"]
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    for name, shown in (("1e-05", "1e-5"), ("2e-05", "2e-5"), ("4e-05", "4e-5"), ("8e-05", "8e-5")):
        found = systems[f"grpo, {name}"]["summary"]
        assert f"| {shown} | {found['runs']} | {found['rollouts']} | {found['seconds']:.0f} |" in page
    (failed,) = systems["grpo, 0.00016"]["runs"]
    last, best = (100 * value for value in (list(failed["accuracy"].values())[-1], max(failed["accuracy"].values())))
    assert f"| 1.6e-4 | 1 | not in 24: {last:.0f}% at the end, {best:.0f}% at best | |" in page


def test_the_benchmark_page_has_the_updates_behind_the_default_of_micro_batches() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "defaults.json").read_text())["smollm2"]["update"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, shown in (("2048/1", "2,048"), ("4096/1", "4,096"), ("16384/1", "16,384 (one micro-batch)")):
        row = rows[name]
        assert f"| {shown} | {row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_gb']:.1f} |" in page


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


def test_the_guide_lists_settings_and_results_of_the_committed_runs() -> None:
    results = ROOT / "benchmarks" / "results"
    runs = json.loads((results / "agent_examples.json").read_text())["runs"]
    runs["few_shot"] = [json.loads((results / "few_shot.json").read_text())]
    quickstart = json.loads((results / "quickstart.json").read_text())["runs"]
    runs["quickstart"] = [
        {"eval_reward": [run["eval_score"]["0"], run["eval_accuracy"]["12"]], "train_reward": run["train_reward"]}
        for run in quickstart
    ]
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    for name, seeds in runs.items():
        file = ROOT / ("configs/quickstart/smollm2_grpo.yaml" if name == "quickstart" else f"examples/{name}/grpo.yaml")
        config = yaml.safe_load(file.read_text())
        files = [config, yaml.safe_load((file.parent / config["base"]).read_text())] if "base" in config else [config]
        module, data = (
            {key: value for each in reversed(files) for key, value in each.get(part, {}).get("init_args", {}).items()}
            for part in ("model", "data")
        )
        decay = "linear" if module.get("lr_scheduler") else "constant"
        rollouts = len(seeds[0]["train_reward"]) if name in ("few_shot", "quickstart") else 8
        starts, ends = ([run["eval_reward"][i] for run in seeds] for i in (0, -1 if rollouts > 8 else 1))
        assert data["group_size"] == 8
        assert module["kl"] is None
        rate = f"{module['optimizer']['init_args']['lr']:.0e}".replace("e-0", "e-")
        cells = (
            rate + ", " + decay,
            data["prompts_per_rollout"],
            data["sampling"]["max_new_tokens"],
            len(seeds),
            rollouts,
        )
        assert f"| {' | '.join(map(str, cells))} | {between(starts)} to {between(ends)} |" in page, name


def test_the_benchmark_page_has_the_committed_overhead_and_it_is_within_its_bounds() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "overhead_real.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in found["rows"]:
        assert f"| {row['threads']} | {row['step']:.1f} | {row['bare']:.1f} | {row['ratio']:.2f} |" in page
        assert row["ratio"] <= 1.1
    assert f"makes the step {found['speedup_of_threads']:.2f}x as fast" in page
    assert found["speedup_of_threads"] >= 1.6
