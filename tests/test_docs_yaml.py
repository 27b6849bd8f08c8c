"""Every YAML block of the documentation is a configuration that the command line accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.cli import run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
FOUND = [(page, text) for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
# Blocks of `base:` are in test_reference_pages.py, those of custom_algorithms.md in test_custom_docs.py, and what the
# pages of algorithms show of a file in test_algorithm_pages.py.
BLOCKS = [
    pytest.param(yaml.safe_load(text), id=f"{page.stem}-{i}")
    for i, (page, text) in enumerate(FOUND)
    if "base" not in yaml.safe_load(text)
    and page.stem != "custom_algorithms"
    and "The whole file is [" not in page.read_text()
]
EXAMPLES = [
    pytest.param({key: value for key, value in yaml.safe_load(file.read_text()).items() if key != "base"}, id=name)
    for name in ("code", "langgraph", "verifiers")
    for file in ROOT.glob(f"examples/{name}/grpo.yaml")
]
BASE = {
    "model": {"class_path": "GRPOLightningModule", "init_args": {"actor": {"path": "folder"}}},
    "data": {"class_path": "RolloutDataModule", "init_args": {"prompts": {"rows": [{"prompt": "1+1="}]}}},
}
OWN = """
from lightning.pytorch import Callback

def correct(completions, **_): ...
def main(row, base_url, api_key): ...
class MyCallback(Callback): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages tell readers to write."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("rewards", "my_agent", "my_callbacks"):
        (folder / f"{name}.py").write_text(OWN)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    for name, text in zip(("my_tasks", "my_data"), code, strict=True):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def parser(folder: Path) -> Any:
    return run(["--config", str(folder / "base.yaml"), "--trainer.accelerator=cpu"], run=False).parser


@pytest.mark.parametrize("block", BLOCKS + EXAMPLES)
def test_a_block_is_accepted(block: dict[str, Any], parser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(ROOT)
    if "environment" in block:
        block = {"episode": {"class_path": "EnvironmentEpisode", "init_args": block}}
    if "episode" in block:
        block = {"data": {"init_args": block}}
    (folder / "block.yaml").write_text(yaml.safe_dump(block))
    parser.parse_args([f"--config={folder / 'base.yaml'}", f"--config={folder / 'block.yaml'}"])
