"""`lightrl init`: creates a project."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from pathlib import Path
from typing import Literal

from lightrl.compat.arguments import require_model_folder

TEMPLATES = Path(__file__).parent / "templates"
TASKS = tuple(sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir()))


def init(
    dir: str, task: Literal["agent", "grpo", "program", "rlhf", "sft", "vlm"] = "grpo", model: str | None = None
) -> None:
    """Create a project to edit and run: a configuration, a reward function or tools, training examples, and a README.

    Args:
        dir: Directory to write to. Existing files are never overwritten.
        task: Template: `grpo` (prompts and a reward function), `agent` (tools that the policy calls over several
            turns), `program` (an agent written with any client SDK), `sft` (prompts and completions), `rlhf` (SFT, a
            reward model trained on preference pairs, then PPO), or `vlm` (questions about images).
        model: Model directory or model ID. Defaults to Qwen2.5-0.5B-Instruct, or Qwen2.5-VL-3B-Instruct for `vlm`.

    Raises:
        ValueError: A file already exists, or the model directory doesn't.
    """
    folder = Path(os.path.expanduser(dir))
    model = model or ("Qwen/Qwen2.5-VL-3B-Instruct" if task == "vlm" else "Qwen/Qwen2.5-0.5B-Instruct")
    require_model_folder(model)
    path = Path(os.path.expanduser(model))
    values = {"MODEL": str(path.resolve()) if path.is_dir() else model, "ENGINE": default_engine()}
    files = sorted(file for file in (TEMPLATES / task).rglob("*") if file.is_file() and file.suffix != ".pyc")
    targets = {file: folder / file.relative_to(TEMPLATES / task) for file in files}
    if there := [str(target) for target in targets.values() if os.path.lexists(target)]:
        raise ValueError(f"dir={dir}: would overwrite {', '.join(there)}. Use another directory.")
    for file, target in targets.items():
        text = file.read_text(encoding="utf-8")
        quote = shlex.quote if file.suffix == ".md" else _yaml_text
        for name, value in values.items():
            text = text.replace("{{" + name + "}}", quote(value))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"dir={dir}: {error.strerror}. Use another directory.") from error
    print(f"Wrote {', '.join(sorted(target.name for target in targets.values()))} to {folder}. Next steps:\n")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("    lightrl "):
            print(f"  {line.strip()}")


def _yaml_text(value: str) -> str:
    """A text for YAML, in quotes if it contains other characters than those of most paths and model IDs."""
    return value if re.fullmatch(r"[\w/][\w./-]*", value) else json.dumps(value, ensure_ascii=False)


def default_engine() -> str:
    """Engine of new projects: vLLM if installed."""
    return "VLLMEngine" if importlib.util.find_spec("vllm") is not None else "TransformersEngine"
