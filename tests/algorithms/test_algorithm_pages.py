"""The pages in docs/algorithms show the shipped configurations and Python that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.algorithms.base import RLLightningModule

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.stem)
def test_the_python_makes_the_module(page: Path) -> None:
    for block in blocks(page, "python"):
        names: dict[str, Any] = {}
        exec(block, names)
        assert isinstance(names["module"], RLLightningModule)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_yaml_is_that_of_the_configuration(page: Path) -> None:
    linked = re.search(r"The whole file is \[[^\]]+\]\(\.\./\.\./(configs/[^)]+)\)", page.read_text())
    if linked is None:
        for block in blocks(page, "yaml"):
            assert set(yaml.safe_load(block)) <= {"model", "data"}
        return
    shown, shipped = yaml.safe_load(blocks(page, "yaml")[0]), yaml.safe_load((ROOT / linked[1]).read_text())
    assert shown == {"model": shipped["model"]}
