"""Configuration files that come with LightRL, and files that build on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.cli.config_files import SHIPPED, expand_configs, shipped_configs


def files(arguments: list[str]) -> list[str]:
    return [Path(argument.removeprefix("--config=")).name for argument in arguments]


def test_a_file_comes_after_those_it_builds_on(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "task.yaml").write_text("seed_everything: 1\n")
    (tmp_path / "more.yaml").write_text("seed_everything: 2\n")
    (tmp_path / "deep" / "mine.yaml").write_text("base: [../task.yaml, ../more.yaml]\n")
    (tmp_path / "last.yaml").write_text("base: deep/mine.yaml\n")
    expanded = expand_configs(["fit", "--config", str(tmp_path / "last.yaml"), "--trainer.max_epochs", "3"])
    assert expanded[0] == "fit" and expanded[-2:] == ["--trainer.max_epochs", "3"]
    assert files(expanded[1:-2]) == ["task.yaml", "more.yaml", "mine.yaml", "last.yaml"]


def test_a_shipped_file_is_named_without_a_path() -> None:
    (only,) = expand_configs(["--config=lightrl:overlays/lora"])
    assert Path(only.removeprefix("--config=")) == SHIPPED / "overlays" / "lora.yaml"
    assert "recipes/grpo_gsm8k_qwen2.5_0.5b" in shipped_configs()
    assert all(title for title in shipped_configs().values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: missing.yaml", "base=missing.yaml"),
        ("base: lightrl:no/such", "base=no/such"),
        ("base: mine.yaml", "cycle"),
        ("base: [1]", r"base=\[1\]"),
        ("base: {task: sums.yaml}", "base="),
        ("", "has no settings"),
        ("- run_dir: outputs", "has no settings"),
    ],
)
def test_a_base_that_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        expand_configs(["--config", str(tmp_path / "mine.yaml")])
