"""The named modules: what each one's defaults are, that it trains, and that its YAML says the same."""

from __future__ import annotations

import importlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl import algorithms as modules
from lightrl.algorithms import PolicyGradientLightningModule
from lightrl.algorithms.module import Updates
from lightrl.objectives import (
    CPG,
    GAE,
    GSPO,
    RLOO,
    ConstantLength,
    GroupRelative,
    KLInLoss,
    KLInReward,
    PPOClip,
    ReinforcePlusPlus,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from tests.toys import adam, quiet_trainer, sums_data

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "algorithms"
# Of a module, by what the YAML names.
VARIATIONS = {"cispo", "grpo_curriculum", "grpo_in_flight", "grpo_top_p", "rloo_in_flight", "rloo_min_p"}
NAMED = sorted(file for file in CONFIGS.glob("*.yaml") if file.stem not in VARIATIONS)

# name: estimator, loss, aggregation, KL, ppo_epochs, each with the settings that its paper gives.
PAPERS: dict[str, tuple[Any, Any, Any, Any, int]] = {
    "PPO": (GAE(1.0, 0.95), PPOClip(0.2, 0.2), TokenMean(), KLInReward("k1", 0.05), 2),
    "GRPO": (GroupRelative("group"), PPOClip(0.2, 0.2), SequenceMean(), KLInLoss("k3", 0.04), 1),
    "DrGRPO": (GroupRelative("none"), PPOClip(0.2, 0.2), ConstantLength(3000), None, 1),
    "DAPO": (GroupRelative("group"), PPOClip(0.2, 0.28), TokenMean(), None, 1),
    "GSPO": (GroupRelative("group"), GSPO(3e-4, 4e-4), SequenceMean(), None, 1),
    "RLOO": (RLOO(), PPOClip(0.2, 0.2), SequenceSum(), KLInReward("k1", 0.05), 1),
    "ReinforcePlusPlus": (ReinforcePlusPlus(1.0), PPOClip(0.2, 0.2), TokenMean(), KLInReward("k1", 0.01), 1),
    "CPGD": (GroupRelative("group"), CPG(0.2, 0.2, 0.01, 2.0), SequenceMean(), None, 1),
}


def make(name: str, path: str, **kwargs: Any) -> PolicyGradientLightningModule:
    module: PolicyGradientLightningModule = getattr(modules, f"{name}LightningModule")(path, optimizer=adam, **kwargs)
    return module


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_the_papers(name: str, model_path: str) -> None:
    module = make(name, model_path)
    *parts, epochs = PAPERS[name]
    for part, expected in zip((module.advantage, module.loss, module.aggregation, module.kl), parts, strict=True):
        assert type(part) is type(expected)
        assert expected is None or vars(part) == vars(expected)
    assert module.ppo_epochs == epochs
    assert module.whiten_advantages == (name == "PPO")
    assert (getattr(module, "critic_spec", None) is None) == (name != "PPO")


@pytest.mark.parametrize("file", NAMED, ids=lambda file: file.stem)
def test_the_yaml_names_the_same_parts(file: Path) -> None:
    """What an algorithm's YAML spells out are the module's own defaults, but for sizes, rates and coefficients."""
    config = yaml.safe_load(file.read_text())
    name = config["model"]["class_path"].removesuffix("LightningModule")
    arguments = config["model"]["init_args"]
    parts = dict(zip(("advantage", "loss", "aggregation", "kl"), PAPERS[name], strict=False))
    for key, expected in parts.items():
        if key not in arguments:  # the module's default
            continue
        if expected is None:
            assert arguments[key] is None
            continue
        assert arguments[key]["class_path"] == type(expected).__name__
        given = arguments[key].get("init_args", {})
        if not isinstance(expected, ConstantLength):  # the length is the task's
            assert {k: vars(expected)[k] for k in given if k != "coef"} == {k: given[k] for k in given if k != "coef"}
    assert arguments.get("ppo_epochs", PAPERS[name][4]) == PAPERS[name][4]


def train(module: PolicyGradientLightningModule, **data: Any) -> dict[str, float]:
    trainer = quiet_trainer()
    trainer.fit(module, sums_data(**{"rollouts_per_epoch": 1, **data}))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", PAPERS)
def test_trains(name: str, model_path: str) -> None:
    """Two mini-batches: the second one is off-policy, so that clip, ratio and drift have something to do."""
    metrics = train(make(name, model_path, updates=Updates(minibatch_size=16)))
    assert metrics["optim/skipped_updates"] == 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["kl/old"] > 0
    assert ("kl/ref" in metrics) == (PAPERS[name][3] is not None)


def test_the_committed_curves_rise_with_every_seed_and_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    root = CONFIGS.parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    curves: Any = importlib.import_module("algorithms")
    stored = json.loads((root / "benchmarks" / "results" / "algorithms.json").read_text())
    runs, seeds = stored["runs"], range(1, 6)
    assert sorted((run["algorithm"], run["seed"]) for run in runs) == sorted(product((f.stem for f in NAMED), seeds))
    for run in runs:
        assert run["start"] <= 0.65 and run["final"] >= 0.8, (run["algorithm"], run["seed"])
        assert run["points"][-1]["cpu"] >= stored["settings"]["seconds"] == 90
    for seed in seeds:
        assert len({run["start"] for run in runs if run["seed"] == seed}) == 1, "all from the same warm start"
    for page in ("docs/algorithms.md", "benchmarks/README.md"):
        assert curves.table(runs) in (root / page).read_text()
