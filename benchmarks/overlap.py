"""Measures the time of a GRPO step if generation and update are sequential, and if they overlap in two ways.

    python benchmarks/overlap.py [--rounds 3] [--steps 12] [--lengths varied equal tails] [--out overlap.json]
    python benchmarks/overlap.py --learning 8 [--out overlap_learning.json]

The engine runs in a separate process on one core, the trainer on another. The schedules alternate round by round with
one engine, and each starts with the same weights and seeds. Lengths: in `varied`, completions end at EOS (up to 256
tokens). In `equal`, all have 48 tokens. `tails` is like `varied` with a quarter of the completions, so that a step
waits for its longest completion and the update takes a small part of the time.

`serial` waits for the rollout, then updates. `staleness 1` samples the next rollout during the update. `in flight` has
the same staleness bound, but the weights change within completions, so the next rollout starts before the longest
completions of the last one have ended. Values are means over steps, without the first step (nothing is sampled before
it) and the last two (nothing is sampled during them). `generate` and `update` (including experience) are those of
serial. Requirements: staleness 1 takes at most 1.15 x max(generate, update), and in flight makes 1.3 times the steps of
staleness 1 with tails. CPU, two cores.

With `--learning N`, no times are measured. Staleness 1 and in flight train from the same start with N seeds each,
sampled by `TransformersEngine` in a thread, and evaluate the current policy after every fifth step. Runs with the same
seed are compared: the mean of their differences with its 95% interval (Student's t), which must not lie below 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.data import ArithmeticRows, PromptSource
from lightrl.engines import TransformersEngine, VLLMEngine
from lightrl.records import SamplingParams
from lightrl.rollout import Ahead, Evaluation, InFlight, OnPolicy, RolloutDataModule

TINY = Path(__file__).parent.parent / "configs" / "quickstart" / "model"
MODEL = {"initializer_range": 0.1, "max_position_embeddings": 512}
LENGTHS = {
    "varied": SamplingParams(max_new_tokens=256),
    "equal": SamplingParams(max_new_tokens=48, ignore_eos=True),
    "tails": SamplingParams(max_new_tokens=256),
}
MODES: dict[str, dict[str, Any]] = {
    "serial": {"schedule": OnPolicy()},
    "staleness 1": {"schedule": Ahead()},
    "in flight": {"schedule": InFlight()},
}
PROMPTS, GROUP = {"varied": 16, "equal": 16, "tails": 4}, 8
QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201, 16: 2.131}
"""Number of pairs -> 97.5 % quantile of Student's t."""


def build(folder: Path) -> str:
    """A randomly initialised model with the quickstart's architecture (0.45 M parameters) and tokenizer."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(TINY, **MODEL)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


class SharedEngine(VLLMEngine):
    """Stays when a run ends, and moves to a core of its own when it has started."""

    core = 0

    def start(self, context: Any) -> None:
        if not self.started:
            super().start(context)
            for pid in self.process_ids:
                pin(pid, self.core)

    def close(self) -> None:
        self.policy_version = -1


def pin(pid: int, core: int) -> None:
    """Puts every thread of a process on one core."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {core})


class Clock(Callback):
    """Seconds between the ends of steps, and what LightRL says about them."""

    reads_all_rows = False  # so that rows without a gradient are skipped

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.last = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self.last:  # the first step has nothing to overlap with
            named = {name.removeprefix("time/"): value for name, value in outputs.items() if name.startswith("time/")}
            length = outputs["completions/length"]
            self.steps.append({"step": now - self.last, "wait": 0.0, "length": length, **named})
        self.last = time.perf_counter()


def run(path: str, engine: VLLMEngine, lengths: str, steps: int, mode: dict[str, Any]) -> list[Any]:
    """The steps of one run."""
    seed_everything(0, verbose=False)
    module = GRPOLightningModule(
        path, kl=None, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0)
    )
    data = RolloutDataModule(
        PromptSource(rows=ArithmeticRows(split="train")),
        rewards=[digits],
        engine=engine,
        sampling=LENGTHS[lengths],
        group_size=GROUP,
        prompts_per_rollout=PROMPTS[lengths],
        rollouts_per_epoch=steps + 1,
        **mode,
    )
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), clock],
    )  # fmt: skip
    trainer.fit(module, data)
    return clock.steps[:-2]


def digits(completions: list[str], **_: Any) -> list[float]:
    """Fraction of characters that are an even digit: no group is without spread."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


class ThreadEngine(TransformersEngine):
    """Samples while the trainer computes: its weights are its own, so that is right, if no faster."""

    def check_overlap(self, *, in_flight: bool) -> None:
        pass


class Curve(Callback):
    """The evaluations of a run, and what share of its rows changed weights."""

    reads_all_rows = False  # so that rows without a gradient are skipped

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.switched: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.switched.append(outputs.get("rollout/switched", 0.0))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.rewards.append(float(trainer.callback_metrics["eval/reward"]))


def learn(path: str, seed: int, mode: dict[str, Any]) -> Curve:
    """One run of six epochs of five steps, with an evaluation after each epoch."""
    seed_everything(seed, verbose=False)
    module = GRPOLightningModule(
        path, kl=None, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, weight_decay=0.0)
    )
    data = RolloutDataModule(
        PromptSource(rows=ArithmeticRows(split="train")),
        rewards=[digits],
        engine=ThreadEngine(),
        sampling=SamplingParams(max_new_tokens=96),
        group_size=GROUP,
        prompts_per_rollout=4,
        rollouts_per_epoch=5,
        evaluation=Evaluation(PromptSource(rows=ArithmeticRows(split="eval", size=64))),
        **mode,
    )
    curve = Curve()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=6, logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[curve],
    )  # fmt: skip
    trainer.fit(module, data)
    return curve


def difference(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Mean of second less first, and half the width of its 95 % interval."""
    found = [second - first for first, second in pairs]
    half = QUANTILES[len(found)] * statistics.stdev(found) / len(found) ** 0.5
    return {"mean": statistics.fmean(found), "half_interval": half}


def learning(path: str, seeds: int) -> dict[str, Any]:
    """Curves of both ways, and how they differ at their end and over their whole length."""
    ways = ("staleness 1", "in flight")
    runs: dict[str, list[Curve]] = {way: [] for way in ways}
    for seed in range(1, seeds + 1):
        for way in ways:
            runs[way].append(learn(path, seed, MODES[way]))
            print(way, seed, [round(reward, 3) for reward in runs[way][-1].rewards], flush=True)
    rows = [
        {
            "mode": way,
            "curves": [run.rewards for run in runs[way]],
            "mean": [statistics.fmean(rewards) for rewards in zip(*(run.rewards for run in runs[way]), strict=True)],
            "switched": statistics.fmean(share for run in runs[way] for share in run.switched),
        }
        for way in ways
    ]
    pairs = list(zip(*(runs[way] for way in ways), strict=True))
    return {
        "seeds": seeds,
        "rows": rows,
        "in flight less staleness 1, end": difference([(a.rewards[-1], b.rewards[-1]) for a, b in pairs]),
        "in flight less staleness 1, mean of the curve": difference(
            [(statistics.fmean(a.rewards), statistics.fmean(b.rewards)) for a, b in pairs]
        ),
    }


def measure(path: str, engine: VLLMEngine, lengths: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The table's rows for one distribution of lengths."""
    taken: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for round_ in range(rounds + 1):
        for mode, arguments in MODES.items():
            found = run(path, engine, lengths, steps, arguments)
            taken[mode] += found if round_ else []  # in the first everything warms up
    rows = []
    for mode, found in taken.items():
        names = ("step", "generate", "experience", "update", "sync", "wait", "length")
        rows.append({"lengths": lengths, "mode": mode, **{n: statistics.fmean(s[n] for s in found) for n in names}})
    serial = rows[0]
    bound = max(serial["generate"], serial["experience"] + serial["update"])
    for row in rows:
        row |= {"to_serial": row["step"] / serial["step"], "to_bound": row["step"] / bound}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--learning", type=int, choices=QUANTILES, metavar="SEEDS", help="compare curves, not times")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error(f"--steps {arguments.steps}: the last two steps are left out, so give at least 3")
    torch.set_num_threads(1)
    if arguments.learning:
        with tempfile.TemporaryDirectory() as folder:
            write(learning(build(Path(folder)), arguments.learning), arguments.out)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("trainer and engine need a core each")
    pin(os.getpid(), cores[0])
    rows = []
    for lengths in arguments.lengths:
        engine = SharedEngine(in_process=False)
        engine.core = cores[1]
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows += measure(build(Path(folder)), engine, lengths, arguments.rounds, arguments.steps)
            finally:
                VLLMEngine.close(engine)
    names = ["to_serial", "to_bound", "step", "generate", "experience", "update", "sync", "wait", "length"]
    print(f"\n{'lengths':>8} {'mode':>12} " + " ".join(f"{name:>10}" for name in names) + "   (seconds, means)")
    for row in rows:
        print(f"{row['lengths']:>8} {row['mode']:>12} " + " ".join(f"{row[name]:10.3f}" for name in names))
    sequences = {n: p * GROUP for n, p in PROMPTS.items()}
    write({"rounds": arguments.rounds, "sequences": sequences, "rows": rows}, arguments.out)


def write(found: dict[str, Any], out: Path | None) -> None:
    """The JSON file, if one was asked for."""
    if out:
        out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
