"""The YAML of docs/training.md, run by the command line: every feature is reached and shows in the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightrl.cli import run
from tests.toys import SMALL, quickstart_model, write_run


def test_every_feature_is_reached_from_yaml(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    (block,) = re.findall(r"```yaml\n(.*?)```", (root / "docs" / "training.md").read_text(), re.DOTALL)
    (tmp_path / "features.yaml").write_text(block.replace("target: 0.2", "target: 10.0"))
    demonstrations = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(4)]
    (tmp_path / "demonstrations.jsonl").write_text("\n".join(map(json.dumps, demonstrations)))
    model = quickstart_model(tmp_path / "model", **SMALL)
    data = {
        "prompts": {"rows": [{"prompt": f"{a}+{b}=", "answer": "1"} for a in range(4) for b in range(4)]},
        "rewards": [{"class_path": "SoftOverlong", "init_args": {"max_tokens": 6, "buffer_tokens": 6}}],
        "sampling": {"max_new_tokens": 6}, "group_size": 4, "rollouts_per_epoch": 2,
    }  # fmt: skip
    base = write_run(tmp_path / "base.yaml", model, "PPOLightningModule", model={"ppo_epochs": 1}, data=data)
    cli = run(["fit", f"--config={base}", f"--config={tmp_path / 'features.yaml'}"])
    metrics = cli.trainer.callback_metrics
    for name in ("rollout/refills", "policy/top_entropy", "policy/entropy_coef", "loss/ptx", "rollout/prompts_dropped"):
        assert name in metrics, name
    assert metrics["policy/entropy_coef"] == pytest.approx(0.005)  # the first rollout's entropy is below 10 nats
    kinds = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert {"EMA", "ReferenceSync", "AdaptiveEntropy"} <= kinds
    assert cli.model.shaping.mask_truncated and any(name.startswith("reference.") for name in cli.model.state_dict())
