"""The tables of docs/migrate.md against the code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightrl
from lightrl.algorithms import ExtraLosses, Shaping, Updates

GROUPS = (ExtraLosses, Shaping, Updates)


def rows_of_the_tables(root: Path) -> list[tuple[str, str]]:
    """(their option, ours) of every row of docs/migrate.md, without those of metrics."""
    page = (root / "docs" / "migrate.md").read_text().split("## From TRL: metrics")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    return [(theirs, ours.strip()) for theirs, ours in rows]


def test_our_side_of_every_row_exists(root: Path) -> None:
    from lightning.pytorch import Trainer

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
