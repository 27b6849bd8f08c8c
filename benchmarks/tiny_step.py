"""Compares a GRPO step of LightRL with one of TRL 1.16: samples per second, peak memory, and reward curves.

    python benchmarks/tiny_step.py --cases a b c --sweep --steps 20 --out results/tiny_step.json

Both sides use the same model (Qwen2 architecture, the same random weights), 8 prompts x 8 completions of exactly 64
tokens, the same reward function, fused AdamW with the same learning rate and clipping, GRPO's loss without KL (TRL's
`loss_type="grpo"`), one update per rollout, and float32 on a CPU. The tokenizer's end-of-sequence token is outside the
model's vocabulary, so no completion ends early. TRL samples with `generate` in its trainer's process. LightRL is
strictly on-policy with `TransformersEngine`.

Each side is a subprocess that stops after every step until the parent resumes it. Both exist at the same time and
alternate, so other work on the machine affects both. A step's time is everything between two optimizer steps: data,
weight sync and its check, generation, rewards, update, and metrics. The ratio is that of the medians. Peak memory is
each process's maximum resident set. `--sweep` first runs TRL with several thread counts and micro-batch sizes, then
LightRL with one and two threads, and uses each side's fastest setting (by wall time, or with `--by cpu` by CPU seconds
on a busy machine).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LETTERS = string.ascii_letters + string.digits[1:]
VOCABULARY, PROMPTS, GROUP, NEW_TOKENS, RATE = 64, 8, 8, 64, 1e-3
SWEEP = [(1, 64), (1, 32), (1, 16), (2, 64), (2, 32), (2, 16)]  # TRL's threads and rows of a micro-batch
BARS = {"a": 1.5, "b": 2.5, "c": 4.0}


@dataclass
class Case:
    """Sizes of one row of the table; prompt lengths are spread evenly between the two."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    shortest: int
    longest: int


CASES = {
    "a": Case(128, 256, 4, 4, 8, 8),
    "b": Case(128, 256, 4, 4, 30, 160),
    "c": Case(256, 768, 4, 8, 512, 512),
}


class Ticket:
    """Lets the worker go on step by step, and tells the parent what each step took and earned."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the error stream
        self.rewards: list[float] = []
        self.began: tuple[float, float] | None = None
        self.ready: Callable[[], object] = lambda: None  # called before every timed step

    def reward(self, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **_: Any) -> list[float]:
        """The fraction of a completion's tokens from the lower half of the vocabulary."""
        assert all(len(ids) == NEW_TOKENS for ids in completion_ids)
        values = [sum(t < VOCABULARY // 2 for t in ids) / NEW_TOKENS for ids in completion_ids]
        self.rewards += values
        return values

    def step_ended(self, notes: Callable[[], dict[str, Any]] | None = None) -> None:
        """Reports the step and waits for the next one to be asked for; ends the process when none will be.

        Args:
            notes: further entries of a step's report; what it takes to make them is not timed.
        """
        report: dict[str, Any] = {}
        if self.began is not None:
            wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            report = {"wall": wall, "cpu": cpu, "samples": len(self.rewards), "reward": statistics.mean(self.rewards)}
            report |= notes() if notes is not None else {}
        report["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(report), file=self.out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.rewards.clear()
        self.ready()
        self.began = time.perf_counter(), time.process_time()


def prompts(case: Case) -> list[str]:
    """PROMPTS strings of letters, each one token."""
    draw = random.Random(0)
    steps = max(PROMPTS - 1, 1)
    lengths = [case.shortest + (case.longest - case.shortest) * i // steps for i in range(PROMPTS)]
    return ["".join(draw.choices(LETTERS, k=n)) for n in lengths]


def build(case: Case, folder: str) -> int:
    """Saves the model and its tokenizer; returns the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=case.intermediate,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.heads // 2,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokens = ["<pad>", "<bos>", "<unk>", *LETTERS, "<eos>"]  # the last is beyond the model's vocabulary
    assert len(tokens) == VOCABULARY + 1
    letters = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    Qwen2Tokenizer(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def run_trl(case: Case, folder: str, micro: int, steps: int, ticket: Ticket) -> None:
    """TRL's side; never returns."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ticket.step_ended()

    config = GRPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=micro,
        gradient_accumulation_steps=PROMPTS * GROUP // micro, num_generations=GROUP, max_completion_length=NEW_TOKENS,
        temperature=1.0, beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=RATE, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=1.0, optim="adamw_torch_fused", bf16=False,
        gradient_checkpointing=False, use_cpu=True, max_steps=steps, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True, shuffle_dataset=False, seed=1, dataloader_num_workers=0,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": prompts(case) * steps})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    GRPOTrainer(model, ticket.reward, config, rows, processing_class=tokenizer, callbacks=[Stop()]).train()


def run_lightrl(case: Case, folder: str, micro_tokens: int, steps: int, ticket: Ticket) -> None:
    """LightRL's side; never returns."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightrl.callbacks import WeightSync
    from lightrl.data import PromptSource
    from lightrl.engines import TransformersEngine
    from lightrl.records import SamplingParams

    try:
        from lightrl.algorithms import GRPOLightningModule, Updates
        from lightrl.rollout import RolloutDataModule
    except ImportError:  # `against.py` runs older commits too
        from lightrl.modules import GRPOLightningModule

        from lightrl.data import RolloutDataModule

    class Stop(Callback):
        reads_all_rows = False  # so that rows without a gradient are skipped

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            ticket.step_ended(lambda: {"rollout": float(outputs["time/generate"] + outputs["time/score"])})

    seed_everything(1, verbose=False)
    module = GRPOLightningModule(
        folder,
        kl=None,
        updates=Updates(micro_batch_tokens=micro_tokens),
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=0.0, fused=True),
    )
    data = RolloutDataModule(
        PromptSource(rows=[{"prompt": text} for text in prompts(case)]),
        rewards=[ticket.reward],
        engine=TransformersEngine(),
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        group_size=GROUP,
        prompts_per_rollout=PROMPTS,
        rollouts_per_epoch=steps,
    )
    Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), Stop()],
    ).fit(module, data)  # fmt: skip


class Side:
    """A worker as the parent sees it, with the package of this checkout or of another."""

    def __init__(
        self,
        name: str,
        case: str,
        folder: str,
        threads: int,
        micro: int,
        steps: int,
        package: Path = ROOT,
        variables: dict[str, str] | None = None,
        script: str = "tiny_step.py",
    ) -> None:
        self.settings = {"threads": threads, "micro": micro}
        path = ROOT / "benchmarks" / script
        command = [sys.executable, str(path), "--worker", name, case, folder, str(micro), str(steps)]
        # Threads that wait must not spin where other processes want the core.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "0", **(variables or {})}
        environment["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.reports: list[dict[str, Any]] = []
        self.peak = 0.0

    def receive(self) -> None:
        """Waits for the end of a step."""
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"a worker ended early: {self.process.args}")
        report = json.loads(line)
        self.peak = report["peak_mb"]
        if "wall" in report:
            self.reports.append(report)

    def step(self) -> None:
        """Lets it do one step."""
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        self.receive()

    def median(self, what: str) -> float:
        """Of all steps but the first, which warms up."""
        return statistics.median(report[what] for report in self.reports[1:])

    def summary(self) -> dict[str, Any]:
        """What the table and the JSON show."""
        return {
            **self.settings,
            "wall_s": self.median("wall"),
            "cpu_s": self.median("cpu"),
            "samples_per_s": PROMPTS * GROUP / self.median("wall"),
            "peak_mb": self.peak,
            **({"rollout_s": self.median("rollout")} if "rollout" in self.reports[-1] else {}),
            "reward_first": statistics.mean(r["reward"] for r in self.reports[:3]),
            "reward_last": statistics.mean(r["reward"] for r in self.reports[-3:]),
            "rewards": [round(r["reward"], 4) for r in self.reports],
        }

    def close(self) -> None:
        """Ends the worker."""
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def alternate(sides: list[Side], steps: int) -> list[dict[str, Any]]:
    """Lets the sides take turns, the first and the last changing places every time."""
    try:
        for side in sides:
            side.receive()  # the first step, in which everything is loaded, is not timed
        for i in range(steps + 1):
            for side in sides if i % 2 else reversed(sides):
                side.step()
        return [side.summary() for side in sides]
    finally:
        for side in sides:
            side.close()


def sweep(name: str, settings: list[tuple[int, int]], case: str, folder: str, steps: int) -> list[dict[str, Any]]:
    """A side's figures with each of its settings, by turns."""
    tried = alternate([Side(name, case, folder, *setting, steps + 3) for setting in settings], steps)
    for row in tried:
        row.pop("rewards")
        print(f"{name} with {row['threads']} threads, micro-batch {row['micro']}: {row['wall_s']:.3f} s", flush=True)
    return tried


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = build(CASES[case], folder)
        settings = {"trl": (arguments.threads, arguments.micro), "lightrl": (arguments.threads, arguments.micro_tokens)}
        tried: dict[str, list[dict[str, Any]]] = {}
        if arguments.sweep:
            choices = {"trl": SWEEP, "lightrl": [(1, arguments.micro_tokens), (2, arguments.micro_tokens)]}
            for name, some in choices.items():
                tried[name] = sweep(name, some, case, folder, arguments.sweep_steps)
                best = min(tried[name], key=lambda row: row[f"{arguments.by}_s"])
                settings[name] = best["threads"], best["micro"]
        steps = arguments.steps
        sides = [Side(name, case, folder, *settings[name], steps + 3) for name in ("trl", "lightrl")]
        trl, ours = alternate(sides, steps)
    return {
        **asdict(CASES[case]), "parameters": parameters, "bar": BARS[case], "trl": trl, "lightrl": ours,
        "ratio_wall": trl["wall_s"] / ours["wall_s"], "ratio_cpu": trl["cpu_s"] / ours["cpu_s"],
        "memory": ours["peak_mb"] / trl["peak_mb"], "tried": tried,
    }  # fmt: skip


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Prints the table."""
    heads = ("samples/s", "CPU s", "wall s", "peak MB", "rewards first / last")
    print(f"{'case':5} {'side':8} {'ratio':>6} {'(CPU)':>6} " + " ".join(f"{head:>9}" for head in heads))
    for case, row in rows.items():
        for side in ("trl", "lightrl"):
            r = row[side]
            ratio = f"{row['ratio_wall']:6.2f} {row['ratio_cpu']:6.2f}" if side == "lightrl" else " " * 13
            print(
                f"{case:5} {side:8} {ratio} {r['samples_per_s']:9.1f} {r['cpu_s']:9.3f} {r['wall_s']:9.3f} "
                f"{r['peak_mb']:9.0f}   {r['reward_first']:.3f} / {r['reward_last']:.3f}"
            )


def main() -> None:
    """Parses the command line, measures, prints one table and writes JSON; cases already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro", type=int, default=64, help="rows of TRL's micro-batch, without --sweep")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="tokens of LightRL's micro-batch")
    parser.add_argument("--sweep", action="store_true", help="first search for each side's best settings")
    parser.add_argument("--sweep-steps", type=int, default=5)
    parser.add_argument(
        "--by", choices=["wall", "cpu"], default="wall", help="quantity that the best setting minimizes"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for case in arguments.cases:
        rows[case] = measure(case, arguments)
        show(rows)
    if arguments.out:
        import torch
        import transformers
        import trl

        old = json.loads(arguments.out.read_text())["cases"] if arguments.out.exists() else {}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        report = {"machine": machine, "versions": versions, "cases": dict(sorted({**old, **rows}.items()))}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def worker(name: str, case: str, folder: str, micro: str, steps: str) -> None:
    """A side's process."""
    ticket = Ticket()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = {"trl": run_trl, "lightrl": run_lightrl}[name]
    run(CASES[case], folder, int(micro), int(steps), ticket)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
