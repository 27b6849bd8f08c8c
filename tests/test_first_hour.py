"""What a new user meets at the command line: `lightrl doctor`, a quiet console."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightrl import ModelSpec, PromptSource
from lightrl.cli import main
from lightrl.cli.doctor import diagnose
from lightrl.cli.plan.memory import measure_model
from lightrl.data.templates import load_tokenizer
from lightrl.models.loading import load_causal_lm
from tests.toys import SMALL, model_fixture, write_run

model = model_fixture(**SMALL)


@pytest.fixture()
def config(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a run of own rows and an own reward; arguments change those of the data module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "sum": i + 1}) + "\n" for i in range(3))
    )
    (tmp_path / "rewards.py").write_text(
        "def right(completions, sum, **_):\n    return [float(c == str(s)) for c, s in zip(completions, sum)]\n"
        "def broken(completions, **_):\n    raise KeyError('answer')\n"
        "def constant(completions, **_):\n    return [1.0] * len(completions)\n"
        "def endless(completions, **_):\n    import threading\n\n    threading.Event().wait()\n"
    )

    def write(**changes: Any) -> str:
        data = {"prompts": {"path": "rows.jsonl"}, "rewards": ["rewards.py:right"], "prompts_per_rollout": 2, **changes}
        return write_run(tmp_path / "run.yaml", model, model={"kl": None}, data=data)

    return write


def said(config_file: str, kind: str) -> str:
    return "\n".join(text for each, text in diagnose(config_file) if each == kind)


# ---- doctor ------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_with_a_sound_run(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--config", config()])
    out = capsys.readouterr().out
    assert "3 prompts; 4 to 4 tokens" in out and ", 1 update; " in out
    assert "'I do not know.' -> 0" in out and "column sum -> 1" in out
    assert "GRPOLightningModule" in out
    assert out.endswith("No problems found.\n")


def test_doctor_ends_with_status_1_and_says_what_to_do(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", f"--config={config(prompts={'path': 'nowhere.jsonl'})}"])
    assert stop.value.code == 1
    assert "nowhere.jsonl" in capsys.readouterr().out


def test_doctor_calls_the_reward_functions(config: Callable[..., str]) -> None:
    assert "'broken' raised KeyError: 'answer'" in said(config(rewards=["rewards.py:broken"]), "problem")
    assert "the same reward (1)" in said(config(rewards=["rewards.py:constant"]), "note")


def test_doctor_ends_if_a_reward_function_does_not(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.cli.doctor.PATIENCE", 0.5)
    assert "no result for an example after 0.5 seconds" in said(config(rewards=["rewards.py:endless"]), "problem")


def test_doctor_finds_what_a_run_rejects_before_it_trains(config: Callable[..., str]) -> None:
    assert "nowhere.jsonl" in said(config(evaluation={"prompts": {"path": "nowhere.jsonl"}}), "problem")
    assert "group_size=1" in said(config(group_size=1), "problem")


def test_doctor_reads_the_rows_of_supervised_runs(config: Callable[..., str], model: str, tmp_path: Path) -> None:
    config()
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "sum": "2"}\n' * 5)
    for name, kind, text in (
        ("rows.jsonl", "problem", "must be a string or a nonempty list"),
        ("nowhere.jsonl", "problem", "no such file"),
        ("pairs.jsonl", "ok", "5 examples, 2 batches of 2"),
    ):
        data = {"train": {"path": name, "completion_column": "sum"}, "batch_size": 2}
        content = {
            "trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
            "model": {"class_path": "SFTLightningModule", "init_args": {"actor": {"path": model}}},
            "data": {"class_path": "SFTDataModule", "init_args": data},
        }
        (tmp_path / "sft.yaml").write_text(yaml.safe_dump(content))
        assert text in said(str(tmp_path / "sft.yaml"), kind)


def test_fit_rejects_sizes_before_the_engine_starts(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(config())
    content = yaml.safe_load(file.read_text())
    for name, value, text in (
        ("updates", {"minibatch_size": 5}, "minibatch_size=5: does not divide the rollout's 4"),
        ("rollouts_per_epoch", 0, "rollouts_per_epoch=0: "),
    ):
        changed = copy.deepcopy(content)
        changed["model" if name == "updates" else "data"]["init_args"][name] = value
        file.write_text(yaml.safe_dump(changed))
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", str(file)])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and f"error: {text}" in said and "Starting" not in said


def test_a_wrong_model_or_directory_is_named_in_one_message(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, nowhere = ModelSpec(path="./copy"), "Model directory './copy' does not exist"
    for load in (
        lambda: load_tokenizer("./copy"),
        lambda: load_causal_lm(spec, trainable=True),
        lambda: ModelSpec("./copy", chat_template="training"),
        lambda: measure_model("./copy", compute=torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=nowhere):
            load()
    for lacking, text in (
        ("*", "Model directory './copy' has no config.json"),
        ("model.safetensors", "model path './copy': can't be loaded: "),
        ("cut", "model path './copy': can't be loaded: "),
    ):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree(model, "copy", ignore=shutil.ignore_patterns(lacking))
        if lacking == "cut":
            Path("copy/model.safetensors").write_bytes(Path(model, "model.safetensors").read_bytes()[:-100])
        with pytest.raises(ValueError, match=text):
            load_causal_lm(spec, trainable=True)
    with pytest.raises(ValueError, match="path='./', split='train': "):  # without data files
        PromptSource(path="./").read()
    Path("latin.jsonl").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl: not UTF-8 text"):
        PromptSource(path="latin.jsonl").read()


# ---- mistakes at the command line --------------------------------------------------------------------------------

MISTAKES = {
    "fit": "--config FILE.yaml",
    "fti": "'fti'",
    "fit --config nowhere.yaml": "--config=nowhere.yaml",
    "plan": "--model",
    "plan --model ./nowhere": "'./nowhere'",
    "export": "--checkpoint",
    "export --checkpoint nowhere.ckpt --output out": "checkpoint='nowhere.ckpt'",
    "check-env --config nowhere.yaml": "--config=nowhere.yaml",
    "report": "run_dir",
    "report nowhere": "run_dir='nowhere'",
    "init new --task gpro": "task",
    "init file/new": "dir=file/new",
    "serve-reward --reward nowhere.py:f": "'nowhere.py:f'",
    "quickstart --rolouts 3": "rolouts",
}


def test_a_mistake_is_told_in_one_line_before_anything_heavy_loads(tmp_path: Path) -> None:
    """Small commands don't need `jsonargparse` either. A test of their time would depend on the machine."""
    (tmp_path / "file").touch()
    code = (
        "import contextlib, io, json, sys\nfrom lightrl.cli import main\nfound = {}\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for command in ('--version', '--help', 'recipes'):\n        main([command])\n"
        "        assert command == 'recipes' or 'jsonargparse' not in sys.modules\n"
        f"for line in {list(MISTAKES)}:\n"
        "    status, said = 0, io.StringIO()\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        try:\n            main(line.split())\n"
        "        except SystemExit as stop:\n            status = stop.code\n"
        "    heavy = sorted({'torch', 'transformers', 'lightning', 'matplotlib', 'vllm'} & sys.modules.keys())\n"
        "    found[line] = [status, heavy, said.getvalue()]\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=550, check=True
    )
    for line, (status, heavy, said) in json.loads(done.stdout).items():
        assert (status, heavy) == (2, []), (line, status, heavy, said)
        assert said.startswith("error: ") and said.count("\n") == 1 and MISTAKES[line] in said, (line, said)


def test_a_typo_in_a_config_is_told_once_and_without_types(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(config())
    content = yaml.safe_load(file.read_text())
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"learning_rate": 1e-6}}
    for part, name, value, option in (
        ("data", "prompts", {"pth": "rows.jsonl"}, "pth"),
        ("data", "engine", {"class_path": "TransformersEngine", "init_args": {"thread": 1}}, "thread"),
        ("model", "optimizer", optimizer, "learning_rate"),
        ("trainer", "callbacks", [{"class_path": "CompletionLogger", "init_args": {"every": 1}}], "every"),
    ):
        changed = copy.deepcopy(content)
        (changed[part] if part == "trainer" else changed[part]["init_args"])[name] = value
        file.write_text(yaml.safe_dump(changed))
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(file)])
        said = capsys.readouterr().err
        assert said.count(f"Option '{option}' is not accepted") == 1 and name in said, said
        assert not re.search("typing|Namespace|class path|dict with|Errors:", said), said


def test_the_console_is_quiet(config: Callable[..., str]) -> None:
    code = (
        "import sys\nfrom lightrl.cli import main\n"
        f"main(['fit', '--config', {config()!r}, '--trainer.enable_progress_bar=false'])\n"
        "import warnings\nwarnings.warn('of my own', FutureWarning)\n"
    )
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    env.pop("HF_DATASETS_DISABLE_PROGRESS_BARS", None)  # which the tests set for themselves
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550, env=env)
    assert done.returncode == 0, done.stderr
    noise = (
        "💡 Tip",
        "Loading weights",
        "LightningCLI's args",
        "deprecated",
        "Total length of `list`",
    )
    assert [text for text in noise if text in done.stderr] == []
    assert "of my own" in done.stderr and "`Trainer.fit` stopped" in done.stderr
