"""Peak memory of each process that loads a model under FSDP2, sharded or whole.

    python benchmarks/loading.py [--ranks 2] [--out results/loading.json]

`Trainer.fit` loads and shards a GRPO module (actor and reference, float32) on CPU processes with gloo. `whole` is how
models are loaded that can't be read in shards; an argument of `ModelSpec.kwargs` forces it here. The value is the peak
of resident memory above that of the process before loading. On a CPU, the models are in host memory; on GPUs, the
shards are on the device, and the host holds some rows of one tensor at a time. The sums of the parameters are compared
after the peak is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from lightning.pytorch import Trainer
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lightrl.algorithms import GRPOLightningModule
from lightrl.data import PromptSource
from lightrl.distributed import FSDP2Strategy
from lightrl.engines import TransformersEngine
from lightrl.models.spec import ModelSpec
from lightrl.objectives import KLInLoss
from lightrl.rollout import RolloutDataModule

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "quickstart" / "model"
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4}  # fmt: skip


def megabytes(name: str) -> float:
    """VmRSS, what is resident now, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


class Loading(GRPOLightningModule):
    """Ends when its models are loaded."""

    def configure_model(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = megabytes("VmRSS")
        super().configure_model()
        self.megabytes = megabytes("VmHWM") - before
        self.total = float(sum(p.detach().double().sum().full_tensor() for p in self.parameters()))  # type: ignore[attr-defined]

    def on_fit_start(self) -> None:
        self.trainer.should_stop = True
        self.trainer.limit_train_batches = 0


def work(way: str, path: str, ranks: int, out: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    kwargs: dict[str, Any] = {"attn_implementation": "sdpa"} if way == "whole" else {}
    spec = ModelSpec(path, kwargs=kwargs)
    module = Loading(spec, reference=spec, kl=KLInLoss("k2"), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    data = RolloutDataModule(
        PromptSource(rows=[{"prompt": "1+1="}]), [lambda completions, **_: [0.0] * len(completions)],
        TransformersEngine(), prompts_per_rollout=ranks, rollouts_per_epoch=1,
    )  # fmt: skip
    trainer = Trainer(
        devices=ranks, accelerator="cpu", strategy=FSDP2Strategy(), max_epochs=1, limit_train_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    (out / f"{trainer.global_rank}.json").write_text(json.dumps({"MB": module.megabytes, "total": module.total}))


def measure(way: str, path: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", way, path, folder, "--ranks", str(ranks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"way": way, "ranks": ranks, "MB per rank": [round(x["MB"]) for x in found], "total": found[0]["total"]}


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "loading.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], args.work[1], args.ranks, Path(args.work[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config.from_pretrained(TINY, **SHAPE, layer_types=["full_attention"] * SHAPE["num_hidden_layers"])
        model = Qwen2ForCausalLM(config)
        size = round(sum(p.nbytes for p in model.parameters()) / 1e6)
        model.save_pretrained(folder)
        del model
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        rows = [measure(way, folder, args.ranks) for way in ("whole", "parts")]
    assert rows[0].pop("total") == rows[1].pop("total"), "the same weights"
    for row in rows:
        print(f"| {row['way']} | {size} | {' / '.join(map(str, row['MB per rank']))} |")
    report = {"command": "python benchmarks/loading.py", "machine": platform.machine(), "torch": torch.__version__,
              "MB of one model": size, "models": 2, "rows": rows}  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
