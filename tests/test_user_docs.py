"""What the pages for new users say runs, and the messages that they quote are those of the code."""

from __future__ import annotations

import ast
import asyncio
import doctest
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lightrl.cli import COMMANDS, RUNS, main
from lightrl.environments import ToolEnvironment
from tests import toys

SMALL = [
    *("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
    *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
    *("--data.init_args.engine=TransformersEngine", "--data.init_args.sampling.max_new_tokens=4"),
]


def test_the_tutorial_runs_as_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (root / "docs" / "tutorial.md").read_text()
    (rows,), (reward,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("json", "python"))
    commands = [line.split("#")[0].split() for line in re.findall(r"^lightrl .*$", page, re.MULTILINE)]
    model = toys.quickstart_model(tmp_path / "model", **toys.SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    assert [command[1] for command in commands] == ["init", "fit", "fit", "report", "export"]
    main([*commands[0][1:], "--model", model])
    monkeypatch.chdir(tmp_path / "my_task")
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    written = Path("config.yaml").read_text().replace("TransformersEngine", "VLLMEngine")
    assert shown.replace("HuggingFaceTB/SmolLM2-135M-Instruct", model) in written
    (tmp_path / "my_task" / "rows.jsonl").write_text(rows)
    (tmp_path / "my_task" / "rewards.py").write_text(reward)
    main([*commands[1][1:], *SMALL])
    for command in commands[3:]:
        main(command[1:])
    assert (tmp_path / "my_task/outputs/grpo/model/model.safetensors").is_file()
    assert (tmp_path / "my_task/exported/model.safetensors").is_file()
    assert list((tmp_path / "my_task/outputs/grpo").rglob("*.html"))


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_commands_that_new_users_read_exist(root: Path) -> None:
    docs = root / "docs"
    names = ("index", "installation", "quickstart", "tutorial", "concepts", "grpo", "faq")
    pages = [root / "README.md", root / "AGENTS.md", *(docs / f"{name}.md" for name in names), *docs.rglob("SKILL.md")]
    found = set()
    for page in pages:
        code = re.findall(r"```bash\n(.*?)```|`(lightrl [^`]+)`", page.read_text(), re.DOTALL)
        found |= {(page.name, name) for part in code for name in re.findall(r"\blightrl ([a-z-]+)\b", "".join(part))}
    assert len(found) > 20
    assert {name for _, name in found} <= {*COMMANDS, *RUNS}, found


def test_the_tools_of_the_skill_are_offered_to_the_policy(root: Path) -> None:
    skills = root / "docs" / "skills"
    names: dict[str, Any] = {}
    exec(textwrap.dedent(blocks(skills / "write-an-environment" / "SKILL.md", " *python")[0]), names)
    environment = ToolEnvironment(factory=names["Shop"])
    asyncio.run(environment.reset({"prompt": "Sell two apples.", "apples": 3}, seed=0))
    assert [tool["function"]["name"] for tool in environment.tools] == ["sell"]
    exec(textwrap.dedent(blocks(skills / "train-on-your-data" / "SKILL.md", " *python")[0]), names)
    assert names["correct"](completions=[" 7\n", "8", ""], answer=[7, 7, 7]) == [1.0, 0.0, 0.0]


def strings_of(folder: Path) -> list[str]:
    """Every string in the code, with implicit concatenations joined and … for inserted values."""
    found = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code(root: Path) -> None:
    page = (root / "docs" / "troubleshooting.md").read_text().split("## It is slow")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)  # those with a remark are not of this code
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    code = strings_of(root / "lightrl")
    assert len(quoted) > 10
    missing = [message for message in quoted if not any(message in text for text in code)]
    assert not missing, missing


def test_the_script_of_the_grpo_page_has_the_settings_of_the_quickstart(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightrl.models.packaged.packaged_model", lambda name: name)
    monkeypatch.setattr(Trainer, "fit", lambda *_: None)
    script, rewards, variant = blocks(root / "docs" / "grpo.md", "python")
    names: dict[str, Any] = {"__name__": "grpo"}
    exec(script, names)
    config = yaml.safe_load((root / "configs" / "quickstart" / "smollm2_grpo.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    module, datamodule, trainer = names["module"], names["data"], names["trainer"]
    optimizer = module.optimizer_factory([torch.nn.Parameter()])
    assert {name: optimizer.defaults[name] for name in ("lr", "weight_decay")} == model["optimizer"]["init_args"]
    assert module.kl is model["kl"] is None
    assert datamodule.sampling.max_new_tokens == data["sampling"]["max_new_tokens"]
    for name in ("prompts_per_rollout", "rollouts_per_epoch"):
        assert getattr(datamodule, name) == data[name]
    assert datamodule._group_size == data["group_size"]
    assert names["task"] == data["prompts"]["rows"]["init_args"]["tasks"]
    assert datamodule.evaluation.batch_size == data["evaluation"]["batch_size"]
    assert trainer.max_epochs == config["trainer"]["max_epochs"]
    exec(rewards, names)
    (session,) = blocks(root / "docs" / "grpo.md", "pycon")
    test = doctest.DocTestParser().get_doctest(session, names, "grpo.md", None, None)
    assert len(test.examples) == 5 and doctest.DocTestRunner().run(test).failed == 0
    exec(variant, names)
    assert names["PositiveOnlyGRPO"](".", kl=None).kl is None
