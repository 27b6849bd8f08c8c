"""The distillation example: a student with the teacher's vocabulary, and its configurations end to end, briefly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from examples.distill.make_student import TEACHER, make
from tests.toys import run_example


def test_the_pipeline_briefly(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step reads what the one before exported; a few updates only, so no accuracy is asked for."""
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    start = make(str(tmp_path / "start"))
    assert AutoTokenizer.from_pretrained(start).get_vocab() == AutoTokenizer.from_pretrained(TEACHER).get_vocab()
    assert AutoConfig.from_pretrained(start).hidden_size < AutoConfig.from_pretrained(TEACHER).hidden_size

    def step(name: str, *extra: Any) -> Any:
        return run_example(f"distill/{name}", tmp_path / name, "--trainer.max_epochs=1", *extra)

    few = ["--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1", "--trainer.check_val_every_n_epoch=1"]
    step("teacher", *few)
    step("student", f"--model.init_args.actor.path={start}", *few)
    teachers = {"sums": {"path": str(tmp_path / "teacher" / "model")}}
    small = ["prompts_per_rollout=8", "rollouts_per_epoch=2", "evaluation.batch_size=16"]
    cli = step(
        "distill", f"--model.init_args.actor.path={tmp_path / 'student' / 'model'}",
        f"--model.init_args.teachers={teachers}", *(f"--data.init_args.{setting}" for setting in small),
        "--trainer.limit_val_batches=1",
    )  # fmt: skip
    metrics = cli.trainer.callback_metrics
    assert metrics["loss/teacher"] > 0 and "eval/reward/ExactAnswer" in metrics
    assert (tmp_path / "distill" / "model" / "config.json").is_file()
