"""Compares the wall time of a LightRL PPO step with vLLM generation plus a plain forward, backward, and optimizer step.

    python benchmarks/overhead.py [--rounds 8] [--sizes quickstart 3M] [--layouts auto padded] [--out overhead.json]

Both sides alternate in one process: after each LightRL step, a baseline replays the rollout's prompts, sequences, and
number of updates. The baseline contains only the necessary work: `LLM.generate`, loading the new weights, one forward
pass of policy, critic, and reference without gradients, and per update the forward passes of policy and critic, a
clipped loss, backward, clipping, and AdamW, on padded sequences with all their logits. It has no callbacks, rewards,
logs, weight-sync checks, or metrics. The result is the median over rounds of step / baseline; it must be at most 1.15.
CPU, one thread.

    python benchmarks/overhead.py --real smollm2 --threads 1 2 [--rounds 4] [--out results/overhead_real.json]

With `--real`, an on-policy GRPO step of a pretrained model (8 prompts of `chain_sum` x 8 completions of at most 48
tokens, float32) is compared with a baseline. vLLM generates completions of the same lengths for the same prompts with
an empty prefix cache. Then one forward and backward runs on as many tokens as the shared-prefix ideal has (each prompt
once), with logits only for trained tokens, followed by AdamW. The result must be at most 1.10.

Layout `auto` is what a run uses: it computes a group's prompt once, unlike the baseline. `padded` does the same
computation as the baseline, so its ratio is pure overhead.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lightrl.algorithms import PPOLightningModule, Updates
from lightrl.callbacks import AdaptiveKL, ThroughputMonitor, WeightSync
from lightrl.data import ArithmeticRows, PromptSource
from lightrl.engines import VLLMEngine
from lightrl.models.spec import ModelSpec
from lightrl.records import Rollouts, SamplingParams
from lightrl.rewards import ExactAnswer
from lightrl.rollout import RolloutDataModule

TINY = Path(__file__).parent.parent / "configs" / "quickstart" / "model"
SIZES: dict[str, dict[str, int]] = {
    "quickstart": {},
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2},
}  # fmt: skip
PROMPTS, GROUP, UPDATES_PER_EPOCH, EPOCHS, NEW_TOKENS = 64, 4, 2, 2, 5


def build(folder: Path, size: str) -> str:
    """A randomly initialised model of that size with the quickstart's tokenizer."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = dict(SIZES[size])
    if arguments:
        arguments["layer_types"] = ["full_attention"] * arguments["num_hidden_layers"]
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(TINY, **arguments)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


class Bare:
    """The bare loop: own models, own optimizer, the session's vLLM."""

    def __init__(self, path: str) -> None:
        self.actor, self.critic, self.reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(3)
        )
        self.head = torch.nn.Linear(self.critic.config.hidden_size, 1)
        parameters = [*self.actor.parameters(), *self.critic.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.0)
        self.parameters = parameters

    def logprobs(self, model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]

    def values(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.critic.model(input_ids=tokens, attention_mask=mask).last_hidden_state)[:, :-1, 0]

    def step(self, llm: Any, rollouts: Rollouts) -> float:
        """Seconds for generating as many completions of the same prompts and learning from the same rows."""
        from vllm import SamplingParams as Sampling

        firsts = range(0, len(rollouts), GROUP)
        lengths = (rollouts.attention_mask & ~rollouts.response_mask).sum(1)
        prompts = [{"prompt_token_ids": rollouts.token_ids[i, : lengths[i]].tolist()} for i in firsts]
        params = Sampling(n=GROUP, max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0)
        tokens, mask = rollouts.token_ids, rollouts.attention_mask.long()
        began = time.perf_counter()
        llm.collective_rpc("lightrl_load", args=(list(self.actor.named_parameters()),))
        llm.generate(prompts, params, use_tqdm=False)
        with torch.no_grad():
            old, values = self.logprobs(self.actor, tokens, mask), self.values(tokens, mask)
            reference = self.logprobs(self.reference, tokens, mask)
        response = rollouts.response_mask[:, 1:].float()
        advantages = (rollouts.rewards[:, None] - 0.02 * (old - reference) - values) * response
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(rollouts)).tensor_split(UPDATES_PER_EPOCH):
                t, m, w = tokens[rows], mask[rows], response[rows]
                ratio = (self.logprobs(self.actor, t, m) - old[rows]).exp()
                gain = torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
                error = (self.values(t, m) - (advantages + values)[rows]).square()
                loss = ((0.5 * error - gain) * w).sum() / w.sum()
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
        return time.perf_counter() - began


class Alternate(Callback):
    """Times LightRL's step from one rollout's end to the next's, and the bare one in between."""

    reads_all_rows = False  # so that rows without a gradient are skipped

    def __init__(self, path: str) -> None:
        self.bare = Bare(path)
        self.rounds: list[dict[str, float]] = []
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ours = time.perf_counter() - self.began
        llm = trainer.datamodule.engine._adapter.llm  # type: ignore[attr-defined]
        theirs = self.bare.step(llm, batch)
        trainer.datamodule.engine.mark_stale()  # type: ignore[attr-defined] # it holds the bare weights now
        times = {name: outputs[f"time/{name}"] for name in ("sync", "generate", "score", "experience", "update")}
        self.rounds.append({"step": ours, "bare": theirs, **times})
        self.began = time.perf_counter()


def measure(size: str, layout: Any, rounds: int, folder: Path) -> dict[str, Any]:
    """One row of the table; the first rounds, in which engine and memory warm up, do not count."""
    path = build(folder / f"{size}-{layout}", size)
    seed_everything(0, verbose=False)
    alternate = Alternate(path)
    module = PPOLightningModule(
        ModelSpec(path, layout=layout),
        updates=Updates(minibatch_size=PROMPTS * GROUP // UPDATES_PER_EPOCH),
        ppo_epochs=EPOCHS,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, weight_decay=0.0),
    )
    data = RolloutDataModule(
        PromptSource(rows=ArithmeticRows(split="train")),
        rewards=[ExactAnswer()],
        engine=VLLMEngine(),
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        group_size=GROUP,
        prompts_per_rollout=PROMPTS,
        rollouts_per_epoch=rounds + 2,
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), AdaptiveKL(), ThroughputMonitor(), alternate],
    )  # fmt: skip
    trainer.fit(module, data)
    counted = alternate.rounds[2:]
    row: dict[str, Any] = {name: statistics.median(r[name] for r in counted) for name in counted[0]}
    row["ratio"] = statistics.median(r["step"] / r["bare"] for r in counted)
    return {"size": size, "layout": layout, "parameters": sum(p.numel() for p in module.actor.parameters()), **row}


class BareGRPO:
    """Generation by the session's vLLM, and a plain forward and backward of the ideal's tokens."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-9, weight_decay=0.0, fused=True)

    def step(self, llm: Any, rollouts: Rollouts) -> dict[str, float]:
        """Seconds of each part. Rows have the mean length, so that attention costs about what it costs the ideal."""
        from vllm import SamplingParams as Sampling

        prompts = (rollouts.attention_mask & ~rollouts.response_mask).sum(1)
        completions = rollouts.response_mask.sum(1)
        asked = [{"prompt_token_ids": rollouts.token_ids[i, : prompts[i]].tolist()} for i in range(len(rollouts))]
        params = [
            Sampling(max_tokens=n, ignore_eos=True, temperature=1.0, logprobs=0, seed=i)
            for i, n in enumerate(completions.tolist())
        ]
        began = time.perf_counter()
        llm.reset_prefix_cache()
        llm.collective_rpc("lightrl_load", args=(list(self.model.named_parameters()),))
        loaded = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        generated = time.perf_counter()
        ideal = int(prompts[::8].sum() + (completions - 1).sum())
        width = int(rollouts.attention_mask.sum(1).float().mean())
        tokens = rollouts.token_ids[:, :width].reshape(-1).repeat(2)[: ideal // width * width].view(-1, width)
        hidden = self.model.model(input_ids=tokens).last_hidden_state.reshape(-1, self.model.config.hidden_size)
        trained = int(completions.sum())
        rows, targets = hidden[torch.arange(trained) % len(hidden)], tokens.reshape(-1)
        logits = self.model.lm_head(rows).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[torch.arange(trained) % len(targets), None])
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        return {"bare_sync": loaded - began, "bare_generate": generated - loaded, "bare_update": ended - generated,
                "bare": ended - began, "ideal_tokens": ideal, "trained_tokens": trained}  # fmt: skip


class AlternateGRPO(Callback):
    """Times LightRL's step and the bare one alternately."""

    def __init__(self, path: str) -> None:
        self.bare = BareGRPO(path)
        self.rounds: list[dict[str, float]] = []
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ours = time.perf_counter() - self.began
        theirs = self.bare.step(trainer.datamodule.engine._adapter.llm, batch)  # type: ignore[attr-defined]
        trainer.datamodule.engine.mark_stale()  # type: ignore[attr-defined] # it holds the bare weights now
        times = {name: float(outputs[f"time/{name}"]) for name in ("sync", "generate", "score", "experience", "update")}
        self.rounds.append({"step": ours, **times, **theirs})
        print({name: round(value, 2) for name, value in self.rounds[-1].items()}, flush=True)
        self.began = time.perf_counter()


def measure_real(name: str, rounds: int) -> dict[str, Any]:
    """One row of the table, with the number of threads that torch has now."""
    from lightrl.algorithms import GRPOLightningModule
    from lightrl.data import ReasoningGymRows
    from lightrl.models.packaged import packaged_model
    from lightrl.rewards import ReasoningGymReward

    path = packaged_model(name)
    seed_everything(0, verbose=False)
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    alternate = AlternateGRPO(path)
    module = GRPOLightningModule(
        ModelSpec(path),
        kl=None,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0, fused=True),
    )
    data = RolloutDataModule(
        PromptSource(rows=ReasoningGymRows({"chain_sum": settings}, size=200)),
        rewards=[ReasoningGymReward()],
        engine=VLLMEngine(),
        sampling=SamplingParams(max_new_tokens=48),
        group_size=8,
        prompts_per_rollout=8,
        rollouts_per_epoch=rounds + 1,
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), alternate],
    )  # fmt: skip
    trainer.fit(module, data)
    counted = alternate.rounds[1:]
    row: dict[str, Any] = {n: round(statistics.median(r[n] for r in counted), 3) for n in counted[0]}
    row["ratio"] = round(statistics.median(r["step"] / r["bare"] for r in counted), 3)
    return {"model": name, "threads": torch.get_num_threads(), "rounds": rounds, **row}


def main_real(arguments: argparse.Namespace) -> None:
    """A process for each number of threads."""
    rows = []
    for threads in arguments.threads:
        command = [sys.executable, __file__, "--real", arguments.real, "--rounds", str(arguments.rounds), "--threads"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([*command, str(threads), "--worker"], env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        (result,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        rows.append(json.loads(result.removeprefix("RESULT ")))
    found: dict[str, Any] = {"rows": rows}
    if len(rows) > 1:
        found["speedup_of_threads"] = round(rows[0]["step"] / rows[-1]["step"], 2)
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=["auto", "padded"], default=["auto", "padded"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--real", choices=["smollm2", "gemma3"], help="measure a GRPO step of this model instead")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="with --real")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        torch.set_num_threads(arguments.threads[0])
        print("RESULT " + json.dumps(measure_real(arguments.real, arguments.rounds)), flush=True)
        os._exit(0)
    if arguments.real:
        main_real(arguments)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = [(size, layout) for size in arguments.sizes for layout in arguments.layouts]
        rows = [measure(size, layout, arguments.rounds, Path(folder)) for size, layout in cases]
    names = ["step", "bare", "sync", "generate", "score", "experience", "update"]
    print(
        f"\n{'size':>10} {'layout':>7} {'ratio':>6} "
        + " ".join(f"{name:>10}" for name in names)
        + "   (seconds, medians)"
    )
    for row in rows:
        print(
            f"{row['size']:>10} {row['layout']:>7} {row['ratio']:6.2f} "
            + " ".join(f"{row[name]:10.3f}" for name in names)
        )
    result = {"rounds": arguments.rounds, "sequences": PROMPTS * GROUP, "updates": EPOCHS * UPDATES_PER_EPOCH}
    text = json.dumps(result | {"rows": rows}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
