"""The RLHF example: its rule, its data, and its three configurations end to end, briefly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.rlhf.task import Demonstrations, Preferences, PromptRows, prompts, utility
from tests.toys import run_example


def test_utility_by_hand() -> None:
    assert utility("7203=", "0237.") == 4 + 3  # all digits, three ascending neighbours
    assert utility("7203=", "7203.") == 4 + 1  # 7 > 2 > 0 < 3
    assert utility("7203=", "7203") == 4 + 1 - 2  # no full stop
    assert utility("7203=", "0007.") == 2 + 3  # one 0 and the 7
    assert utility("7003=", "0037.") == 4 + 3
    assert utility("7203=", "02377.") == 4 + 3 - 2  # one too many; its neighbours do not count
    assert utility("7203=", "") == -2
    assert utility("7203=", "0237.") > utility("7204=", "0237.")  # the prompt decides


def test_held_out_prompts_are_held_out() -> None:
    held_out = set(prompts("eval"))
    assert len(held_out) == 500 and len(prompts("train")) == 9500
    seen = [Demonstrations(size=300)(), Preferences(size=300)(), PromptRows()()]
    assert not held_out & {prompt for rows in seen for prompt in rows["prompt"]}
    assert set(Preferences(split="eval", size=50)()["prompt"]) <= held_out
    assert PromptRows()().column_names == ["prompt"]  # nothing of the rule reaches PPO


@pytest.mark.slow
def test_the_pipeline_briefly(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step reads what the one before exported; a few updates only, so the win rate itself is not asked for."""
    from examples.rlhf.win_rate import compare

    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    models = {name: str(tmp_path / name / "model") for name in ("sft", "reward", "ppo")}

    def step(name: str, *extra: str) -> Any:
        return run_example(f"rlhf/{name}", tmp_path / name, "--trainer.max_epochs=1", *extra)

    rows = "--data.init_args.train.rows.init_args.size=512"
    step("sft", rows, "--trainer.limit_train_batches=4")
    few = [rows, "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]
    held_out = "--data.init_args.val.rows.init_args.size=128"
    trained = step("reward", f"--model.init_args.model.path={models['sft']}", held_out, *few)
    assert 0.3 < trained.trainer.callback_metrics["eval/accuracy"] <= 1.0
    actor = f"--model.init_args.actor.path={models['sft']}"
    judge = [{"name": "preference", "path": models["reward"], "tokenizer": "policy"}]
    cli = step(
        "ppo",
        actor,
        f"--model.init_args.reward_models={judge}",
        "--data.init_args.rollouts_per_epoch=1",
        few[-1],
        "--data.init_args.prompts.limit=64",
    )
    assert "eval/reward/preference" in cli.trainer.callback_metrics
    assert 0.0 <= compare(models["sft"], models["ppo"], models["reward"], samples=1) <= 1.0
