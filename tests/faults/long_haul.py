"""Thousands of rollouts with vLLM on a CPU: memory, descriptors, threads and temporary files stay what they were.

    python -m tests.faults.long_haul --rollouts 2000 --results outputs/long_haul.jsonl --table docs/reliability.md

Three runs in a process each: vLLM in the trainer's process, and one rollout ahead (`Ahead(1)`) vLLM in processes of
its own and transformers in a thread of the trainer's. What is counted is that of the trainer and all its descendants.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import RolloutCheckpoint, WeightSync
from lightrl.engines import Engine, VLLMEngine
from lightrl.records import SamplingParams
from lightrl.rollout import Ahead, OnPolicy
from tests.faults.containment import contained, libc_call
from tests.toys import SMALL, ThreadEngine, quickstart_model, quiet_trainer, sums_data

BEGIN, END = "<!-- long haul -->", "<!-- end of long haul -->"
COUNTED = ("memory", "descriptors", "threads", "temporary files")
"""`memory` is that of no file (RssAnon), in MiB: pages of libraries are others' too, or not, as these come and go."""
SAMPLES = 100
TITLES = {
    "inside": "vLLM in the trainer's process",
    "thread": "`TransformersEngine` in a thread, `Ahead(1)`",
    "beside": "vLLM in separate processes, `Ahead(1)`",
}
GROWTH = 0.01
"""Share by which memory may grow from the second quarter of a run to its last."""


class Count(Callback):
    """Takes the counts after every hundredth part of a run."""

    def __init__(self, rollouts: int, folders: list[Path]) -> None:
        self.every = max(rollouts // SAMPLES, 1)
        self.folders = folders
        self.samples: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every:
            return
        own = psutil.Process()
        processes = [own, *own.children(recursive=True)]
        files = sum(len(files) for folder in self.folders for _, _, files in os.walk(folder))
        self.samples.append(
            {
                "rollout": batch_idx + 1,
                "memory": sum(map(anonymous_memory, processes)) / 2**10,
                "descriptors": sum(each.num_fds() for each in processes),
                "threads": sum(each.num_threads() for each in processes),
                "temporary files": files,
            }
        )


def anonymous_memory(process: psutil.Process) -> int:
    """KiB of a process that no file backs."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def haul(kind: str, rollouts: int, *, shared_memory: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lightrl-long-haul-") as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of 32, which vLLM can do
        model = quickstart_model(Path(folder) / "model", **SMALL, **heads)
        engine: Engine = ThreadEngine()
        if kind != "thread":
            engine = VLLMEngine(in_process=kind == "inside", engine_args={"kv_cache_memory_bytes": 16 << 20})
        data = sums_data(
            engine=engine,
            sampling=SamplingParams(max_new_tokens=3),
            group_size=2,
            prompts_per_rollout=2,
            rollouts_per_epoch=rollouts,
            schedule=OnPolicy() if kind == "inside" else Ahead(),
        )
        count = Count(rollouts, [temporary, *([Path("/dev/shm")] if shared_memory else [])])
        saving = RolloutCheckpoint(max(rollouts // 20, 1), str(Path(folder) / "checkpoints"))
        trainer = quiet_trainer(
            callbacks=[WeightSync(), count, saving], enable_checkpointing=True, default_root_dir=folder
        )
        start = time.monotonic()
        trainer.fit(GRPOLightningModule(model, kl=None, optimizer=adam), data)
        seconds = time.monotonic() - start
        left = [str(path) for path in temporary.rglob("*") if path.is_socket()]
    return {"kind": kind, "rollouts": rollouts, "seconds": seconds, "samples": count.samples, "left": left}


def alone(kind: str, rollouts: int, *, isolated: bool) -> int:
    """The run with shared memory of its own, where that may be, so that nobody else's is counted; prints its counts."""
    if isolated:
        libc_call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    print("\n" + json.dumps(haul(kind, rollouts, shared_memory=isolated)))
    return 0


def quarters(samples: Sequence[dict[str, float]], name: str) -> list[float]:
    """Medians of the four quarters of a run."""
    size = len(samples) // 4
    return [statistics.median(each[name] for each in samples[i * size : (i + 1) * size]) for i in range(4)]


def growing(samples: Sequence[dict[str, float]]) -> list[str]:
    """What grew from the second quarter to the last; the first is the start-up's.

    Counts must not grow at all; memory by no more than `GROWTH`, which allocators and caches move it by.
    """
    found = []
    for name in COUNTED:
        _, second, _, last = quarters(samples, name)
        if last > second * (1 + GROWTH * (name == "memory")):
            found.append(name)
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| run | rollouts | ms per rollout | counted | 1st quarter | 2nd | 3rd | 4th | grew |", "|---" * 9 + "|"]
    for result in results:
        grew = growing(result["samples"])
        head = f"{TITLES[result['kind']]} | {result['rollouts']:,} | {1e3 * result['seconds'] / result['rollouts']:.0f}"
        for name in COUNTED:
            cells = " | ".join(
                f"{value:,.1f}" if name == "memory" else f"{value:g}" for value in quarters(result["samples"], name)
            )
            unit = " (MiB)" if name == "memory" else ""
            lines.append(f"| {head} | {name}{unit} | {cells} | {'**yes**' if name in grew else 'no'} |")
            head = " | | "
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--kind", choices=[*TITLES], help="this run alone, in this process; prints its counts")
    parser.add_argument("--results", type=Path, default=Path("outputs/long_haul.jsonl"), help="runs so far")
    parser.add_argument("--table", type=Path, help=f"page whose part from {BEGIN} to {END} is replaced by the table")
    options = parser.parse_args()
    if options.kind:
        torch.set_num_threads(1)
        sys.exit(contained(lambda isolated: alone(options.kind, options.rollouts, isolated=isolated)))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = (
        [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    )
    for kind in TITLES:
        if any((result["kind"], result["rollouts"]) == (kind, options.rollouts) for result in results):
            continue
        command = [sys.executable, "-m", "tests.faults.long_haul", "--kind", kind, "--rollouts", str(options.rollouts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        with options.results.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
    print(table(results))
    if options.table is not None:
        head, _, rest = options.table.read_text().partition(BEGIN)
        options.table.write_text(f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")
    sys.exit(any(growing(result["samples"]) or result["left"] for result in results))


if __name__ == "__main__":
    main()
