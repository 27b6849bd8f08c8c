"""Compares a training step on the completions of an image prompt: shared prefix, padded, and TRL 1.16's GRPO.

    python benchmarks/vlm.py --out results/vlm.json

All sides use one Qwen2-VL with the same random weights, a prompt of an image and a few words, 8 completions of 64
tokens, GRPO's loss without KL, and AdamW, in float32 on a CPU. A step is everything from the scored rollout to the
changed weights: experience, forward, backward, clipping, and optimizer. It excludes generation, so that the sides do
the same work.

| side | input of the model |
|---|---|
| shared_prefix | `GRPOLightningModule`, default layout: image and prompt once, then the 8 completions |
| padded | `GRPOLightningModule(layout="padded")`: every completion with its prompt, the image encoded each time |
| trl | `GRPOTrainer.training_step` on TRL's own layout of the same sequences, with pixels repeated as in TRL |

Each side is a subprocess that stops after every step until the parent resumes it. They exist at the same time and
alternate, so other work on the machine affects all of them. Times are medians of the process's CPU seconds, with one
thread. Memory is the maximum resident set after the steps minus the one before the first. `norm` is the gradient norm
of the first step, which shows that all sides compute the same update. TRL uses the tokenizer instead of the processor,
because Qwen2-VL's processor needs torchvision; the pixels are the same.
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
import time
from pathlib import Path
from typing import Any

SIDES = ("shared_prefix", "padded", "trl")
VOCABULARY, IMAGE, VIDEO, START, END = 512, 505, 506, 507, 508


class Ticket:
    """Lets a worker go on step by step and tells the parent what each step took."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the error stream
        self.base = 0.0
        self.began = (0.0, 0.0)

    @staticmethod
    def peak() -> float:
        """Maximal resident set so far in MB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def wait(self) -> None:
        """Waits for the next step to be asked for; ends the process when none will be."""
        self.base = self.base or self.peak()
        if not sys.stdin.readline():
            os._exit(0)
        self.began = time.perf_counter(), time.process_time()

    def report(self, norm: float) -> None:
        """Tells what the step took."""
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        answer = {"wall": wall, "cpu": cpu, "norm": norm, "memory_mb": self.peak() - self.base}
        print(json.dumps(answer), file=self.out, flush=True)


def build(folder: str, args: argparse.Namespace) -> int:
    """Saves model and tokenizer; returns the number of parameters."""
    import torch
    from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    heads = args.hidden // 32
    text = {
        "vocab_size": VOCABULARY, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    }  # fmt: skip
    width = args.vision_hidden
    vision = {"depth": args.vision_layers, "embed_dim": width, "num_heads": width // 32, "hidden_size": args.hidden}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokens = {f"t{i}": i for i in range(2, VOCABULARY)} | {"<pad>": 0, "<eos>": 1}
    Qwen2Tokenizer(vocab=tokens, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>").save_pretrained(
        folder
    )
    return sum(p.numel() for p in model.parameters())


def make_rollouts(args: argparse.Namespace) -> Any:
    """`Rollouts` of PROMPTS image prompts with their completions; rows of a group share their model inputs."""
    import torch

    from lightrl.records import Rollouts

    draw = torch.Generator().manual_seed(0)
    rows, columns = args.image_tokens // 16, 16
    image = [START, *[IMAGE] * args.image_tokens, END]
    words = torch.randint(2, 500, (args.prompts, args.words), generator=draw).tolist()
    prompts = [[*w[: args.words // 2], *image, *w[args.words // 2 :]] for w in words]
    inputs = []
    for prompt in prompts:
        kinds = torch.tensor([[int(token == IMAGE) for token in prompt]])
        pixels = torch.randn(4 * args.image_tokens, 1176, generator=draw)
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        inputs.append({"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds})
    group = args.group_size
    answers = torch.randint(2, 500, (args.prompts * group, args.new_tokens), generator=draw)
    ids = torch.cat([torch.tensor([prompt for prompt in prompts for _ in range(group)]), answers], 1)
    response = torch.zeros_like(ids, dtype=torch.bool)
    response[:, -args.new_tokens :] = True
    rewards = torch.rand(len(ids), generator=draw)
    return Rollouts(
        token_ids=ids,
        attention_mask=torch.ones_like(response),
        response_mask=response,
        engine_logprobs=torch.zeros(ids.shape),
        group_ids=torch.arange(args.prompts).repeat_interleave(group),
        rewards=rewards,
        reward_parts={"bench": rewards},
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        policy_version=0,
        inputs=[inputs[p] for p in range(args.prompts) for _ in range(group)],
    )


def run_lightrl(layout: str, folder: str, args: argparse.Namespace, ticket: Ticket) -> None:
    """LightRL's side; never returns."""
    import torch
    from lightning.pytorch import Callback, Trainer

    from lightrl.algorithms import GRPOLightningModule, Updates
    from lightrl.models.spec import ModelSpec

    rollouts = make_rollouts(args)

    class Turns(Callback):
        reads_all_rows = False  # so that rows without a gradient are skipped

        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            ticket.wait()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            ticket.report(float(outputs["optim/grad_norm"]))

    class Endless:
        def __len__(self) -> int:
            return 10**6

        def __iter__(self) -> Any:
            while True:
                yield rollouts

    module = GRPOLightningModule(
        ModelSpec(folder, layout=layout),  # type: ignore[arg-type]
        kl=None,
        updates=Updates(micro_batch_tokens=10**6),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=True),
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[Turns()],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, Endless())  # type: ignore[arg-type]


def run_trl(folder: str, args: argparse.Namespace, ticket: Ticket) -> None:
    """TRL's side; never returns."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rollouts = make_rollouts(args)
    size, split = len(rollouts), args.new_tokens
    advantages = rollouts.rewards.view(args.prompts, -1)
    spread = advantages.std(1, keepdim=True) + 1e-4
    advantages = ((advantages - advantages.mean(1, keepdim=True)) / spread).flatten()
    kinds = torch.cat([row["mm_token_type_ids"] for row in rollouts.inputs])
    batch = {
        "prompt_ids": rollouts.token_ids[:, :-split],
        "prompt_mask": rollouts.attention_mask[:, :-split].long(),
        "completion_ids": rollouts.token_ids[:, -split:],
        "completion_mask": rollouts.response_mask[:, -split:].long(),
        "advantages": advantages,
        "num_items_in_batch": rollouts.response_mask.sum(),
        "pixel_values": torch.cat([row["pixel_values"] for row in rollouts.inputs]),
        "image_grid_thw": torch.cat([row["image_grid_thw"] for row in rollouts.inputs]),
        "num_images": [1] * size,
        "mm_token_type_ids": torch.nn.functional.pad(kinds, (0, split)),
    }

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, _: Any) -> Any:
            return dict(batch)

    class Turns(TrainerCallback):  # type: ignore[misc]
        norm = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ticket.wait()

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            if not self.norm:  # after clipping to infinity, so the whole norm; once, as it costs time
                parts = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                self.norm = float(torch.stack(parts).norm())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ticket.report(self.norm)

    config = GRPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=size, gradient_accumulation_steps=1,
        num_generations=args.group_size, max_completion_length=split, beta=0.0, num_iterations=1, loss_type="grpo",
        learning_rate=1e-4, weight_decay=0.0, lr_scheduler_type="constant", max_grad_norm=1e9,
        optim="adamw_torch_fused", bf16=False, gradient_checkpointing=False, use_cpu=True, max_steps=10**6,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["t2"] * size})
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    trainer = Given(
        model, lambda completions, **_: [0.0] * len(completions), config, rows,
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[Turns()],
    )  # fmt: skip
    trainer.train()


def measure(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Lets the sides take turns; side -> medians, or why it does not run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"}
    command = [sys.executable, __file__, "--folder", folder, *sizes(args), "--worker"]
    sides = {
        side: subprocess.Popen(
            [*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            stderr=Path(folder, f"{side}.log").open("w"),  # noqa: SIM115
        )
        for side in args.sides
    }  # fmt: skip
    reports: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    try:
        for _ in range(args.repeats + 1):  # the first step is to warm up
            for side in [side for side in sides if side not in failed]:
                line = take_turn(sides[side])
                if line:
                    reports[side].append(json.loads(line))
                else:
                    failed[side] = Path(folder, f"{side}.log").read_text().strip().splitlines()[-1]
    finally:
        for process in sides.values():
            process.kill()
    return {side: {"failed": failed[side]} if side in failed else summary(found) for side, found in reports.items()}


def take_turn(process: subprocess.Popen[str]) -> str:
    """One step of a worker; an empty line where it has ended."""
    try:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    except BrokenPipeError:
        return ""
    return process.stdout.readline()  # type: ignore[union-attr]


def summary(reports: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the steps after the first, its gradient norm, and the memory at the end."""
    timed = {name: statistics.median(r[name] for r in reports[1:]) for name in ("cpu", "wall")}
    return {**timed, "norm": reports[0]["norm"], "memory_mb": reports[-1]["memory_mb"]}


def sizes(args: argparse.Namespace) -> list[str]:
    """The arguments that a worker needs, too."""
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in SIZES]


SIZES = {
    "image_tokens": 512, "new_tokens": 64, "group_size": 8, "prompts": 1, "words": 16, "hidden": 256, "layers": 4,
    "vision_hidden": 128, "vision_layers": 4,
}  # fmt: skip


def main() -> None:
    """Parses arguments, measures, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.worker == "trl":
        run_trl(args.folder, args, Ticket())
    elif args.worker:
        run_lightrl(args.worker, args.folder, args, Ticket())
    with tempfile.TemporaryDirectory() as folder:
        parameters = build(folder, args)
        result = measure(folder, args)
    print(f"{parameters / 1e6:.1f} M parameters, {args.group_size} completions of {args.new_tokens} tokens per prompt")
    first = next((row for row in result.values() if "cpu" in row), {})
    for side, row in result.items():
        if "failed" in row:
            print(f"{side:14} does not run: {row['failed']}")
            continue
        row["times"] = row["cpu"] / first["cpu"]
        numbers = f"{row['cpu']:8.2f} CPU s {row['times']:6.2f} x {row['memory_mb']:8.0f} MB"
        print(f"{side:14} {numbers}  norm {row['norm']:.5f}")
    if args.out:
        about = {"machine": platform.processor() or platform.machine(), "parameters": parameters}
        settings = {name: getattr(args, name) for name in [*SIZES, "repeats"]}
        args.out.write_text(json.dumps({**about, "settings": settings, "sides": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
