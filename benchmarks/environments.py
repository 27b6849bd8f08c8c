"""Compares GRPO over many turns with a tool: LightRL's environments and TRL 1.16's `environment_factory`.

    python benchmarks/environments.py --model /tmp/reader --cases quick slow --out results/environments.json

64 environments run concurrently, 8 prompts x 8, of one plain class that both libraries accept unchanged (`Book`). The
policy calls its tool in each of six turns, the limit on both sides; TRL does not make the call of the last turn. A
reply without a valid call ends the conversation. In the slow case, a call takes 0 to 2 s (twice the square of a seeded
uniform number, 0.67 s on average, the same on all sides); in the quick case, it takes no time. The model (Qwen2
architecture, Qwen 2.5's chat template, 0.6M parameters) first learns the format from written conversations and is kept
in `--model`. With `--base smollm2`, it is SmolLM2-135M-Instruct with that template, which learns the format in about 40
steps; `--prompts 4 --group 4` then runs 16 environments.
Settings: temperature 0.4, float32, CPU, GRPO's loss without KL, one update per rollout, and a learning rate that leaves
the policy unchanged.

Each side is a subprocess that stops after every step until the parent resumes it, as in `tiny_step.py`. `trl` samples
with `generate`, `lightrl` with `TransformersEngine`, and `vllm` is LightRL with vLLM in its process. A step is
everything between two optimizer steps, and a rollout the part of it until the last trajectory is scored. Peak memory is
each process's maximum resident set.

After each step, LightRL's sides replay the rollout: they send the same requests with the same seeds to the engine, each
as soon as the previous one has finished, without environments, tools, or token assembly (`bare`). A rollout can't be
faster than that, or than its critical path (`path`): the slowest environment's tools, plus the turns of one environment
with the engine to itself (`alone`, of the environment with the median number of tokens).

`--cases turns` plays conversations of 48 turns with immediate answers, and measures the CPU time of the event loop
between an answer and the next request, early and late.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from tiny_step import Side, Ticket

PROMPTS, GROUP = (int(number) for number in os.environ.get("BENCHMARK_ENVIRONMENTS", "8x8").split("x"))
TURNS = 6
ENVIRONMENTS = PROMPTS * GROUP
WORDS = [
    *("amber", "birch", "cedar", "delta", "ember", "frost", "grove", "heron"),
    *("inlet", "jetty", "knoll", "larch", "maple", "north", "ocean", "pearl"),
]
LONGEST = 1024  # tokens of a trajectory's replies and results
RATE, TEMPERATURE = 1e-6, 0.4
BARS = {"quick": 2.0, "slow": 8.0}
SLOWEST = {"quick": 0.0, "slow": 2.0}


class Book:
    """The environment: a plain class, as `environment_factory` and `ToolEnvironment` take it."""

    slowest = 0.0
    """Most seconds of a call."""
    numbers = itertools.count()
    slept: ClassVar[dict[int, float]] = {}
    calls = 0

    def reset(self, **row: Any) -> None:
        """Begins."""
        self.number = next(Book.numbers)
        self.left = TURNS
        self.early = 0
        Book.slept[self.number] = 0.0

    def read(self, page: int, why: str) -> str:
        """
        Reads a page of the book.

        Args:
            page: its number
            why: what you look for
        """
        Book.calls += 1
        draw = random.Random(f"{self.number % (100 * ENVIRONMENTS)}/{self.left}")
        seconds = Book.slowest * draw.random() ** 2
        Book.slept[self.number] += seconds
        time.sleep(seconds)
        self.left -= 1
        self.early += page < 50
        return text_of(draw, page, self.left)

    def get_reward(self) -> float:
        """The fraction of its calls that read in the first half."""
        return self.early / TURNS


def text_of(draw: random.Random, page: int, left: int) -> str:
    """What a page says."""
    said = " ".join(draw.choices(WORDS, k=16))
    return f"Page {page}: {said}. There are {left} left."


def prompts() -> list[list[dict[str, str]]]:
    """PROMPTS conversations."""
    return [
        [{"role": "user", "content": f"Read the book of {word}, then say that you are done."}]
        for word in WORDS[:PROMPTS]
    ]


def conversation(draw: random.Random, calls: int) -> list[dict[str, Any]]:
    """One as the policy should hold it."""
    said: list[dict[str, Any]] = list(draw.choice(prompts()))
    for left in range(calls, 0, -1):
        page, why = draw.randrange(10, 100), " ".join(draw.choices(WORDS, k=draw.randint(4, 16)))
        call = {"name": "read", "arguments": {"page": page, "why": why}}
        said.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        said.append({"role": "tool", "name": "read", "content": text_of(draw, page, left)})
    return said


def tiny() -> tuple[Any, Any]:
    """A tokenizer and a model of 0.6M random parameters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen2_5_chat_template

    draw, schema = random.Random(0), get_json_schema(Book().read)
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=marks[:3], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = [json.dumps(message) for _ in range(50) for message in conversation(draw, TURNS)]
    own.train_from_iterator([*corpus, json.dumps(schema), qwen2_5_chat_template], trainer)
    own.add_tokens([AddedToken(mark, normalized=False) for mark in marks[3:]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=marks[1:2], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return tokenizer, Qwen2ForCausalLM(config)


def build(folder: str, steps: int, base: str) -> None:
    """Saves a tokenizer and a model that has learned the format in so many steps."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen2_5_chat_template

    torch.manual_seed(0)
    draw, schema = random.Random(0), get_json_schema(Book().read)
    if base == "tiny":
        (tokenizer, model), rate, sizes = tiny(), 2e-3, (8, 3)
    else:
        from lightrl.models.packaged import packaged_model

        source, rate, sizes = packaged_model(base), 1e-4, (3, 1)
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer.chat_template = qwen2_5_chat_template
    tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 2), pct_start=0.1)
    for step in range(steps):
        rows, whole = [], step % 2 == 1  # the others are beginnings: whole conversations take long
        for _ in range(sizes[whole]):
            said = conversation(draw, TURNS if whole else 2)
            text = tokenizer.apply_chat_template(said, tools=[schema], tokenize=False)
            ids: list[int] = []
            told: list[bool] = []
            for number, part in enumerate(text.split("<|im_start|>assistant\n")):
                reply, end, rest = part.partition("<|im_end|>") if number else ("", "", part)
                head = "<|im_start|>assistant\n" if number else ""
                for piece, policy in ((head, False), (reply + end, True), (rest, False)):
                    some = tokenizer.encode(piece, add_special_tokens=False)
                    ids += some
                    told += [policy] * len(some)
            rows.append((ids, told))
        width = max(len(ids) for ids, _ in rows)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        mask = torch.tensor([told + [False] * (width - len(told)) for _, told in rows])[:, 1:]
        loss = F.cross_entropy(model(input_ids=tokens).logits[:, :-1][mask], tokens[:, 1:][mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"warm start, step {step}: {loss.item():.3f} nats a token, rows of {width}", flush=True)
    model.save_pretrained(folder)


def run_trl(folder: str, micro: int, steps: int, ticket: Ticket) -> None:
    """TRL's side; never returns."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    notes: dict[str, Any] = {}

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began, Book.calls = time.perf_counter(), 0
            scored = super()._generate_and_score_completions(inputs)
            tokens = int((scored["completion_mask"] * scored["tool_mask"]).sum())
            turns = Book.calls + ENVIRONMENTS
            notes.update(rollout=time.perf_counter() - began, calls=Book.calls, turns=turns, tokens=tokens)
            return scored

    def earned(environments: Any, **_: Any) -> list[float]:
        ticket.rewards += [environment.get_reward() for environment in environments]
        return [0.0] * len(environments)

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ticket.step_ended(lambda: notes)

    config = GRPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=micro,
        gradient_accumulation_steps=ENVIRONMENTS // micro, num_generations=GROUP, max_completion_length=LONGEST,
        temperature=TEMPERATURE, beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=RATE, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=1.0, optim="adamw_torch_fused", bf16=False,
        gradient_checkpointing=False, use_cpu=True, max_steps=steps, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True, shuffle_dataset=False, seed=1, dataloader_num_workers=0,
        max_tool_calling_iterations=TURNS - 1,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": prompts() * steps})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Timed(model, earned, config, rows, processing_class=tokenizer, callbacks=[Stop()], environment_factory=Book).train()


def run_lightrl(name: str, folder: str, micro_tokens: int, steps: int, ticket: Ticket) -> None:
    """LightRL's side; never returns."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightrl.algorithms import GRPOLightningModule, Updates
    from lightrl.callbacks import WeightSync
    from lightrl.data import PromptSource
    from lightrl.engines import TransformersEngine, VLLMEngine
    from lightrl.environments import EnvironmentEpisode, ToolEnvironment
    from lightrl.records import SamplingParams
    from lightrl.rollout import RolloutDataModule

    seed_everything(1, verbose=False)
    engine = VLLMEngine() if name == "vllm" else TransformersEngine()
    answers: list[Any] = []
    generate = engine.generate

    async def kept(request: Any) -> Any:
        answers.append(answer := await generate(request))
        return answer

    engine.generate = kept  # type: ignore[method-assign]
    quicker = ticket.ready

    def ready() -> None:
        quicker()
        answers.clear()
        Book.calls = 0
        Book.slept.clear()

    ticket.ready = ready

    class Stop(Callback):
        reads_all_rows = False  # so that rows without a gradient are skipped

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            ticket.rewards += batch.rewards.tolist()
            ticket.step_ended(lambda: self.notes(module, batch))

        def notes(self, module: Any, batch: Any) -> dict[str, Any]:
            """What the rollout took, and what the engine alone takes for its requests."""
            tokens = sum(len(answer.completions[0].token_ids) for answer in answers)
            found = {"rollout": batch.metrics["time/generate"] + batch.metrics["time/score"], "tokens": tokens}
            found |= {"calls": Book.calls, "turns": len(answers)}
            attempts = of_attempts(answers)
            one = sorted(attempts, key=lambda turns: sum(len(turn.completions[0].token_ids) for turn in turns))
            seconds = []
            for some in (answers, one[len(one) // 2]):
                if name == "vllm":  # what it holds of these prompts must go
                    engine.load_weights(module.named_policy_weights(), policy_version=engine.policy_version)
                began = time.perf_counter()
                found["bare_tokens"] = max(found.get("bare_tokens", 0), replay(generate, some))
                seconds.append(time.perf_counter() - began)
            bare, alone = seconds
            return found | {"bare": bare, "alone": alone, "path": max(Book.slept.values(), default=0.0) + alone}

    module = GRPOLightningModule(
        folder,
        kl=None,
        updates=Updates(micro_batch_tokens=micro_tokens),
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=0.0, fused=True),
    )
    data = RolloutDataModule(
        PromptSource(rows=[{"prompt": prompt} for prompt in prompts()]),
        engine=engine,
        episode=EnvironmentEpisode(
            lambda: ToolEnvironment(Book), max_turns=TURNS, max_tokens=2 * LONGEST, on_parse_error="end"
        ),
        sampling=SamplingParams(max_new_tokens=LONGEST, temperature=TEMPERATURE),
        group_size=GROUP,
        prompts_per_rollout=PROMPTS,
        rollouts_per_epoch=steps,
    )
    Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), Stop()],
    ).fit(module, data)  # fmt: skip


def of_attempts(answers: list[Any]) -> list[list[Any]]:
    """The answers of each attempt, by turns."""
    found: dict[str, list[Any]] = {}
    for answer in answers:
        found.setdefault(answer.request.name.partition(" of ")[2], []).append(answer)
    return list(found.values())


def replay(generate: Any, answers: list[Any]) -> int:
    """Asks what was asked, each as soon as the turn before it is answered; the number of sampled tokens."""
    attempts = of_attempts(answers)

    async def play(turns: list[Any]) -> int:
        return sum([len((await generate(turn.request)).completions[0].token_ids) for turn in turns])

    async def play_all() -> int:
        return sum(await asyncio.gather(*(play(turns) for turns in attempts)))

    return asyncio.run(play_all())


def our_share(folder: str, turns: int, attempts: int) -> dict[str, float]:
    """Milliseconds of CPU time of a turn in conversations of so many: of turns 2 to 9, and of the last 8."""
    from transformers import AutoTokenizer

    from lightrl.environments import EnvironmentEpisode, Task, ToolEnvironment
    from lightrl.records import Completion, CompletionGroup, GenerationRequest, Prompts, SamplingParams

    class Endless(Book):
        """Never says that nothing is left."""

        def reset(self, **row: Any) -> None:
            super().reset(**row)
            self.left = turns

    tokenizer = AutoTokenizer.from_pretrained(folder)
    played = EnvironmentEpisode(lambda: ToolEnvironment(Endless), max_turns=turns)
    played.setup(tokenizer)
    draw = random.Random(0)
    spent: list[list[float]] = [[] for _ in range(turns)]
    began = 0.0

    async def ask(request: GenerationRequest) -> CompletionGroup:
        nonlocal began
        now = time.thread_time()
        turn = int(request.name.split()[1])
        if turn:
            spent[turn].append(now - began)
        call = conversation(draw, 1)[1]["tool_calls"][0]["function"]
        ids = tokenizer.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", add_special_tokens=False)
        completion = Completion(ids, [0.0] * len(ids), "", "stop")
        began = time.thread_time()
        return CompletionGroup(request, [completion], 0)

    async def play() -> None:
        prompt = Prompts([[0]], [""], raw=prompts()[:1])
        sampling = SamplingParams(max_new_tokens=LONGEST)
        for number in range(attempts):
            await played.run(Task(prompt, (number,), 0, sampling, tokenizer, sys.maxsize), ask)

    asyncio.run(play())
    early, late = (1000 * statistics.median(itertools.chain(*some)) for some in (spent[1:9], spent[-8:]))
    return {"turns": turns, "early_ms": early, "late_ms": late}


def worker(name: str, case: str, folder: str, micro: str, steps: str) -> None:
    """A side's process."""
    ticket = Ticket()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ticket.ready = lambda: setattr(Book, "slowest", SLOWEST[case])
    if name == "trl":
        run_trl(folder, int(micro), int(steps), ticket)
    run_lightrl(name, folder, int(micro), int(steps), ticket)


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the table for each side."""
    micro, steps = {"trl": arguments.micro}, 1 if case == "slow" else arguments.steps
    sides = [
        Side(
            name,
            case,
            str(arguments.model),
            arguments.threads,
            micro.get(name, arguments.micro_tokens),
            steps + 2,
            script="environments.py",
        )
        for name in arguments.sides
    ]
    try:
        for side in sides:
            side.receive()  # the first step, in which everything is loaded and tools are quick, is not timed
        for i in range(steps):
            for side in sides if i % 2 else reversed(sides):
                side.step()
    finally:
        for side in sides:
            side.close()
    rows = {name: summary(side) for name, side in zip(arguments.sides, sides, strict=True)}
    if "trl" in rows:
        for row in rows.values():
            row["times"] = rows["trl"]["wall"] / row["wall"]
            row["times_rollout"] = rows["trl"]["rollout"] / row["rollout"]
            row["memory"] = row["peak_mb"] / rows["trl"]["peak_mb"]
    return rows


def summary(side: Side) -> dict[str, Any]:
    """Medians over a side's steps."""
    steps = [{name: value for name, value in report.items() if name != "samples"} for report in side.reports]
    for step in steps:
        if "bare" in step:
            step["to_bound"] = step["rollout"] / max(step["path"], step["bare"])
    return {
        **side.settings,
        **{name: statistics.median(step[name] for step in steps) for name in steps[0]},
        "steps": steps,
    }


def show(cases: dict[str, dict[str, Any]]) -> None:
    """Prints the table."""
    names = (
        "times",
        "wall",
        "cpu",
        "times_rollout",
        "rollout",
        "path",
        "bare",
        "to_bound",
        "turns",
        "calls",
        "tokens",
        "peak_mb",
    )
    print(f"{'case':6} {'side':8} " + " ".join(f"{name:>13}" for name in names))
    for case, rows in cases.items():
        if case == "turns":
            print(f"{rows['turns']} turns: {rows['early_ms']:.2f} ms a turn early, {rows['late_ms']:.2f} ms late")
            continue
        for side, row in rows.items():
            print(f"{case:6} {side:8} " + " ".join(f"{row[n]:13.2f}" if n in row else " " * 13 for n in names))


def main() -> None:
    """Parses the command line, measures, prints a table and writes JSON; cases already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["quick", "slow", "turns"], default=["quick", "slow", "turns"])
    parser.add_argument("--sides", nargs="+", choices=["trl", "lightrl", "vllm"], default=["trl", "lightrl", "vllm"])
    parser.add_argument("--model", type=Path, required=True, help="model directory; created if missing")
    parser.add_argument("--base", choices=["tiny", "smollm2"], default="tiny", help="what a new model starts from")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="environments per prompt")
    parser.add_argument("--warm-start", type=int, help="steps in which a new model learns the format (800, SmolLM2 40)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each side; one in the case slow")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro", type=int, default=16, help="rows of TRL's micro-batch")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="tokens of LightRL's micro-batch")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        steps = arguments.warm_start or (800 if arguments.base == "tiny" else 40)
        build(str(arguments.model), steps, arguments.base)
    os.environ["BENCHMARK_ENVIRONMENTS"] = f"{arguments.prompts}x{arguments.group}"  # for the sides
    cases = {}
    for case in arguments.cases:
        cases[case] = our_share(str(arguments.model), 48, 8) if case == "turns" else measure(case, arguments)
    show(cases)
    if arguments.out:
        import torch
        import transformers
        import trl

        old = json.loads(arguments.out.read_text())["cases"] if arguments.out.exists() else {}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        model = "" if arguments.base == "tiny" else f" {arguments.base} {arguments.prompts}x{arguments.group}"
        new = {f"{case}{model}": rows for case, rows in cases.items()}
        report = {"machine": machine, "versions": versions, "cases": {**old, **new}}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
