"""Wall time of a LightRL PPO step against bare vLLM generation plus bare forward, backward and optimizer.

    python benchmarks/overhead.py [--rounds 8] [--sizes quickstart 3M] [--layouts auto padded] [--out overhead.json]

Both sides in one process, by turns: each rollout's prompts, token rows and number of updates are replayed bare right
after LightRL's step. Bare is what nobody can leave out: `LLM.generate`, the loading of new weights, one forward each
of policy, critic and reference without gradients, then per update forwards of policy and critic, a clipped loss,
backward, clipping and AdamW, on the padded rows and all their logits. No callbacks, rewards, logs, sync checks or
metrics. The figure is the median over rounds of step / bare; the requirement is at most 1.15. CPU, one thread.

Layout `auto` is what a run uses: it computes a group's prompt once, which bare does not. `padded` computes what bare
computes, so its ratio is overhead alone.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=["auto", "padded"], default=["auto", "padded"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
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
