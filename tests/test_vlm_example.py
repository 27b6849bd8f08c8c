"""The picture example: its task, its model folder, and its two configurations end to end, briefly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from examples.vlm import make_model
from examples.vlm.task import ShapeRows, draw
from lightrl.cli.report import report
from tests.toys import run_example


def test_splits_differ_and_have_every_kind() -> None:
    rows = {split: ShapeRows(split, 60)() for split in ("sft", "train", "eval")}
    pictures = {split: [image.tobytes() for row in data for image in row["images"]] for split, data in rows.items()}
    assert not set(pictures["eval"]) & {*pictures["sft"], *pictures["train"]}
    assert all(set(data["kind"]) == {"count", "name", "both", "text"} for data in rows.values())
    assert draw("red", 2, random.Random(1)).tobytes() == draw("red", 2, random.Random(1)).tobytes()


@pytest.mark.slow
def test_the_example_briefly(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model folder, SFT, GRPO and report, a few updates each, with the transformers engine."""
    pytest.importorskip("torchvision", reason="Qwen2-VL's processor needs torchvision (scripts/setup.sh)")
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    make_model.main(str(tmp_path / "start"))

    def step(name: str, actor: Path, *extra: str) -> Any:
        return run_example(f"vlm/{name}", tmp_path / name, f"--model.init_args.actor.path={actor}", *extra)

    rows = "--data.init_args.train.rows.init_args.size=128"
    step("sft", tmp_path / "start", "--trainer.max_steps=2", rows)
    assert (tmp_path / "sft" / "model" / "preprocessor_config.json").is_file()
    cli = step(
        "grpo",
        tmp_path / "sft" / "model",
        "--trainer.max_epochs=1",
        "--data.init_args.engine=TransformersEngine",
        "--data.init_args.rollouts_per_epoch=2",
        "--data.init_args.prompts_per_rollout=8",
        "--data.init_args.prompts.rows.init_args.size=32",
        "--data.init_args.evaluation.prompts.rows.init_args.size=16",
        "--trainer.check_val_every_n_epoch=1",
    )
    metrics = cli.trainer.callback_metrics
    assert "eval/reward/ExactAnswer" in metrics and float(metrics["reward/scored_fraction"]) == 1.0
    assert (tmp_path / "grpo" / "model" / "preprocessor_config.json").is_file()
    assert "image (" in report(tmp_path / "grpo").read_text()
