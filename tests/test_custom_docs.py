"""The examples of docs/custom_algorithms.md train."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.cli import main
from tests.toys import SMALL, quickstart_model, write_run


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder, beside the rows and the reward function that the page names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    (tmp_path / "rewards.py").write_text(
        "def correct(completions, **_):\n    return [len({*c}) for c in completions]\n"
    )
    return quickstart_model(tmp_path / "model", **SMALL)


def test_the_first_example_trains(root: Path, model: str) -> None:
    block = re.findall(r"```python\n(.*?)```", (root / "docs" / "custom_algorithms.md").read_text(), re.DOTALL)[0]
    small = "engine=TransformersEngine(), sampling=SamplingParams(max_new_tokens=4), prompts_per_rollout=2, "
    block = block.replace("MODEL", model).replace("RolloutDataModule(prompts", f"RolloutDataModule({small}prompts")
    block = block.replace("max_epochs=1", 'max_epochs=1, limit_train_batches=2, accelerator="cpu"')
    names: dict[str, Any] = {}
    exec(f"from lightrl import SamplingParams, TransformersEngine\n{block}", names)
    assert names["module"].trainer.global_step == 2
    assert len(logged("reward/mean", Path("outputs/custom"))) == 2


def fit(monkeypatch: pytest.MonkeyPatch, model: str, module: str, settings: dict[str, Any], **trainer: Any) -> None:
    """Two rollouts of a module by the command line, logged in `run`."""
    data = {"prompts": {"path": "rows.jsonl"}, "rewards": ["rewards.py:correct"], "rollouts_per_epoch": 2}
    data |= {"sampling": {"max_new_tokens": 4}, "prompts_per_rollout": 2, "group_size": 8}
    trainer |= {"logger": True}
    write_run(Path("config.yaml"), model, module, model=settings, trainer=trainer, data=data, run_dir="run")
    monkeypatch.setattr("sys.argv", ["lightrl"])
    main(["fit", "--config", "config.yaml"])


def logged(name: str, folder: Path) -> list[str]:
    with (folder / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row[name]]


def test_a_subclass_and_a_callback_run_from_yaml(root: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (root / "docs" / "custom_algorithms.md").read_text()
    parts = [
        x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "EntropyFloor" in x or "SolvedLength" in x
    ]
    Path("my_parts.py").write_text("\n".join(["from lightrl import GRPOLightningModule", *parts]))
    (block,) = (x for x in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "EntropyFloor" in x)
    config = yaml.safe_load(block.replace("MODEL", model))
    own = config["model"]
    fit(monkeypatch, model, own["class_path"], own["init_args"], callbacks=config["trainer"]["callbacks"])
    assert all(1 <= float(length) <= 4 for length in logged("custom/solved_length", Path("run")))
    assert len(logged("custom/solved_length", Path("run"))) == 2


def test_the_callback_runs_in_the_example_of_saving_and_resuming(
    root: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, example = (
        next(
            block
            for block in re.findall(r"```python\n(.*?)```", (root / "docs" / page).read_text(), re.DOTALL)
            if word in block
        )
        for page, word in (("custom_algorithms.md", "EntropySchedule"), ("checkpoints.md", "ckpt_path"))
    )
    small = "engine=TransformersEngine(), sampling=SamplingParams(max_new_tokens=4), prompts_per_rollout=5, "
    example = example.replace("MODEL", model).replace(
        "RolloutDataModule(", f"RolloutDataModule({small}rollouts_per_epoch=1, "
    )
    example = example.replace("[checkpoint]", '[checkpoint, EntropySchedule()], accelerator="cpu", logger=False')
    for epochs in (1, 2):  # the second run resumes the first
        names: dict[str, Any] = {}
        changed = example.replace("max_epochs=10", f"max_epochs={epochs}")
        exec(f"from lightrl import SamplingParams, TransformersEngine\n{callback}{changed}", names)
        assert names["module"].trainer.global_step == epochs
        assert capsys.readouterr().out.count("reward ") == 1
    assert names["module"].entropy_coef == pytest.approx(0.0099)


def test_a_penalty_with_two_learning_rates_and_a_schedule(
    root: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (root / "docs" / "custom_algorithms.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    penalty, rates = (next(x for x in blocks if word in x) for word in ("ConfidencePenalty", "two_rates"))
    Path("my_parts.py").write_text(rates.replace("MODEL", model) + penalty)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    schedule = {"name": "cosine", "warmup": 0.1}
    settings = {"kl": None, "optimizer": "my_parts.two_rates", "lr_scheduler": schedule, "penalty": 0.1}
    fit(monkeypatch, model, "my_parts.ConfidencePenalty", settings)
    for name, rate in (("policy", 2e-5), ("norms", 5e-6)):
        assert float(logged(f"optim/lr_{name}", Path("run"))[0]) == pytest.approx(rate)
    assert all(float(term) > 0 for term in logged("loss/penalty", Path("run")))
