"""Measures the choices behind the defaults on a CPU: engines, their settings, threads, dtypes, and micro-batch tokens.

    python benchmarks/defaults.py --model smollm2 --out results/defaults.json
    python benchmarks/defaults.py --model gemma3 --only "transformers" "vllm" --out results/defaults.json

Generation: 8 prompts of about 50 tokens x 8 completions of at most 48 tokens at temperature 1, as in a GRPO step. Each
row is an engine with one setting changed, in a separate process: seconds to start it, median seconds and CPU seconds
per call after a first one, tokens per second, and peak memory. Update: one GRPO update on such completions for each
maximum number of tokens per micro-batch, with a shared prefix (groups of 8) and without (groups of 1, as in PPO).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 48
THREADS = os.cpu_count() or 1

ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, bfloat16": {"dtype": "bfloat16"},
    "transformers, one thread": {"threads": 1},
    "transformers, no CPU decoder": {"cpu_kernels": False},
    "vllm": {},
    "vllm, bfloat16": {"dtype": "bfloat16"},
    "vllm, one thread": {"threads": 1},
    "vllm, compiled": {"engine_args": {"enforce_eager": False}},
    "vllm, bfloat16, compiled": {"dtype": "bfloat16", "engine_args": {"enforce_eager": False}},
    "vllm, no chunked prefill": {"engine_args": {"enable_chunked_prefill": False}},
    "vllm, blocks of 128 tokens": {"engine_args": {"block_size": 128}},
    "vllm, KV cache of 4 GiB": {"engine_args": {"kv_cache_memory_bytes": 4 << 30}},
    "vllm, threads not bound": {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}},
}
UPDATES = [1024, 2048, 4096, 16384]


def generate(path: str, name: str, rounds: int) -> dict[str, Any]:
    """Times one engine in this process."""
    from transformers import AutoTokenizer
    from vs_trl import prompts_of

    from lightrl.engines import TransformersEngine, VLLMEngine
    from lightrl.records import EngineContext, GenerationRequest, SamplingParams

    settings = {key: value for key, value in ENGINES[name].items() if key not in ("threads", "environment")}
    engine: Any = (VLLMEngine if name.startswith("vllm") else TransformersEngine)(**settings)
    begin = time.perf_counter()
    engine.start(EngineContext(path, max_new_tokens=NEW_TOKENS))
    started = time.perf_counter() - begin
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    asked = [
        GenerationRequest(tokenizer(text)["input_ids"], sampling, i, GROUP)
        for i, text in enumerate(prompts_of(path, 50))
    ]
    calls = []
    for _ in range(rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        groups = list(engine.generate_all(asked))
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        calls.append((time.perf_counter() - wall, time.process_time() - cpu, tokens))
    wall, cpu, tokens = (statistics.median(column) for column in zip(*calls[1:], strict=True))
    engine.close()
    return {
        "start_s": round(started, 1), "first_s": round(calls[0][0], 2), "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2), "tokens_per_s": round(tokens / wall, 1),
    }  # fmt: skip


def update(path: str, name: str, rounds: int) -> dict[str, Any]:
    """Times an update with random token IDs in this process."""
    import torch
    from cpu_kernels import rows_of, timed
    from cpu_kernels import update as step

    from lightrl.models.policy import PolicyModel
    from lightrl.models.spec import ModelSpec

    budget, copies = map(int, name.split("/"))
    policy = PolicyModel.from_spec(ModelSpec(path), trainable=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-9, fused=True)
    draw = torch.Generator().manual_seed(0)

    class Some:
        def __init__(self, length: int) -> None:
            self.token_ids = torch.randint(1000, 40000, (length,), generator=draw).tolist()

    class Group:
        def __init__(self) -> None:
            self.request, self.completions = Some(50), [Some(24) for _ in range(copies)]

    rows = rows_of([Group() for _ in range(PROMPTS * GROUP // copies)])
    import cpu_kernels

    cpu_kernels.BUDGET = budget
    step(policy, optimizer, rows)
    times = [timed(lambda: step(policy, optimizer, rows)) for _ in range(rounds)]
    return {
        "wall_s": round(statistics.median(w for _, w in times), 2),
        "cpu_s": round(statistics.median(c for c, _ in times), 2),
    }


def main() -> None:
    """Parses the command line, runs each row in its own process, and writes JSON; other rows in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "gemma3"], default="smollm2")
    parser.add_argument("--only", nargs="+", choices=[*ENGINES, "updates"], default=[*ENGINES, "updates"])
    parser.add_argument("--threads", type=int, default=THREADS, help="of the updates, and of rows without their own")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    from lightrl.models.packaged import packaged_model

    path = packaged_model(given.model)
    if given.worker:
        kind, name = given.worker
        found = (generate if kind == "generation" else update)(path, name, given.rounds)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("RESULT " + json.dumps({**found, "peak_gb": round(peak, 2)}), flush=True)
        os._exit(0)
    rows = [("generation", name) for name in given.only if name != "updates"]
    if "updates" in given.only:
        rows += [("update", f"{budget}/{copies}") for copies in (GROUP, 1) for budget in UPDATES]
    for kind, name in rows:
        chosen = ENGINES.get(name, {})
        threads = str(chosen.get("threads", given.threads))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, **chosen.get("environment", {})}
        command = [sys.executable, __file__, "--model", given.model, "--rounds", str(given.rounds)]
        done = subprocess.run(
            [*command, "--worker", kind, name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result = json.loads(results[0].removeprefix("RESULT ")) if results else {"failed": done.stdout[-300:]}
        print(kind, name, result, flush=True)
        if given.out:
            whole = json.loads(given.out.read_text()) if given.out.exists() else {}
            whole.setdefault(given.model, {}).setdefault(kind, {})[name] = result
            given.out.write_text(json.dumps({"cores": THREADS, **whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
