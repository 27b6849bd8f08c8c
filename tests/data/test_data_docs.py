"""The configurations and the Python in docs/data.md and docs/rlhf.md are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule

import lightrl.algorithms
import lightrl.cli.lightning_cli  # noqa: F401 - its settings of the parser
import lightrl.data
import lightrl.rewards
import lightrl.rollout

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    block
    for page in ("data", "rlhf")
    for block in re.findall(r"```yaml\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
]
for package in (lightrl.algorithms, lightrl.data, lightrl.rewards, lightrl.rollout):
    for name in package.__all__:  # as the command does, so that YAML may name any class without its module
        getattr(package, name)


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", (DOCS / "data.md").read_text(), re.S)
    for name, text in zip(("my_tasks", "my_data"), code, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.add_subclass_arguments(LightningModule, "model", required=False)
    parser.add_argument("--config", action="config")
    config = yaml.safe_load(block)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({key: config[key] for key in ("data", "model") if key in config}))
    parsed = parser.parse_args([f"--config={tmp_path / 'run.yaml'}"])
    assert parsed.data.class_path.startswith("lightrl.")
