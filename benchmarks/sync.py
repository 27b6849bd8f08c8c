"""Compares weight sync into vLLM with a memory copy of the same bytes, alternating in one process tree.

    python benchmarks/sync.py [--rounds 15] [--out sync.json] [--sizes 0.6M 100M]

Each case pushes every parameter of a randomly initialized Qwen2 into an engine, in this process or in separate
processes, including the cache reset, and copies the same bytes with `Tensor.copy_` into memory that was touched before.
Values are medians over the rounds. The ratio is the time of the copy divided by the time of the sync; 1.0 is the speed
of memcpy. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lightrl.engines import EngineContext, VLLMEngine
from lightrl.records import Prompts, SamplingParams

SIZES: dict[str, dict[str, int]] = {
    "0.6M": {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "100M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12},
}  # fmt: skip


def build(folder: Path, size: str, tied: bool, dtype: torch.dtype) -> PreTrainedModel:
    """The trainer's model; the folder gets its configuration alone, for an engine that starts with dummy weights."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], max_position_embeddings=512, tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config).to(dtype)
    config.save_pretrained(folder)
    return model


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def gap(engine: VLLMEngine, model: PreTrainedModel) -> float:
    """Largest |engine - trainer| log-prob over 30 tokens: the sync that was timed did its work."""
    ids = list(range(3, 33))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float((torch.tensor(engine.logprobs([ids])[0]) - expected).abs().max())


def rate(engine: VLLMEngine) -> float:
    """Generated tokens per second, 64 sequences of 4 tokens."""
    prompts = Prompts([[3 + i % 50] * 4 for i in range(64)], [""] * 64)
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)

    def run() -> None:
        list(engine.generate_all(prompts.request(i, sampling, i, 1) for i in range(64)))

    run()
    return 64 * 4 / seconds(run)


def measure(size: str, tied: bool, in_process: bool, dtype: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder), size, tied, getattr(torch, dtype))
        engine = VLLMEngine(in_process=in_process, engine_args={"skip_tokenizer_init": True})
        engine.start(EngineContext(folder, dtype=dtype, max_prompt_tokens=64, max_new_tokens=64, random_init=True))
        try:
            sources = [parameter.detach() for parameter in model.parameters()]
            targets = [torch.zeros_like(source) for source in sources]

            def copy() -> None:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)

            def sync() -> None:
                engine.load_weights(model.named_parameters(), policy_version=0)

            first = seconds(sync)
            pairs = [(seconds(copy), seconds(sync)) for _ in range(rounds)]
            copied, synced = (statistics.median(column) for column in zip(*pairs, strict=True))
            nbytes = sum(source.nbytes for source in sources)
            return {
                "parameters": size, "head": "tied" if tied else "untied", "dtype": dtype,
                "engine": "in process" if in_process else "own process", "MB": round(nbytes / 1e6, 1),
                "first sync ms": round(first * 1e3, 1), "sync ms": round(synced * 1e3, 2),
                "memcpy ms": round(copied * 1e3, 2), "GB/s": round(nbytes / synced / 1e9, 2),
                "ratio": round(copied / synced, 2), "gap": float(f"{gap(engine, model):.1e}"),
                "tokens/s": round(rate(engine)),
            }  # fmt: skip
        finally:
            engine.close()


def main() -> None:
    """Parses the command line, measures, prints one table and writes JSON; rows already in the file are kept."""
    import transformers
    import vllm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed pairs of copy and sync per case")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="model sizes")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="dtypes of trainer and engine")
    parser.add_argument("--out", type=Path, help="where to write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            for in_process in (True, False):
                for tied in (True, False):
                    rows.append(measure(size, tied, in_process, dtype, arguments.rounds))
                    print(rows[-1], file=sys.stderr, flush=True)
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for line in [{key: key for key in rows[0]}, *rows]:
        print("  ".join(str(line[key]).rjust(width) for key, width in widths.items()))
    if arguments.out:
        versions = {"torch": torch.__version__, "vllm": vllm.__version__, "transformers": transformers.__version__}
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        old = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
        keys = ("parameters", "dtype", "engine", "head")
        merged = {tuple(row[key] for key in keys): row for row in [*old, *rows]}
        report = {"machine": machine, "versions": versions, "rounds": arguments.rounds, "rows": list(merged.values())}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
