"""`lightrl init` as a new user meets it: the project it writes runs, and nothing of theirs is overwritten."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.agent.make_model import make_model
from examples.vlm.make_model import main as make_vlm
from lightrl.cli import main
from lightrl.cli.project import TASKS
from tests.toys import quickstart_model
from tests.waiting import gone, until

SMALL = [
    *("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
    *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
]
ROLLOUTS = ["--data.init_args.engine=TransformersEngine", "--data.init_args.sampling.max_new_tokens=4"]


@pytest.fixture()
def model(tmp_path: Path) -> str:
    return quickstart_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])


def test_the_agent_project_is_checked_runs_and_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "model")  # its calls can be read; drawn at random, it calls nothing
    main(["init", "mine", "--task", "agent", "--model", str(tmp_path / "model")])
    monkeypatch.chdir(tmp_path / "mine")
    random_init = "--model.init_args.actor.random_init=true"
    main(["check-env", "--config", "config.yaml", "--rows", "1"])
    assert "multiply" in capsys.readouterr().out
    sizes = ["--data.init_args.group_size=2", "--data.init_args.prompts_per_rollout=2"]
    length = "--data.init_args.episode.init_args.max_tokens=160"
    main(["fit", "--config", "config.yaml", random_init, length, *sizes, *SMALL, *ROLLOUTS])
    assert (tmp_path / "mine/outputs/agent/model/model.safetensors").is_file()
    assert "factory: tools.Calculator" in (tmp_path / "mine/outputs/agent/config.yaml").read_text()
    main(["view", "outputs/agent"])
    assert list((tmp_path / "mine/outputs/agent").rglob("*.html"))


def test_what_is_there_is_not_overwritten(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("# mine")
    with pytest.raises(SystemExit):
        main(["init", "mine", "--model", model])
    assert "rewards.py" in capsys.readouterr().err
    assert (tmp_path / "mine" / "rewards.py").read_text() == "# mine"
    assert not (tmp_path / "mine" / "config.yaml").exists()


def test_a_killed_quickstart_takes_its_step_along(tmp_path: Path) -> None:
    """Else the step would go on writing where the next quickstart begins."""
    (tmp_path / "x.yaml").write_text("trainer: {}")
    step = (
        "import os, pathlib, time\nfrom lightrl import cli\n"
        "def run(_):\n    pathlib.Path('begun').write_text(str(os.getpid()))\n    time.sleep(500)\n"
        "cli.run = run\ncli.main(['fit', '--config', 'x.yaml'])"
    )
    code = (
        "from lightrl.cli import quickstart as q\nrun = q._run_step\n"
        f"q._run_step = lambda command: run([command[0], '-c', {step!r}])\nq.quickstart(tiny=True)"
    )
    quickstart = subprocess.Popen([sys.executable, "-c", code])
    assert until(lambda: (tmp_path / "begun").exists() and (tmp_path / "begun").read_text() != "")
    quickstart.kill()
    quickstart.wait()
    assert gone(int((tmp_path / "begun").read_text()))


def test_an_earlier_quickstart_is_moved_or_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("lightrl.cli.quickstart._run_step", lambda command: ran.append(" ".join(command)) or 0)
    (tmp_path / "outputs/quickstart/ppo").mkdir(parents=True)
    main(["quickstart", "--tiny"])
    assert "Moved the earlier quickstart to outputs/quickstart.previous" in capsys.readouterr().out
    assert (tmp_path / "outputs/quickstart.previous/ppo").is_dir()
    assert [name in command for name, command in zip(("/sft", "/ppo", "report"), ran, strict=True)] == [True] * 3
    ran.clear()
    (tmp_path / "outputs/quickstart/sft/model").mkdir(parents=True)
    main(["quickstart", "--tiny", "--resume"])  # PPO has no checkpoint yet, but the warm start is finished
    assert len(ran) == 2 and "--ckpt_path=last" not in ran[0]
    ran.clear()
    (tmp_path / "outputs/quickstart/ppo/checkpoints").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/ppo/checkpoints/last.ckpt").touch()
    main(["quickstart", "--tiny", "--resume"])
    assert len(ran) == 2 and "--ckpt_path=last" in ran[0]
    monkeypatch.setattr("lightrl.cli.quickstart._run_step", lambda command: -2)  # a second Ctrl-C killed it
    with pytest.raises(SystemExit) as stop:
        main(["quickstart", "--tiny", "--resume"])
    assert stop.value.code == 130


def test_a_model_directory_with_special_characters_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a, b: {c} #1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for task in TASKS:
        main(["init", task, "--task", task, "--model", str(folder)])
        for file in Path(task).glob("*.yaml"):
            content = yaml.safe_load(file.read_text())
            assert str(folder) in str(content) or file.stem in ("reward", "ppo")
    assert f"--model {shlex.quote(str(folder))} --rows" in Path("program/README.md").read_text()


def test_the_program_project_is_checked_and_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "model")
    main(["init", "mine", "--task", "program", "--model", str(tmp_path / "model")])
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    tests = runpy.run_path("test_agent.py")
    for name in (name for name in tests if name.startswith("test_")):
        tests[name]()
    said = capsys.readouterr().out
    assert "calls calculate(" in said and "tool: 2" in said and "No problems found." in said
    random_init = "--model.init_args.actor.random_init=true"
    sizes = ["--data.init_args.group_size=2", "--data.init_args.prompts_per_rollout=2"]
    length = "--data.init_args.episode.init_args.max_tokens=400"
    main(["fit", "--config", "config.yaml", random_init, length, *sizes, *SMALL, *ROLLOUTS])
    assert (tmp_path / "mine/outputs/program/model/model.safetensors").is_file()


def test_the_rlhf_project_goes_through_its_three_steps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["init", "mine", "--task", "rlhf", "--model", model])
    monkeypatch.chdir(tmp_path / "mine")
    for step in ("sft", "reward"):
        main(["fit", "--config", f"{step}.yaml", *SMALL])
    main(["fit", "--config", "ppo.yaml", *SMALL, *ROLLOUTS])
    assert (tmp_path / "mine/outputs/ppo/model/model.safetensors").is_file()


def test_the_sft_project_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["init", "mine", "--task", "sft", "--model", model])
    monkeypatch.chdir(tmp_path / "mine")
    main(["fit", "--config", "config.yaml", *SMALL])
    assert (tmp_path / "mine/outputs/sft/model/model.safetensors").is_file()


def test_the_vlm_project_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision", reason="Qwen2-VL's processor needs torchvision (scripts/setup.sh)")
    make_vlm(str(tmp_path / "model"))
    main(["init", "mine", "--task", "vlm", "--model", str(tmp_path / "model")])
    monkeypatch.chdir(tmp_path / "mine")
    sizes = ["--data.init_args.group_size=2", "--data.init_args.prompts_per_rollout=2"]
    random_init = "--model.init_args.actor.random_init=true"
    main(["fit", "--config", "config.yaml", random_init, *sizes, *SMALL, *ROLLOUTS])
    assert (tmp_path / "mine/outputs/vlm/model/preprocessor_config.json").is_file()
