"""`lightrl from-trl`: converts configurations of TRL's GRPO and RLOO scripts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml

from lightrl.checkpoints.files import atomic_write
from lightrl.checkpoints.redaction import plain_secrets, redact
from lightrl.cli.config_files import read_yaml

Options = dict[str, Any]
"""Options that are not converted yet; each conversion step removes its own."""

DIRECT: dict[str, tuple[str, Any]] = {
    "seed": ("seed_everything", 42),
    "output_dir": ("run_dir", "outputs/trl"),
    "model_name_or_path": ("model.actor.path", None),
    "dtype": ("model.actor.dtype", None),
    "model_init_kwargs": ("model.actor.kwargs", None),
    "model_revision": ("model.actor.kwargs.revision", None),
    "trust_remote_code": ("model.actor.kwargs.trust_remote_code", None),
    "gradient_checkpointing": ("model.actor.gradient_checkpointing", True),
    "mask_truncated_completions": ("model.shaping.mask_truncated", False),
    "top_entropy_quantile": ("model.shaping.top_entropy_fraction", 1.0),
    "entropy_coef": ("model.extra_losses.entropy_coef", 0.0),
    "max_grad_norm": ("model.updates.max_grad_norm", 1.0),
    "router_aux_loss_coef": ("model.extra_losses.aux_loss_coef", 0.0),
    "num_iterations": ("model.ppo_epochs", 1),
    "learning_rate": ("model.optimizer.init_args.lr", 1e-6),
    "adam_epsilon": ("model.optimizer.init_args.eps", 1e-8),
    "weight_decay": ("model.optimizer.init_args.weight_decay", 0.0),
    "dataset_name": ("data.prompts.path", None),
    "dataset_config": ("data.prompts.name", None),
    "dataset_train_split": ("data.prompts.split", "train"),
    "dataset_streaming": ("data.prompts.streaming", False),
    "shuffle_dataset": ("data.prompts.shuffle", True),
    "chat_template_kwargs": ("data.prompts.template_kwargs", None),
    "num_generations": ("data.group_size", 8),
    "max_completion_length": ("data.sampling.max_new_tokens", 512),
    "temperature": ("data.sampling.temperature", 1.0),
    "top_p": ("data.sampling.top_p", None),
    "top_k": ("data.sampling.top_k", None),
    "min_p": ("data.sampling.min_p", None),
    "repetition_penalty": ("data.sampling.repetition_penalty", None),
    "vllm_structured_outputs_regex": ("data.sampling.regex", None),
    "generation_kwargs": ("data.sampling.extra", None),
    "lora_r": ("model.actor.lora.r", 16),
    "lora_alpha": ("model.actor.lora.alpha", 32),
    "lora_target_modules": ("model.actor.lora.target_modules", "all-linear"),
    "load_in_4bit": ("model.actor.lora.quantize_4bit", False),
    "vllm_gpu_memory_utilization": ("data.engine.gpu_memory_utilization", 0.3),
    "vllm_tensor_parallel_size": ("data.engine.tensor_parallel_size", 1),
    "vllm_max_model_length": ("data.engine.max_model_len", None),
}
"""Option -> (our key without the module's `init_args`, TRL's default, which is written explicitly unless None)."""
REWARDS: dict[str, Any] = {
    "accuracy_reward": {"class_path": "MathVerify", "init_args": {"column": "solution"}},
    "think_format_reward": {
        "class_path": "RegexFormat",
        "init_args": {"pattern": r"(?s)^<think>(?!.*<think>)(.*?)</think>.*$"},
    },
    "get_soft_overlong_punishment": {
        "class_path": "SoftOverlong",
        "init_args": {"max_tokens": 1280, "buffer_tokens": 256},
    },
}
AGGREGATIONS = {"dapo": "TokenMean", "bnpo": "TokenMean", "grpo": "SequenceMean", "dr_grpo": "ConstantLength"}
"""`loss_type` -> aggregation."""
SCHEDULES = {"constant_with_warmup": "constant", **{name: name for name in ("linear", "cosine", "constant")}}


def from_trl(
    script: str, output: str = "config.yaml", algorithm: Literal["grpo", "rloo"] = "grpo", devices: int = 1
) -> None:
    """Convert a TRL configuration (`trl grpo --config ...`) to a configuration for `lightrl fit`.

    Options that are not converted are listed in the output file and in the terminal. TRL's defaults are written
    explicitly if they differ from LightRL's.

    Args:
        script: YAML file with arguments of TRL 1.16: GRPOConfig or RLOOConfig, ModelConfig, and ScriptArguments.
        output: File to write. Must not exist.
        algorithm: TRL script that the configuration is for.
        devices: Number of processes that the script runs on. Multiplies the batch sizes per device.

    Raises:
        ValueError: `script` is not a YAML file of arguments, the batch sizes are inconsistent, or `output` exists.
    """
    if os.path.lexists(output):
        raise ValueError(f"output={output}: exists. Use another path.")
    options = read_yaml(Path(script), "script")
    if not isinstance(options, dict):
        raise ValueError(
            f"script={script}: has no arguments. Pass a YAML file with the arguments of the TRL script, not the script."
        )
    converted, notes = convert_trl(options, algorithm, devices)
    secrets = dict.fromkeys(path for path, _ in plain_secrets(converted))
    notes += [f"{path}: contains a secret, which was not copied. Replace *** with ${{env:NAME}}." for path in secrets]
    header = [f"# Converted from {Path(script).name} (TRL, {algorithm}).", *(f"#   {note}" for note in notes)]
    with atomic_write(Path(output), "w") as file:
        file.write("\n".join(header) + "\n" + yaml.safe_dump(redact(converted), sort_keys=False))
    print(f"Wrote {output}." + "".join(f"\n  {note}" for note in notes))
    print(f"  lightrl fit --config {output}")


def convert_trl(
    options: Options, algorithm: Literal["grpo", "rloo"] = "grpo", devices: int = 1
) -> tuple[Options, list[str]]:
    """Converts options to a configuration as plain data, and a note on each setting to check.

    Raises:
        ValueError: The batch sizes are inconsistent, or the model or the dataset is missing.
    """
    left = {name: _number(value) for name, value in options.items()}
    for name in ("model_name_or_path", "dataset_name"):
        if left.get(name) is None:
            raise ValueError(f"{name}=None: is required. Add it to the script's configuration.")
    found: Options = {}
    for name, (place, default) in DIRECT.items():
        given = left.pop(name, None)
        value = default if given is None else given
        if value is not None:
            *above, last = place.split(".")
            inner = found
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = value
    model, data = found["model"], found["data"]
    notes = [
        "prompts.chat_template: set to false, because TRL applies the chat template only to conversations, not to "
        "strings. Remove it to render a string as a user message."
    ]
    batch, minibatch = _sizes(left, data["group_size"], devices)
    updates = batch // minibatch * model["ppo_epochs"]
    model["updates"]["minibatch_size"] = None if minibatch == batch else minibatch
    if not left.pop("use_peft", False):
        del model["actor"]["lora"]
    model["optimizer"]["class_path"] = "torch.optim.AdamW"
    model["optimizer"]["init_args"]["betas"] = [left.pop("adam_beta1", 0.9), left.pop("adam_beta2", 0.999)]
    kind, ratio = left.pop("lr_scheduler_type", "linear"), left.pop("warmup_ratio", 0.0)
    if kind not in SCHEDULES:
        notes.append(f"lr_scheduler_type: {kind} set to linear; `lr_scheduler` accepts any torch scheduler.")
    warmup = left.pop("warmup_steps", 0) or ratio
    model["lr_scheduler"] = {"name": SCHEDULES.get(kind, "linear"), "warmup": warmup}
    _objective(left, model, algorithm, data["sampling"]["max_new_tokens"])
    data["prompts"]["chat_template"] = False
    data |= {
        "rewards": _rewards(left, notes),
        "engine": _engine(left, model, data["engine"]),
        "prompts_per_rollout": batch // data["group_size"],
        "rollouts_per_epoch": None,
    }
    trainer = _trainer(left, data, updates, devices)
    notes += [f"{name}: {redact(value, name)!r} is not converted; see docs/migrate.md." for name, value in left.items()]
    module = "GRPOLightningModule" if algorithm == "grpo" else "RLOOLightningModule"
    return {
        "seed_everything": found["seed_everything"],
        "run_dir": found["run_dir"],
        "trainer": trainer,
        "model": {"class_path": module, "init_args": model},
        "data": {"class_path": "RolloutDataModule", "init_args": data},
    }, notes


def _number(value: Any) -> Any:
    """Converts numbers that YAML reads as text, such as 1e-5, as TRL's parser does."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", value) else value


def _part(name: str, **arguments: Any) -> Options:
    return {"class_path": name, "init_args": arguments}


def _sizes(left: Options, group: int, devices: int) -> tuple[int, int]:
    """Number of sequences per rollout and per update."""
    device_batch = left.pop("per_device_train_batch_size", 8)
    accumulation = left.pop("gradient_accumulation_steps", 1)
    steps, batch = left.pop("steps_per_generation", None), left.pop("generation_batch_size", None)
    batch = batch or device_batch * devices * (steps or accumulation)
    minibatch = device_batch * devices * accumulation
    if batch % group or batch % minibatch:
        raise ValueError(
            f"generation_batch_size={batch} (per_device_train_batch_size x devices x steps_per_generation): must be a "
            f"multiple of num_generations={group} and of the optimizer's batch of {minibatch}. Change one of them."
        )
    return batch, minibatch


def _objective(left: Options, model: Options, algorithm: str, length: int) -> None:
    """Adds KL, advantage, loss, and aggregation."""
    grpo = algorithm == "grpo"
    beta, corrected = left.pop("beta", 0.0 if grpo else 0.05), left.pop("use_bias_correction_kl", True)
    low = left.pop("epsilon", 0.2)
    high = left.pop("epsilon_high", None)
    bounds = {"eps_low": low, "eps_high": low if high is None else high}
    if not grpo:
        model["kl"] = _part("KLInReward", estimator="k1", coef=beta) if beta else None
        model["advantage"] = _part("RLOO", normalize=left.pop("normalize_advantages", False))
        model["loss"] = _part("RLOOSequence", **bounds)
        model["aggregation"] = _part("SequenceMean")
        return
    model["kl"] = _part("KLInLoss", estimator="k3", coef=beta, ratio_correction=corrected) if beta else None
    scale = str(left.pop("scale_rewards", "group"))
    model["advantage"] = _part("GroupRelative", scale={"True": "group", "False": "none"}.get(scale, scale))
    kind = left.pop("loss_type", "dapo")
    if kind not in AGGREGATIONS:
        raise ValueError(
            f"loss_type={kind!r}: is not converted. Use one of {', '.join(AGGREGATIONS)}, then set `loss` as in "
            "docs/migrate.md."
        )
    if left.pop("importance_sampling_level", "token") == "sequence":
        model["loss"] = _part("GSPO", **bounds)
    else:
        model["loss"] = _part("PPOClip", **bounds, dual_clip=left.pop("delta", None))
    model["aggregation"] = _part(AGGREGATIONS[kind], **({"length": length} if kind == "dr_grpo" else {}))


def _rewards(left: Options, notes: list[str]) -> list[Any] | Options:
    names, weights = left.pop("reward_funcs", None) or [], left.pop("reward_weights", None)
    names = [names] if isinstance(names, str) else names
    if not names:
        notes.append("reward_funcs: missing; add your reward functions to data.init_args.rewards.")
    functions = [REWARDS.get(name, name) for name in names]
    return functions if weights is None else {"functions": functions, "weights": weights}


def _engine(left: Options, model: Options, arguments: Options) -> Options:
    """The engine. Wraps the loss in TRL's correction of vLLM's log-probs."""
    used, mode = left.pop("use_vllm", False), left.pop("vllm_mode", "colocate")
    url = left.pop("vllm_server_base_url", None) or "http://127.0.0.1:8000"
    sleeps, corrected = left.pop("vllm_enable_sleep_mode", False), left.pop("vllm_importance_sampling_correction", True)
    level, _, kind = left.pop("vllm_importance_sampling_mode", "sequence_mask").partition("_")
    high = left.pop("vllm_importance_sampling_clip_max", 3.0)
    low = left.pop("vllm_importance_sampling_clip_min", None)
    if not used:
        return _part("TransformersEngine")
    if corrected:
        bounds = {"high": 1e9 if high is None else max(high, 1.0), "low": low or 0.0}
        model["loss"] = _part("OffPolicyCorrection", loss=model["loss"], level=level, mode=kind, **bounds)
    if mode == "server":
        return _part("ServerEngine", urls=[url], shared_folder="outputs/weights")
    if arguments["tensor_parallel_size"] > 1:
        arguments["in_process"] = False
    return _part("VLLMEngine", **arguments, sleep_level=2 if sleeps else 0)


def _trainer(left: Options, data: Options, updates: int, devices: int) -> Options:
    """The trainer with its callbacks, and the evaluation. `updates` is the number of updates per rollout."""
    half, bf16 = left.pop("fp16", False), left.pop("bf16", True)
    steps, epochs, logged = left.pop("max_steps", -1), left.pop("num_train_epochs", 3), left.pop("logging_steps", 10)
    callbacks = [_part("WeightSync")]
    if left.pop("log_completions", False):
        callbacks.append(_part("CompletionLogger", every_n_rollouts=logged))
    saved, keep = left.pop("save_steps", 500), left.pop("save_total_limit", None) or 1
    if left.pop("save_strategy", "steps") != "no":
        callbacks.append(_part("RolloutCheckpoint", every_n_rollouts=max(int(saved) // updates, 1), save_top_k=keep))
    trainer: Options = {
        "accelerator": "auto",
        "devices": devices,
        "precision": "16-mixed" if half else "bf16-mixed" if bf16 else "32-true",
        "max_epochs": -1 if steps > 0 else -int(-epochs // 1),
        "callbacks": [*callbacks, _part("HFExport")],
    }
    if steps > 0:
        trainer["max_steps"] = steps
    if devices > 1:
        trainer["strategy"] = "ddp"
    strategy, split = left.pop("eval_strategy", "no"), left.pop("dataset_test_split", "test")
    group = left.pop("num_generations_eval", None) or data["group_size"]
    batch, every = left.pop("per_device_eval_batch_size", 8), left.pop("eval_steps", None) or logged
    if strategy != "no":
        prompts = {**data["prompts"], "split": split}
        data["evaluation"] = {"prompts": prompts, "group_size": group, "batch_size": max(batch // group, 1)}
    if strategy == "steps":
        trainer |= {"val_check_interval": max(int(every) // updates, 1), "check_val_every_n_epoch": None}
    return trainer
