"""`lightrl init`: a small project to change and run."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Literal

TEMPLATES = Path(__file__).parent / "templates"
TASKS = tuple(sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir()))


def init(
    dir: str,
    task: Literal["agent", "grpo", "program", "rlhf", "sft", "vlm"] = "grpo",
    model: str | None = None,
) -> None:
    """Write a small project to change and run: configuration, reward function or tools, some rows, a README.

    Args:
        dir: Folder to write. Existing files are never overwritten.
        task: `grpo` (prompts and a reward function), `agent` (tools that the policy calls over several turns),
            `program` (an agent that talks to a model server, with any SDK), `sft` (prompts and completions), `rlhf`
            (SFT, a reward model from preference pairs, PPO against it) or `vlm` (questions about pictures).
        model: Folder or hub name of the model to train. Defaults to a Qwen 2.5 of 0.5 B parameters, for `vlm` of 3 B.

    Raises:
        ValueError: A file that would be written exists, or the folder can't be written to.
    """
    folder = Path(os.path.expanduser(dir))
    model = model or ("Qwen/Qwen2.5-VL-3B-Instruct" if task == "vlm" else "Qwen/Qwen2.5-0.5B-Instruct")
    path = Path(os.path.expanduser(model))
    values = {"MODEL": str(path.resolve()) if path.is_dir() else model, "ENGINE": default_engine()}
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


def default_engine() -> str:
    """The engine of new projects: vLLM if it is installed."""
    return "VLLMEngine" if importlib.util.find_spec("vllm") is not None else "TransformersEngine"
