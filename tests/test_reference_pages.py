"""The reference pages agree with the code: options, commands, and how configuration files merge."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightrl.cli import COMMANDS, RUNS, main

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(DOCS.parent / "scripts/options_table.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_every_command_is_on_its_page() -> None:
    headings = re.findall(r"^## ([a-z-]+)$", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted([*COMMANDS, *RUNS])


def test_the_example_of_configuration_files_merges_as_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightrl"])
    example = re.search(r"```yaml\n(base: .*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    assert example is not None
    file = tmp_path / "my_run.yaml"
    file.write_text(example[1])
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(file), "--model.init_args.loss", "SAPO", "--print_config"])
    merged = yaml.safe_load(capsys.readouterr().out)
    names = [callback["class_path"].rpartition(".")[2] for callback in merged["trainer"]["callbacks"]]
    assert names[0] == "WeightSync" and names[-1] == "EMA" and len(names) > 2
    assert merged["trainer"]["max_epochs"] == 2 and merged["data"]["init_args"]["group_size"] == 16
    assert merged["model"]["class_path"].endswith(".GRPOLightningModule")
    assert merged["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-6
    assert merged["model"]["init_args"]["optimizer"]["init_args"]["weight_decay"] == 0.0
    assert merged["model"]["init_args"]["loss"]["class_path"].endswith(".SAPO")
