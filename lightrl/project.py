"""`lightrl init`: a small project of one's own; `lightrl quickstart`: the first run, without one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from lightrl.config_files import SHIPPED

__all__ = ["TASKS", "init", "quickstart"]

TEMPLATES = Path(__file__).parent / "templates"
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
    folder = Path(dir).expanduser()
    model = model or ("Qwen/Qwen2.5-VL-3B-Instruct" if task == "vlm" else "Qwen/Qwen2.5-0.5B-Instruct")
    path = Path(model).expanduser()
    values = {"MODEL": str(path.resolve()) if path.is_dir() else model, "ENGINE": _engine()}
    sources = sorted(
        file for file in (TEMPLATES / task).rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    targets = {source: folder / source.relative_to(TEMPLATES / task) for source in sources}
    there = [str(target) for target in targets.values() if target.exists()]
    if there:
        raise ValueError(
            f"dir={dir}: {', '.join(there)} exist(s) already and would be overwritten: name another folder."
        )
    for source, target in targets.items():
        text = source.read_text()
        for name, value in values.items():
            text = text.replace("{{" + name + "}}", value)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    here = folder.resolve() == Path.cwd()
    where = "this folder" if here else str(folder)
    print(f"Wrote {', '.join(sorted(target.name for target in targets.values()))} to {where}. Next:\n")
    if not here:
        print(f"  cd {folder}")
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("    lightrl "):
            print(f"  {line.strip()}")


def quickstart(rollouts: int | None = None) -> None:
    """Teaches a tiny model two-digit sums on a CPU: a supervised warm start, PPO through vLLM, a report. 5-8 minutes.

    Writes to `outputs/quickstart`; what an earlier one wrote there is kept as `outputs/quickstart.previous`.

    Args:
        rollouts: PPO rollouts in each of its 15 epochs, for a shorter look; the whole 20 where None.
    """
    outputs = Path("outputs/quickstart")
    if outputs.exists():
        previous = outputs.with_name("quickstart.previous")
        shutil.rmtree(previous, ignore_errors=True)
        outputs.rename(previous)
    model = str(SHIPPED / "quickstart" / "model")
    engine = _engine()
    if engine != "VLLMEngine":
        print("== vLLM is not installed: PPO samples with the transformers engine.", flush=True)
    short = [] if rollouts is None else [f"--data.init_args.rollouts_per_epoch={rollouts}"]
    steps = {
        "1/3 supervised warm start": [
            *("fit", "--config=lightrl:quickstart/sft"),
            *(f"--model.init_args.actor.path={model}", f"--data.init_args.tokenizer={model}"),
        ],
        "2/3 PPO": ["fit", "--config=lightrl:quickstart/ppo", f"--data.init_args.engine={engine}", *short],
        "3/3 report": ["report", "outputs/quickstart/ppo"],
    }
    for title, arguments in steps.items():
        print(f"== {title}", flush=True)
        done = subprocess.run([sys.executable, "-m", "lightrl", *arguments])
        if done.returncode:
            sys.exit(done.returncode)


def _engine() -> str:
    return "VLLMEngine" if importlib.util.find_spec("vllm") is not None else "TransformersEngine"
