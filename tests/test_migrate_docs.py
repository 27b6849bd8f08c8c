"""The tables of docs/migrate.md against the code."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer

import lightrl
from lightrl.algorithms import ExtraLosses, Shaping, Updates
from lightrl.cli import run
from tests.toys import digits_reward, some_flat

GROUPS = (ExtraLosses, Shaping, Updates)


def rows_of_the_tables(root: Path) -> list[tuple[str, str]]:
    """(their option, ours) of every row of docs/migrate.md, without those of metrics."""
    page = (root / "docs" / "migrate.md").read_text().split("## From TRL: metrics")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    return [(theirs, ours.strip()) for theirs, ours in rows]


def test_our_side_of_every_row_exists(root: Path) -> None:
    from lightrl import algorithms, callbacks, data, engines, environments, objectives, rewards, rollout
    from lightrl.algorithms.schedules import LRSchedule

    rooms = (lightrl, algorithms, callbacks, engines, objectives, rewards, data, environments, rollout)
    rows = rows_of_the_tables(root)
    assert len(rows) > 90
    known: dict[str, Any] = {"Trainer": Trainer, "LRSchedule": LRSchedule}
    for theirs, ours in rows:
        names = re.findall(r"`([A-Z]\w+)(?:\.(\w+)(?:\.(\w+))?)?", ours)
        assert names or ours.startswith("-"), (theirs, ours)
        for owner, argument, inner in names:
            cls = known.get(owner) or next((getattr(room, owner) for room in rooms if hasattr(room, owner)), None)
            assert cls is not None, (theirs, owner)
            if argument:
                inits = [each.__init__ for each in cls.__mro__ if "__init__" in vars(each)]
                assert any(argument in inspect.signature(init).parameters for init in inits), (theirs, owner, argument)
            if inner:
                assert inner in {field.name for group in GROUPS for field in fields(group)}, (theirs, inner)


def test_our_side_of_every_metric_is_documented(root: Path) -> None:
    table = (root / "docs" / "migrate.md").read_text().split("## From TRL: metrics")[1]
    ours = re.findall(r"^\| `[^`]+` \| `([^`]+)` \|", table, re.MULTILINE)
    metrics = (root / "docs" / "metrics.md").read_text()
    assert len(ours) == 6 and [name for name in ours if f"| `{name}` |" not in metrics] == []


def test_the_config_and_the_script_agree(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (root / "docs" / "migrate.md").read_text()
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    script = page.partition("The same run in Python:\n\n```python\n")[2].partition("```")[0]
    monkeypatch.setitem(sys.modules, "rewards", SimpleNamespace(correct=digits_reward, short=some_flat))
    monkeypatch.setattr(Trainer, "fit", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("from tests.toys import digits_reward as correct, some_flat as short")
    (tmp_path / "run.yaml").write_text(config)
    names: dict[str, Any] = {}
    exec(script, names)
    cli = run(["--config=run.yaml", "--trainer.accelerator=cpu"], run=False)
    for name in ("advantage", "loss", "aggregation", "kl", "shaping", "lr_scheduler_factory", "actor_spec"):
        ours, theirs = (getattr(module, name) for module in (names["module"], cli.model))
        assert type(ours) is type(theirs) and getattr(ours, "__dict__", None) == getattr(theirs, "__dict__", None), name
    for name in ("sampling", "prompts", "_group_size", "prompts_per_rollout", "rollouts_per_epoch"):
        assert getattr(names["data"], name) == getattr(cli.datamodule, name), name
    assert names["data"].scorer.weights == cli.datamodule.scorer.weights == {"digits_reward": 1.0, "some_flat": 0.2}
    assert names["trainer"].max_epochs == cli.trainer.max_epochs and names["trainer"].precision == cli.trainer.precision
