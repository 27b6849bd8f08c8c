"""`lightrl init`: a small project; `lightrl quickstart`: a first run without one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.files import atomic_write, read_records
from lightrl.cli import STEP_OF
from lightrl.cli.config_files import SHIPPED

TEMPLATES = Path(__file__).parent / "templates"
TASKS = tuple(sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir()))
STEPS = ("1/3 SFT warm start", "2/3 PPO", "3/3 report")
"""Of the quickstart."""


def init(
    dir: str,
    task: Literal["agent", "grpo", "rlhf", "sft", "vlm"] = "grpo",
    model: str | None = None,
) -> None:
    """Writes a small project to change and run: configuration, reward function or tools, some rows, a README.

    Args:
        dir: Folder to write. Existing files are never overwritten.
        task: `grpo` (prompts and a reward function), `agent` (tools that the policy calls over several turns), `sft`
            (prompts and completions), `rlhf` (SFT, a reward model from preference pairs, PPO against it) or `vlm`
            (questions about pictures).
        model: Folder or hub name of the model to train. Defaults to a Qwen 2.5 of 0.5 B parameters, for `vlm` of 3 B.

    Raises:
        ValueError: A file that would be written exists, or the folder can't be written to.
    """
    folder = Path(os.path.expanduser(dir))
    model = model or ("Qwen/Qwen2.5-VL-3B-Instruct" if task == "vlm" else "Qwen/Qwen2.5-0.5B-Instruct")
    path = Path(os.path.expanduser(model))
    values = {"MODEL": str(path.resolve()) if path.is_dir() else model, "ENGINE": _engine()}
    files = sorted(file for file in (TEMPLATES / task).rglob("*") if file.is_file() and file.suffix != ".pyc")
    targets = {file: folder / file.relative_to(TEMPLATES / task) for file in files}
    try:
        there = [str(target) for target in targets.values() if os.path.lexists(target)]
        if there:
            raise ValueError(f"dir={dir}: would overwrite {', '.join(there)}. Name another folder.")
        for file, target in targets.items():
            text = file.read_text()
            for name, value in values.items():
                text = text.replace("{{" + name + "}}", value)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    except OSError as error:
        raise ValueError(f"dir={dir[:80]!r}: cannot be written to ({error.strerror}). Name another folder.") from error
    print(f"Wrote {', '.join(sorted(target.name for target in targets.values()))} to {folder}. Next:\n")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("    lightrl "):
            print(f"  {line.strip()}")


def quickstart(rollouts: int | None = None, fresh: bool = False) -> None:
    """Teaches a tiny model two-digit sums on a CPU: an SFT warm start, PPO through vLLM, a report. 5-8 minutes.

    Writes to `outputs/quickstart`. An interrupted quickstart resumes: completed steps are not repeated, PPO starts from
    its last checkpoint. A completed one, or one with other rollouts, is moved to `outputs/quickstart.previous`.

    Args:
        rollouts: PPO rollouts in each of its 15 epochs, for a shorter run. Defaults to 20.
        fresh: Start over after an interrupted quickstart.

    Raises:
        ValueError: Another quickstart, or a run of one of its steps, is using the folder.
    """
    from lightrl.checkpoints.run_folder import LOCK, FolderLock  # loads torch

    outputs = Path("outputs/quickstart")
    with contextlib.ExitStack() as held:
        held.callback(FolderLock(outputs).release)
        for step in (outputs / "sft", outputs / "ppo"):
            if step.is_dir():  # a run that was started by hand would lose its folder
                FolderLock(step).release()
        record = outputs / "steps.json"
        earlier = _recorded(record) if record.is_file() and not fresh else {}
        done: list[str] = earlier.get("done", [])
        if earlier.get("rollouts", 0) == rollouts and STEPS[-1] not in done:
            print("== Resuming the interrupted quickstart; --fresh starts over.", flush=True)
        else:
            done = []
            if any(path.name != LOCK for path in outputs.iterdir()):
                previous = outputs.with_name("quickstart.previous")
                shutil.rmtree(previous, ignore_errors=True)
                outputs.rename(previous)  # with its lock: another process may be about to take it
                held.callback(FolderLock(outputs).release)
        _take_steps(outputs, rollouts, done)


def _recorded(record: Path) -> dict[str, Any]:
    try:
        (found,) = read_records(record)
    except ValueError as error:
        raise ValueError(f"{record}: does not tell which steps are done ({error}). Start over with --fresh.") from error
    return found


def _take_steps(outputs: Path, rollouts: int | None, done: list[str]) -> None:
    """Runs the steps that are not done, and records each in the folder."""
    model = str(SHIPPED / "quickstart" / "model")
    engine = _engine()
    if engine != "VLLMEngine":
        print("== vLLM is not installed: PPO samples with the transformers engine.", flush=True)
    short = [] if rollouts is None else [f"--data.init_args.rollouts_per_epoch={rollouts}"]
    resumed = ["--ckpt_path=last"] if any((outputs / "ppo/checkpoints").glob("*.ckpt")) else []
    sft = [f"--model.init_args.actor.path={model}", f"--data.init_args.tokenizer={model}"]
    commands = [
        ["fit", "--config=lightrl:quickstart/sft", *sft],
        ["fit", "--config=lightrl:quickstart/ppo", f"--data.init_args.engine={engine}", *short, *resumed],
        ["report", "outputs/quickstart/ppo"],
    ]
    for title, arguments in zip(STEPS, commands, strict=True):
        if title in done:
            print(f"== {title}: already done", flush=True)
            continue
        print(f"== {title}{', from its last checkpoint' if '--ckpt_path=last' in arguments else ''}", flush=True)
        _record(outputs, rollouts, done)
        status = _run_step([sys.executable, "-m", "lightrl", *arguments])
        if status:
            print(f"== Stopped in step {title}. Run the same command to resume; `--fresh` starts over.")
            sys.exit(status)
        done.append(title)
    _record(outputs, rollouts, done)


def _record(outputs: Path, rollouts: int | None, done: list[str]) -> None:
    with atomic_write(outputs / "steps.json", "w") as file:
        json.dump({"rollouts": rollouts, "done": done}, file)


def _run_step(command: list[str]) -> int:
    """Exit code of a command. Waits for it after Ctrl-C, which reaches it too: it saves and ends."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, env={**os.environ, STEP_OF: str(os.getpid())}).returncode
    finally:
        signal.signal(signal.SIGINT, previous)


def _engine() -> str:
    return "VLLMEngine" if importlib.util.find_spec("vllm") is not None else "TransformersEngine"
