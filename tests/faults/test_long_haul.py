"""What the long haul counts as growth, and a short one; `make long-haul` runs 2,000 rollouts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.faults.long_haul import COUNTED, growing, table


def samples(**slopes: float) -> list[dict[str, float]]:
    """A hundred counts that begin low, then wobble around a line."""
    shown = {name: slopes.get(name.replace(" ", "_"), 0.0) for name in COUNTED}
    return [
        {"rollout": i, **{name: (100 if i > 5 else 50) + slope * i for name, slope in shown.items()}}
        | {"memory": 900 + 2 * math.sin(i) + shown["memory"] * i}
        for i in range(100)
    ]


@pytest.mark.parametrize(
    ("slopes", "grown"),
    [
        ({}, []),
        ({"memory": 0.05}, []),  # 3 of 900 MiB: as much as the wobble
        ({"memory": 0.5}, ["memory"]),
        ({"descriptors": 0.02}, ["descriptors"]),
        ({"threads": -0.1, "temporary_files": 1.0}, ["temporary files"]),
    ],
)
def test_what_grows_is_named(slopes: dict[str, float], grown: list[str]) -> None:
    assert growing(samples(**slopes)) == grown
    result: dict[str, Any] = {"kind": "inside", "rollouts": 2000, "seconds": 100.0, "samples": samples(**slopes)}
    cells = [[cell.strip() for cell in line.split("|")] for line in table([result]).splitlines()[2:]]
    assert [row[4].removesuffix(" (MiB)") for row in cells if row[-2] == "**yes**"] == grown
    assert cells[0][2:5] == ["2,000", "50", "memory (MiB)"] and {len(row) for row in cells} == {11}
