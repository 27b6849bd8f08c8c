"""`lightrl init`: a small project of one's own; `lightrl quickstart`: the first run, without one."""

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
from lightrl.checkpoints.lock import LOCK, FolderLock
from lightrl.cli import STEP_OF
from lightrl.cli.config_files import SHIPPED
from lightrl.compat.arguments import at_least, user_path

TEMPLATES = Path(__file__).parent / "templates"
STEPS = ("1/3 supervised warm start", "2/3 PPO", "3/3 report")
"""Of the quickstart."""
TASKS = tuple(sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir()))


def init(
    dir: str,
    task: Literal["agent", "grpo", "rlhf", "sft", "vlm"] = "grpo",
    model: str | None = None,
) -> None:
    """Writes a small project: configuration, reward function or tools, some rows and a README, to be changed and run.

    Args:
        dir: folder to write; made where it does not exist. Files that are there are never overwritten.
        task: `grpo` (prompts and a reward function), `agent` (tools that the policy calls over several turns), `sft`
            (prompts and completions), `rlhf` (SFT, a reward model from preference pairs, PPO against it) or `vlm`
            (questions about pictures).
        model: folder or hub name of the model to train; a Qwen 2.5 of half a billion parameters where None, with `vlm`
            one of three billion that sees.

    Raises:
        ValueError: a file that would be written is there already.
    """
    if not dir.strip():
        raise ValueError(f"dir={dir!r}: name a folder, or give . for this one.")
    folder = user_path("dir", dir)
    model = model or ("Qwen/Qwen2.5-VL-3B-Instruct" if task == "vlm" else "Qwen/Qwen2.5-0.5B-Instruct")
    path = user_path("model", model)
    values = {"MODEL": str(path.resolve()) if path.is_dir() else model, "ENGINE": _engine()}
    sources = sorted(
        file for file in (TEMPLATES / task).rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    targets = {source: folder / source.relative_to(TEMPLATES / task) for source in sources}
    there = [str(target) for target in targets.values() if os.path.lexists(target)]
    if there:
        raise ValueError(
            f"dir={dir}: {', '.join(there)} exist(s) already and would be overwritten: name another folder."
        )
    for source, target in targets.items():
        text = source.read_text()
        for name, value in values.items():
            text = text.replace("{{" + name + "}}", value)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        except (OSError, ValueError) as error:  # the latter: NUL
            shown = dir if len(dir) <= 80 else f"{dir[:80]}..."
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"dir={shown!r}: this folder cannot be written to ({why}): name another.") from error
    here = folder.resolve() == Path.cwd()
    where = "this folder" if here else str(folder)
    print(f"Wrote {', '.join(sorted(target.name for target in targets.values()))} to {where}. Next:\n")
    if not here:
        print(f"  cd {shlex.quote(str(folder))}")
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("    lightrl "):
            print(f"  {line.strip()}")


def quickstart(rollouts: int | None = None, fresh: bool = False) -> None:
    """Teaches a tiny model two-digit sums on a CPU: a supervised warm start, PPO through vLLM, a report. 5-8 minutes.

    Writes to `outputs/quickstart`. One that was interrupted goes on when it is called again: steps that are done are
    not repeated, PPO resumes from its last checkpoint. What one that is done, or of other rollouts, wrote there is kept
    as `outputs/quickstart.previous`. While one is alive, another one in the same place is refused.

    Args:
        rollouts: PPO rollouts in each of its 15 epochs, for a shorter look; the whole 20 where None.
        fresh: begin anew after one that was interrupted, too.

    Raises:
        ValueError: there are less than 1 rollouts, or another quickstart, or a run of one of its steps, is alive there.
    """
    at_least("rollouts", rollouts, 1, or_none="for all of them")
    outputs = Path("outputs/quickstart")
    with contextlib.ExitStack() as held:
        held.callback(FolderLock(outputs).release)
        for step in (outputs / "sft", outputs / "ppo"):
            if step.is_dir():  # a run that was begun by hand would lose its folder, too
                FolderLock(step).release()
        record = outputs / "steps.json"
        earlier = _noted(record) if record.is_file() and not fresh else {}
        done: list[str] = earlier.get("done", [])
        if earlier.get("rollouts", 0) == rollouts and STEPS[-1] not in done:
            print("== Going on with the quickstart that was interrupted here; --fresh begins anew.", flush=True)
        else:
            done = []
            if any(path.name != LOCK for path in outputs.iterdir()):
                previous = outputs.with_name("quickstart.previous")
                shutil.rmtree(previous, ignore_errors=True)
                outputs.rename(previous)  # with its lock, which is kept: somebody may be about to take it
                held.callback(FolderLock(outputs).release)
        _take_steps(outputs, rollouts, done)


def _noted(record: Path) -> dict[str, Any]:
    """What an earlier quickstart noted."""
    try:
        (noted,) = read_records(record)
    except ValueError as error:
        raise ValueError(
            f"{record} does not say how far the quickstart came ({error}): --fresh begins anew."
        ) from error
    return noted


def _take_steps(outputs: Path, rollouts: int | None, done: list[str]) -> None:
    """The quickstart's steps but for those that are done, which are noted in its folder."""
    record = outputs / "steps.json"
    model = str(SHIPPED / "quickstart" / "model")
    engine = _engine()
    if engine != "VLLMEngine":
        print("== vLLM is not installed: PPO samples with the transformers engine.", flush=True)
    short = [] if rollouts is None else [f"--data.init_args.rollouts_per_epoch={rollouts}"]
    resumed = ["--ckpt_path=last"] if any((outputs / "ppo/checkpoints").glob("*.ckpt")) else []
    commands = [
        [
            *("fit", "--config=lightrl:quickstart/sft"),
            *(f"--model.init_args.actor.path={model}", f"--data.init_args.tokenizer={model}"),
        ],
        ["fit", "--config=lightrl:quickstart/ppo", f"--data.init_args.engine={engine}", *short, *resumed],
        ["report", "outputs/quickstart/ppo"],
    ]
    for title, arguments in zip(STEPS, commands, strict=True):
        if title in done:
            print(f"== {title}: done before", flush=True)
            continue
        print(f"== {title}{', from its last checkpoint' if '--ckpt_path=last' in arguments else ''}", flush=True)
        with atomic_write(record, "w") as file:
            json.dump({"rollouts": rollouts, "done": done}, file)
        status = _run_step([sys.executable, "-m", "lightrl", *arguments])
        if status:
            print(f"== Stopped in step {title}. The same command goes on from here; `--fresh` begins anew.")
            sys.exit(status)
        done.append(title)
    with atomic_write(record, "w") as file:
        json.dump({"rollouts": rollouts, "done": done}, file)


def _run_step(command: list[str]) -> int:
    """The exit status of a command that is waited for also after Ctrl-C, which it gets, too: it saves and ends.

    Where this process is killed, the command ends, too.
    """
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, env={**os.environ, STEP_OF: str(os.getpid())}).returncode
    finally:
        signal.signal(signal.SIGINT, previous)


def _engine() -> str:
    return "VLLMEngine" if importlib.util.find_spec("vllm") is not None else "TransformersEngine"
