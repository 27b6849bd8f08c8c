"""Compares the tokens per second of `TransformersEngine` and transformers' `model.generate` in one process.

    python benchmarks/generation.py --out generation.json

Both use the same weights (Qwen2 architecture, random, float32) and prompts, temperature 1, 8 prompts x 8 completions x
64 tokens, and one thread, and alternate. `generate` gets the input that a trainer passes: each prompt repeated 8 times,
left-padded. The engine also returns log-probs and texts, unlike `generate`. Times are CPU seconds of this process, the
median over the rounds. The JSON also contains wall times.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.records import EngineContext, Prompts, SamplingParams

VOCABULARY, EOS, PROMPTS, GROUP = 64, 1, 8, 8


@dataclass
class Setting:
    """One row of the table."""

    name: str
    hidden: int
    layers: int
    heads: int
    shortest: int
    longest: int
    intermediate: int = 256
    ends: bool = False  # completions end at end-of-sequence, else all have the full length
    new_tokens: int = 64


SETTINGS = [
    Setting("a: 0.6 M, prompts of 8", 128, 4, 4, 8, 8),
    Setting("b: 0.6 M, prompts of 30-160", 128, 4, 4, 30, 160),
    Setting("c: 3 M, prompts of 512", 256, 4, 8, 512, 512, intermediate=768),
    Setting("d: as b, completions end by themselves", 128, 4, 4, 30, 160, ends=True, new_tokens=256),
]


def make_model(setting: Setting, folder: str) -> Qwen2ForCausalLM:
    """Saves a model with random weights and a tokenizer of VOCABULARY words, and returns the model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    return model


def with_generate(model: Qwen2ForCausalLM, token_ids: list[list[int]], setting: Setting) -> int:
    """Samples with transformers' own loop and returns the number of tokens up to each row's end."""
    width = max(map(len, token_ids))
    rows = [row for row in token_ids for _ in range(GROUP)]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=setting.new_tokens,
        eos_token_id=EOS if setting.ends else None,
        pad_token_id=0,
    )[:, width:]
    if not setting.ends:
        return int(out.numel())
    ended = (out == EOS).int().cumsum(1) - (out == EOS).int()  # 0 up to and with the end
    return int((ended == 0).sum())


def with_engine(engine: TransformersEngine, token_ids: list[list[int]], setting: Setting, seed: int) -> int:
    """The same with the engine."""
    prompts = Prompts(token_ids=token_ids, texts=[""] * len(token_ids))
    sampling = SamplingParams(max_new_tokens=setting.new_tokens, ignore_eos=not setting.ends)
    requests = [prompts.request(p, sampling, seed * 1000 + p, GROUP) for p in range(len(token_ids))]
    groups = engine.generate_all(requests)
    return sum(len(c.token_ids) for group in groups for c in group.completions)


def timed(work: Callable[[], int]) -> tuple[int, float, float]:
    """(tokens, CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return tokens, time.process_time() - cpu, time.perf_counter() - wall


def compare(setting: Setting, rounds: int) -> dict[str, object]:
    """Alternates the two and returns medians of tokens per second and their ratio."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(setting.shortest, setting.longest, PROMPTS).long().tolist()
    token_ids = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    times: dict[str, list[tuple[int, float, float]]] = {"generate": [], "engine": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(setting, folder)
        engine = TransformersEngine()
        engine.start(EngineContext(folder))
        for i in range(rounds + 1):
            torch.manual_seed(i)
            one = timed(lambda: with_generate(model, token_ids, setting))
            two = timed(lambda i=i: with_engine(engine, token_ids, setting, i))
            if i:  # the first round warms up
                times["generate"].append(one)
                times["engine"].append(two)
        engine.close()
    result: dict[str, object] = {**asdict(setting), "parameters": sum(p.numel() for p in model.parameters())}
    for name, values in times.items():
        result[f"{name}_tokens_per_cpu_second"] = statistics.median(n / cpu for n, cpu, _ in values)
        result[f"{name}_tokens_per_wall_second"] = statistics.median(n / wall for n, _, wall in values)
    result["ratio"] = statistics.median(
        (b[0] / b[1]) / (a[0] / a[1]) for a, b in zip(times["generate"], times["engine"], strict=True)
    )
    return result


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each setting, after one warm-up round")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = []
    print(f"{'tokens per CPU second':42}{'generate':>10}{'engine':>10}{'ratio':>8}")
    for setting in SETTINGS:
        row = compare(setting, arguments.rounds)
        results.append(row)
        speeds = (row["generate_tokens_per_cpu_second"], row["engine_tokens_per_cpu_second"])
        print(f"{setting.name:42}{speeds[0]:10.0f}{speeds[1]:10.0f}{row['ratio']:8.2f}", flush=True)
    if arguments.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        machine = {"machine": platform.machine(), "python": platform.python_version(), "threads": 1, **versions}
        arguments.out.write_text(json.dumps({**machine, "settings": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
