"""PPO under each strategy: time, peak memory, and weight sync on two processes, compared with one process.

    python benchmarks/strategies.py [--strategies one ddp fsdp2 zero1 zero2 zero3] [--rounds 3] [--quick] [--out FILE]

Every run trains actor and critic with a frozen reference on the same rollouts (the processes share the batch), samples
with `TransformersEngine`, and checks the engine's log-probs after each sync. Times are medians over the rollouts except
the first. Memory is the largest peak of the processes: resident memory on a CPU, allocated memory on a GPU. DeepSpeed
on a CPU uses the test suite's strategy, which skips Lightning's checks for CUDA. Two CPU processes share the cores that
a single process has to itself (one thread each), so the results show only the cost of a strategy relative to the others
and the memory that it saves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.data import PromptSource
from lightrl.distributed.fsdp2 import FSDP2Strategy, ZeROStrategy
from lightrl.engines import TransformersEngine
from lightrl.records import SamplingParams
from lightrl.rollout import RolloutDataModule

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "quickstart" / "model"
SIZES = {"quick": (64, 96, 2), "7M": (320, 960, 6)}
STRATEGIES = ["one", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


def build(folder: str, size: str) -> None:
    """A randomly initialised model of that size with the quickstart's tokenizer."""
    hidden, intermediate, layers = SIZES[size]
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    config = Qwen2Config.from_pretrained(TINY, **shape, layer_types=["full_attention"] * layers)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def strategy(name: str) -> Any:
    if name in ("one", "ddp"):
        return "auto" if name == "one" else DDPStrategy(gradient_as_bucket_view=True)
    if name == "fsdp2":
        return FSDP2Strategy()
    if torch.cuda.is_available():
        return ZeROStrategy(stage=int(name[-1]))
    sys.path.insert(0, str(ROOT))
    from tests.distributed.cpu_deepspeed import CPUZeROStrategy

    return CPUZeROStrategy(stage=int(name[-1]))


def even_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


class Watch(Callback):
    """The module's own times of each rollout."""

    reads_all_rows = False  # so that rows without a gradient are skipped

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.rows.append({name.removeprefix("time/"): v for name, v in outputs.items() if name.startswith("time/")})


def peak_mb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def work(name: str, model: str, rounds: int, out: Path) -> None:
    """One run; every process writes what it measured."""
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    watch, sync = Watch(), WeightSync()
    rows = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(16) for b in range(16)]
    data = RolloutDataModule(
        PromptSource(rows=rows), [even_digits], TransformersEngine(), SamplingParams(max_new_tokens=8),
        group_size=2, prompts_per_rollout=8, rollouts_per_epoch=rounds + 1,
    )  # fmt: skip
    trainer = Trainer(
        devices=1 if name == "one" else 2, strategy=strategy(name), callbacks=[sync, watch], max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(PPOLightningModule(model), data)
    names = ("generate", "sync", "experience", "update")
    result = {f"{n} ms": statistics.median(row[n] for row in watch.rows[1:]) * 1e3 for n in names}
    result |= {"peak MB": peak_mb(), "gap": float(sync.last_gap or 0.0)}
    (out / f"{trainer.global_rank}.json").write_text(json.dumps(result))


def measure(name: str, model: str, rounds: int) -> dict[str, Any]:
    """One row of the table: the slower of the processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", name, model, str(rounds), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    row = {key: round(value, 1) if key != "gap" else float(f"{value:.1e}") for key, value in worst.items()}
    return {"strategy": name, "processes": len(ranks), **row}


def main() -> None:
    """Parses the command line, measures, prints one table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=3, help="timed rollouts per strategy")
    parser.add_argument("--quick", action="store_true", help="use a model of 0.1M parameters, as a smoke test")
    parser.add_argument("--out", type=Path, help="where to write the table as JSON")
    parser.add_argument("--work", nargs=4, metavar=("NAME", "MODEL", "ROUNDS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        name, model, rounds, folder = arguments.work
        work(name, model, int(rounds), Path(folder))
        return
    size = "quick" if arguments.quick else "7M"
    with tempfile.TemporaryDirectory() as model:
        build(model, size)
        rows = []
        for name in arguments.strategies:
            rows.append(measure(name, model, arguments.rounds))
            print(rows[-1], file=sys.stderr, flush=True)
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for line in [{key: key for key in rows[0]}, *rows]:
        print("  ".join(str(line[key]).rjust(width) for key, width in widths.items()))
    if arguments.out:
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        versions = {"torch": torch.__version__, "device": "cuda" if torch.cuda.is_available() else "cpu"}
        report = {"model": size, "machine": machine, "versions": versions, "rounds": arguments.rounds, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
