"""The first example of docs/custom_algorithms.md trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.toys import SMALL, quickstart_model


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
    block = block.replace("max_epochs=1", 'max_epochs=1, limit_train_batches=2, accelerator="cpu", logger=False')
    names: dict[str, Any] = {}
    exec(f"from lightrl import SamplingParams, TransformersEngine\n{block}", names)
    assert names["module"].trainer.global_step == 2


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
