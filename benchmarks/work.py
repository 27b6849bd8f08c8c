"""Counts the work of a GRPO update that does not depend on the machine: FLOPs, tokens, bytes, and host reads.

    python benchmarks/work.py --out results/work.json --picture ../docs/images/work.png
    python benchmarks/work.py --sample --lengths results/lengths.json    (samples new lengths)

The lengths come from SmolLM2-135M-Instruct on two tasks of reasoning-gym: 8 prompts x 8 completions, sampled at
temperature 1. Token IDs are random, so completions share nothing by chance; real completions share more. Each row is a
layout of the same model with the same loss. `trl` is TRL's `GRPOTrainer` (extra `bench`), which pads all sequences of
a rollout to the longest prompt and the longest completion. All blocks are equal, so counts are linear in their number:
the script runs the model with one and with two blocks and extrapolates (`--whole` runs all blocks).

The ideal computes each token once if some trained token depends on it, the causal half of attention, and each logit
once: 6 FLOPs per weight and token, 12 per element of a query and visible key. `FlopCounterMode` counts the FLOPs;
formulas that it lacks are added here, and an unknown product raises an error. Attention counts as computed, including
masked pairs. Operators exclude views: an upper bound of kernel launches. A host read copies a value that depends on
the batch or the weights to Python, which synchronizes a GPU. Peak bytes are those of all tensors alive at one time,
without weights and batch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakTensorKeyDictionary

from lightrl.compat.transformers_models import transformer_blocks
from lightrl.models.packing.micro_batches import micro_batches
from lightrl.models.packing.streams import make_stream
from lightrl.models.policy import PolicyModel
from lightrl.records import RowBatch, pad_rows

RESULTS = Path(__file__).resolve().parent / "results"
LAYOUTS = ("padded", "packed", "shared_prefix")
PROMPTS, GROUP = 8, 8
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, "max_new_tokens": 32},
    "string_manipulation": {"settings": {}, "max_new_tokens": 64},
}


# ---- lengths -----------------------------------------------------------------------------------------------------


def sample_lengths(path: str) -> dict[str, Any]:
    """Tokens of prompts and completions of each task, sampled by `TransformersEngine`."""
    from transformers import AutoTokenizer

    from lightrl.data import ReasoningGymRows
    from lightrl.engines import TransformersEngine
    from lightrl.records import EngineContext, GenerationRequest, SamplingParams

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    engine = TransformersEngine()
    engine.start(EngineContext(path, max_new_tokens=64))
    found = {}
    for name, task in TASKS.items():
        rows = list(ReasoningGymRows({name: task["settings"]}, size=PROMPTS)())
        prompts = []
        for row in rows:
            messages = [{"role": "user", "content": row["prompt"]}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        sampling = SamplingParams(max_new_tokens=task["max_new_tokens"])
        asked = [GenerationRequest(ids, sampling, i, GROUP) for i, ids in enumerate(prompts)]
        groups = sorted(engine.generate_all(asked), key=lambda group: group.request.seed)
        same = (len(set(column)) == 1 for column in zip(*prompts, strict=False))
        found[name] = {
            **task,
            "shared": next((i for i, each in enumerate(same) if not each), min(map(len, prompts))),
            "prompts": [len(ids) for ids in prompts],
            "completions": [[len(c.token_ids) for c in group.completions] for group in groups],
        }
    return found


def rows_of(lengths: dict[str, Any], vocabulary: int) -> tuple[Tensor, ...]:
    """(B, T) token IDs, attention mask, response mask, and (B,) group IDs; only prompts and their start are shared."""
    draw = random.Random(0)
    start = [draw.randrange(vocabulary) for _ in range(lengths["shared"])]
    rows = []
    for group, (prompt, completions) in enumerate(zip(lengths["prompts"], lengths["completions"], strict=True)):
        rest = [group, *(draw.randrange(vocabulary) for _ in range(prompt - len(start) - 1))]
        for number, length in enumerate(completions):
            rows.append((group, start + rest, [number, *(draw.randrange(vocabulary) for _ in range(length - 1))]))
    ids = pad_rows([prompt + own for _, prompt, own in rows], 0, torch.long)
    slots = torch.arange(ids.shape[1])
    starts = torch.tensor([len(prompt) for _, prompt, _ in rows])[:, None]
    ends = starts + torch.tensor([len(own) for _, _, own in rows])[:, None]
    return ids, slots < ends, (slots >= starts) & (slots < ends), torch.tensor([group for group, _, _ in rows])


# ---- the ideal ---------------------------------------------------------------------------------------------------


def ideal(lengths: dict[str, Any], lm: Any) -> dict[str, float]:
    """Tokens, trained tokens, and FLOPs of forward and backward, in closed form.

    The last token of a completion is a target only, so that a completion of n tokens runs n - 1.
    """
    config = lm.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stretches = [(0, lengths["shared"])]  # (tokens before, tokens)
    trained = 0
    for prompt, completions in zip(lengths["prompts"], lengths["completions"], strict=True):
        stretches.append((lengths["shared"], prompt - lengths["shared"]))
        stretches += [(prompt, length - 1) for length in completions]
        trained += sum(completions)
    tokens = sum(length for _, length in stretches)
    pairs = sum(before * length + length * (length + 1) // 2 for before, length in stretches)
    linear = sum(m.weight.numel() for block in transformer_blocks(lm) for m in block.modules() if type(m) is nn.Linear)
    flops = {
        "linear": 6.0 * linear * tokens,
        "attention": 12.0 * config.num_attention_heads * width * config.num_hidden_layers * pairs,
        "head": 6.0 * lm.get_output_embeddings().weight.numel() * trained,
    }
    return {"tokens": tokens, "trained": trained, "flops": sum(flops.values()), **flops}


# ---- counters ----------------------------------------------------------------------------------------------------


def _attention_forward(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _product_of(*factors: int) -> Callable[..., int]:
    """FLOPs of an operator whose arguments with these numbers are (..., n, k) and (..., k, m), m = 1 for a vector."""
    first, second = factors

    def flops(*args: Any, out_shape: Any = None, **_: Any) -> int:
        left, right = args[first], args[second]
        return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)

    return flops


_ATEN = torch.ops.aten
FORMULAS: dict[Any, Any] = {  # what `FlopCounterMode` has no formula for
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **dict.fromkeys((_ATEN.mv, _ATEN.dot, _ATEN.vdot), _product_of(0, 1)),
    **dict.fromkeys((_ATEN.addmm_, _ATEN.baddbmm_, _ATEN.addmv, _ATEN.addmv_), _product_of(1, 2)),
}
_PRODUCT = re.compile(r"mm|bmm|mv|v?dot|ger|addr|matmul|linear|einsum|conv|attention|gru|lstm|rnn")
_SYNCHRONIZES = {
    _ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.is_nonzero, _ATEN.equal, _ATEN.masked_select, _ATEN._unique2,
    _ATEN.unique_dim, _ATEN.unique_consecutive,
}  # fmt: skip


class Counted(TorchDispatchMode):
    """Counts operators, host reads, and live bytes.

    Args:
        device: Tensors that a GPU run keeps on the device, as it does everything computed from them.
    """

    def __init__(self, device: list[Tensor]) -> None:
        super().__init__()
        self.operators = 0
        self.uncounted = set[str]()
        self.reads: Counter[str] = Counter()
        self.live = self.peak = 0
        self._device: Any = WeakTensorKeyDictionary()
        self._storages = set[int]()
        for tensor in device:
            self._device[tensor] = True
            self._storages.add(tensor.untyped_storage()._cdata)

    def on_device(self, tensor: Any) -> bool:
        """Whether a tensor is on the device or depends on one that is."""
        return isinstance(tensor, Tensor) and tensor in self._device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(self.on_device(x) for x in inputs):
            return out
        indexed = func.overloadpacket is _ATEN.index and any(x.dtype == torch.bool for x in inputs[1:])
        if func.overloadpacket in _SYNCHRONIZES or indexed:
            self.reads[str(func.overloadpacket)] += 1
        packet = func.overloadpacket
        if packet not in FORMULAS and packet not in flop_registry and _PRODUCT.search(packet.__name__):
            self.uncounted.add(packet.__name__)
        self.operators += not func.is_view and func.overloadpacket is not _ATEN.detach
        for tensor in made:
            self._device[tensor] = True
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                self._storages.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.live -= nbytes


class HostReads(TorchFunctionMode):
    """Counts reads that a CPU does not dispatch: `tolist`, `numpy`, and copies to the host."""

    NAMES = ("tolist", "numpy", "cpu")

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted
        self.methods = {getattr(Tensor, name): name for name in self.NAMES}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.methods.get(func)
        to_host = func is Tensor.to and "cpu" in [str(x) for x in (*args[1:], *(kwargs or {}).values())]
        if (name or to_host) and self.counted.on_device(args[0]):
            self.counted.reads[name or "to"] += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], Any], device: list[Tensor]) -> dict[str, Any]:
    """FLOPs, operators, host reads, and peak bytes of a forward and backward pass.

    Raises:
        ValueError: An operator multiplies matrices or vectors and has no FLOP formula.
    """
    flops = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counted = Counted(device)
    with flops, HostReads(counted), counted:
        run()
    if counted.uncounted:
        raise ValueError(f"{sorted(counted.uncounted)}: operators without a FLOP formula. Add them to FORMULAS.")
    total = flops.get_flop_counts().get("Global", {})
    attention = sum(n for name, n in total.items() if "attention" in str(name))
    return {
        "flops": flops.get_total_flops(),
        "attention_kernels": attention,
        "operators": counted.operators,
        "host_reads": dict(counted.reads),
        "peak_bytes": counted.peak,
    }


# ---- updates -----------------------------------------------------------------------------------------------------


ROWS = ("token_ids", "attention_mask", "response_mask")


def update(policy: PolicyModel, rows: tuple[Tensor, ...], host: Any, budget: int) -> Callable[[], int]:
    """GRPO's loss on all micro-batches of a rollout; returns their number when called."""

    def run() -> int:
        ids, attention, response, groups = rows
        parts = micro_batches(*host[:3], budget, layout=policy.stream.layout)
        for some in parts:
            width = int(host[1][some].sum(1).max())
            own = [x[some, :width] for x in (ids, attention, response)]
            batch = RowBatch(**dict(zip(ROWS, own, strict=True)), group_ids=groups[some])
            given = dict(zip(ROWS, (x[some, :width] for x in host[:3]), strict=True), group_ids=host[3][some])
            batch.host = {name: (getattr(batch, name), copy) for name, copy in given.items()}
            out = policy(batch, entropy=True)
            ratio = (out.logprobs - out.logprobs.detach()).exp()
            (-(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * own[2]).sum() / 64.0).backward()
        return len(parts)

    return run


def trl_update(
    path: str, model: Any, lengths: dict[str, Any], micro: int, parts: int
) -> tuple[Any, Callable[[], int], list[Tensor]]:
    """TRL's model, its loss and backward on the first micro-batches of a rollout, and the batch."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(path)
    ids, attention, response, _ = rows_of(lengths, model.config.vocab_size)
    count = len(ids)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro,
        num_generations=GROUP, beta=0.0, loss_type="grpo", bf16=False, gradient_checkpointing=False, use_cpu=True,
        max_steps=1, report_to="none", save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["x"] * count})
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, rows,
                          processing_class=tokenizer)  # fmt: skip
    prompt = (attention & ~response).sum(1)
    left, right = int(prompt.max()), int(response.sum(1).max())
    widths = {"prompt_ids": left, "prompt_mask": left, "completion_ids": right, "completion_mask": right}
    batch = {name: torch.zeros(count, width, dtype=torch.long) for name, width in widths.items()}
    batch |= {"advantages": torch.linspace(-1, 1, count), "num_items_in_batch": response.sum()}
    for i in range(count):
        begin, own = int(prompt[i]), int(response[i].sum())
        batch["prompt_ids"][i, left - begin :], batch["prompt_mask"][i, left - begin :] = ids[i, :begin], 1
        batch["completion_ids"][i, :own], batch["completion_mask"][i, :own] = ids[i, begin : begin + own], 1

    def run() -> int:
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = count // micro  # set by `training_step`
        for start in range(0, parts * micro, micro):
            part = {name: x[start : start + micro] if x.ndim else x for name, x in batch.items()}
            trainer.compute_loss(trainer.model, part).backward()
        return parts

    return trainer.model, run, list(batch.values())


def measure(path: str, lengths: dict[str, Any], layout: str, budget: int, whole: bool = False) -> dict[str, Any]:
    """The row of one layout, or of TRL ("trl"), and the ideal."""
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.spec import ModelSpec

    lm = load_causal_lm(ModelSpec(path, dtype="float32"), trainable=True)
    blocks = lm.config.num_hidden_layers
    rows = rows_of(lengths, lm.config.vocab_size)
    best = ideal(lengths, lm)
    if layout == "trl":
        tokens = (max(lengths["prompts"]) + max(map(max, lengths["completions"]))) * len(rows[0])
    else:
        tokens = computed(rows, layout, budget)
    del lm

    def counted(number: int) -> dict[str, Any]:
        if layout != "trl":
            return count_blocks(path, lengths, layout, budget, number)
        # TRL's micro-batches have one shape; the second one is the first with gradients, and has the peak.
        one, two = (count_blocks(path, lengths, layout, budget, number, parts) for parts in (1, 2))
        all_parts = len(rows[0]) // GROUP
        return {**{name: extrapolate(all_parts, one[name], two[name]) for name in one}, "peak_bytes": two["peak_bytes"]}

    counts = [counted(n) for n in ([blocks] if whole else [1, 2])]
    row = counts[0] if whole else {name: extrapolate(blocks, *(each[name] for each in counts)) for name in counts[0]}
    return {"ideal": best, layout: {**row, "tokens": tokens}}


def extrapolate(blocks: int, one: Any, two: Any) -> Any:
    """A count for `blocks` blocks, or micro-batches, from those for one and two."""
    if isinstance(one, dict):
        return {name: extrapolate(blocks, one.get(name, 0), two.get(name, 0)) for name in {**one, **two}}
    return one + (blocks - 1) * (two - one)


def count_blocks(
    path: str, lengths: dict[str, Any], layout: str, budget: int, blocks: int, parts: int = 0, **spec: Any
) -> dict[str, Any]:
    """Counts of an update of the model cut to its first `blocks` blocks."""
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.spec import ModelSpec

    lm: Any = load_causal_lm(ModelSpec(path, dtype="float32", **spec), trainable=True)
    lm.model.layers = lm.model.layers[:blocks]
    lm.config.num_hidden_layers = blocks
    model: Any
    if layout == "trl":
        model, run, given = trl_update(path, lm, lengths, GROUP, parts)
    else:
        model = PolicyModel(lm, layout=layout)  # type: ignore[arg-type]
        rows = rows_of(lengths, lm.config.vocab_size)
        # What the engine sampled is known on the host; planning reads nothing from the device.
        run, given = update(model, rows, tuple(x.clone() for x in rows), budget), list(rows)
        model(RowBatch(**dict(zip(ROWS, (x[:2] for x in rows[:3]), strict=True))))  # makes the checks of a first call
    number: list[int] = []
    row = count(lambda: number.append(run()), [*given, *model.parameters()])
    return {**row, "micro_batches": number[0]}


def computed(rows: tuple[Tensor, ...], layout: str, budget: int) -> int:
    """Tokens that go through the model in one of our layouts."""
    total = 0
    for some in micro_batches(*rows[:3], budget, layout=layout):  # type: ignore[arg-type]
        part = tuple(x[some] for x in rows[:3])
        if layout == "padded":
            total += len(some) * int(part[1].sum(1).max())
        else:
            total += make_stream(*part, share=layout == "shared_prefix").num_tokens
    return total


def pushed_bytes(path: str) -> dict[str, int]:
    """Bytes of a weight sync in float32: all weights, or the adapter."""
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.lora import named_adapter_weights
    from lightrl.models.policy import named_hf_weights
    from lightrl.models.spec import LoraSpec, ModelSpec

    found = {}
    for lora in (None, LoraSpec()):
        lm = load_causal_lm(ModelSpec(path, dtype="float32", lora=lora), trainable=True)
        if lora is None:
            found["full"] = sum(x.nbytes for _, x in named_hf_weights(SimpleNamespace(lm=lm)))
        else:
            policy = SimpleNamespace(lm=lm)
            found["LoRA, adapter"] = sum(x.nbytes for _, x in named_adapter_weights(policy))
    return found


# ---- tables ------------------------------------------------------------------------------------------------------

TITLES = {"padded": "padded", "packed": "packed", "shared_prefix": "shared prefix", "trl": "TRL 1.16"}


def ratios(lengths: dict[str, Any], table: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per layout: relative FLOPs, fractions of padding and of saved tokens, operators, and host reads."""
    best, real = table["ideal"], sum(lengths["prompts"]) * GROUP + sum(map(sum, lengths["completions"]))
    found = {}
    for layout in (name for name in TITLES if name in table):
        row = table[layout]
        found[layout] = {
            "flops_per_trained_token": row["flops"] / best["trained"],
            "to_ideal": row["flops"] / best["flops"],
            "to_padded": row["flops"] / table["padded"]["flops"],
            "padding": max(0.0, 1 - real / row["tokens"]),
            "saved": max(0.0, 1 - row["tokens"] / real),
            "operators_per_micro_batch": row["operators"] / row["micro_batches"],
            "reads_per_micro_batch": sum(row["host_reads"].values()) / row["micro_batches"],
        }
    return found


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/work.md."""
    lines = [
        "| Task | Layout | Tokens | Padding | Saved | MFLOPs per trained token | To the ideal | Peak GB | "
        "Micro-batches | Operators | Host reads |",
        "|---" * 11 + "|",
    ]
    for task, found in result["tasks"].items():
        for layout, ratio in found["ratios"].items():
            row = found["table"][layout]
            lines.append(
                f"| {task} | {TITLES[layout]} | {row['tokens']:,} | {ratio['padding']:.0%} | {ratio['saved']:.0%} | "
                f"{ratio['flops_per_trained_token'] / 1e6:,.0f} | {ratio['to_ideal']:.2f} | "
                f"{row['peak_bytes'] / 1e9:.1f} | {row['micro_batches']} | "
                f"{ratio['operators_per_micro_batch']:,.0f} | {ratio['reads_per_micro_batch']:.0f} |"
            )
    lines += ["", "| Weight sync | MB | Of all weights |", "|---|---|---|"]
    pushed = result["sync_bytes"]
    lines += [f"| {name} | {n / 1e6:,.1f} | {n / pushed['full']:.0%} |" for name, n in pushed.items()]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path, dark: bool = False) -> None:
    """Bars of FLOPs relative to the ideal, one panel per task."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    accent, grey, ink = ("#60a5fa", "#6b7280", "#e5e7eb") if dark else ("#2563eb", "#9ca3af", "#111827")
    figure = Figure(figsize=(8, 2.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (task, found) in zip(figure.subplots(1, len(result["tasks"])), result["tasks"].items(), strict=True):
        names = list(found["ratios"])[::-1]
        values = [found["ratios"][name]["to_ideal"] for name in names]
        colors = [accent if name == "shared_prefix" else grey for name in names]
        bars = panel.barh([TITLES[name] for name in names], values, color=colors)
        panel.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8, color=ink)
        panel.axvline(1.0, color="#ea580c", linewidth=0.9, linestyle="--")
        panel.set_title(task, fontsize=10, color=ink)
        panel.margins(x=0.15)
        panel.set_facecolor("none")
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["bottom", "left"]].set_color(ink)
        panel.tick_params(labelsize=8, colors=ink)
    figure.supxlabel("FLOPs of an update, relative to the shared-prefix ideal", fontsize=9, color=ink)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True)


def main() -> None:
    """Parses arguments, counts, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Model directory or model ID; defaults to SmolLM2-135M-Instruct")
    parser.add_argument("--lengths", type=Path, default=RESULTS / "lengths.json")
    parser.add_argument("--sample", action="store_true", help="sample new lengths and write them")
    parser.add_argument("--layouts", nargs="*", choices=TITLES, default=list(TITLES))
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--whole", action="store_true", help="run all blocks instead of extrapolating from two")
    parser.add_argument("--out", type=Path, help="JSON file; tasks and layouts already in it are kept")
    parser.add_argument("--picture", type=Path, help="PNG file")
    args = parser.parse_args()
    from lightrl.models.packaged import packaged_model

    path = args.model or packaged_model("smollm2")
    if args.sample:
        args.lengths.write_text(json.dumps(sample_lengths(path)) + "\n")
    lengths = json.loads(args.lengths.read_text())
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"tasks": {}}
    result |= {"model": Path(path).name, "torch": torch.__version__, "transformers": transformers.__version__}
    result["micro_batch_tokens"] = args.micro_batch_tokens
    result["sync_bytes"] = pushed_bytes(path)
    for task in args.tasks:
        known = result["tasks"].setdefault(task, {"table": {}})["table"]
        for layout in args.layouts:
            known |= measure(path, lengths[task], layout, args.micro_batch_tokens, args.whole)
            if "padded" in known:
                result["tasks"][task]["ratios"] = ratios(lengths[task], known)
            print(task, layout, known[layout], flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    if args.picture:
        draw(result, args.picture)
        draw(result, args.picture.with_stem(f"{args.picture.stem}-dark"), dark=True)


if __name__ == "__main__":
    main()
