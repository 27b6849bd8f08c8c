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

DIRECT = {
    "seed": ("seed_everything", 42),
    "output_dir": ("run_dir", "outputs/trl"),
    "model_name_or_path": ("model.actor.path", None),
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
    "dataset_train_split": ("data.prompts.split", "train"),
    "dataset_streaming": ("data.prompts.streaming", False),
    "shuffle_dataset": ("data.prompts.shuffle", True),
    "num_generations": ("data.group_size", 8),
    "max_completion_length": ("data.sampling.max_new_tokens", 512),
    "temperature": ("data.sampling.temperature", 1.0),
}
"""Option -> (our key without `init_args`, TRL's default, which is written explicitly)."""
IF_GIVEN = {
    "dataset_config": "data.prompts.name",
    "chat_template_kwargs": "data.prompts.template_kwargs",
    "top_p": "data.sampling.top_p",
    "top_k": "data.sampling.top_k",
    "min_p": "data.sampling.min_p",
    "repetition_penalty": "data.sampling.repetition_penalty",
    "vllm_structured_outputs_regex": "data.sampling.regex",
    "generation_kwargs": "data.sampling.extra",
}
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
AGGREGATIONS = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "TokenMean"),
    **dict.fromkeys(("grpo", "sapo"), "SequenceMean"),
    "luspo": "SequenceSum",
    "dr_grpo": "ConstantLength",
}
SCHEDULES = {
    "linear": "linear",
    **dict.fromkeys(("cosine", "cosine_with_min_lr"), "cosine"),
    **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
}


def from_trl(
    script: str, output: str = "config.yaml", algorithm: Literal["grpo", "rloo"] = "grpo", devices: int = 1
) -> None:
    """Convert a TRL configuration (`trl grpo --config ...`) to a configuration for `lightrl fit`.

    Options without a counterpart are listed in the output file and in the terminal. TRL's defaults are written
    explicitly if they differ from LightRL's.

    Args:
        script: YAML file with arguments of TRL 1.16: GRPOConfig or RLOOConfig, ModelConfig, and ScriptArguments.
        output: File to write. Must not exist.
        algorithm: TRL script that the configuration is for.
        devices: Number of processes that the script runs on. Multiplies the batch sizes per device.

    Raises:
        ValueError: The file is not a mapping, its batch sizes are inconsistent, or `output` exists.
    """
    options = read_yaml(Path(script), "script")
    if not isinstance(options, dict):
        raise ValueError(f"script={script}: must be a mapping, got {type(options).__name__}. Pass a TRL configuration.")
    if os.path.lexists(output):
        raise ValueError(f"output={output}: exists. Use another path.")
    try:
        converted, notes = convert_trl(options, algorithm, devices)
    except (TypeError, AttributeError) as error:  # text instead of a number, a list instead of a name
        raise ValueError(f"script={script}: a value has a different type than in TRL ({error}). Fix it.") from error
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
    texts = ("model_revision", "model_name_or_path", "dataset_name", "dataset_config")  # may look numeric
    left = {name: value if name in texts else _number(value) for name, value in options.items()}
    for name in ("model_name_or_path", "dataset_name"):
        if left.get(name) is None:
            raise ValueError(f"{name}=None: is required. Add it to the script's configuration.")
    notes: list[str] = []
    found: Options = {}
    sizes = _sizes(left, devices)
    for name, (place, default) in DIRECT.items():
        value = left.pop(name, default)
        _put(found, place, value if value is not None or default is None else default)
    for name, place in IF_GIVEN.items():
        if (value := left.pop(name, None)) is not None:
            _put(found, place, value)
    model, data = found["model"], found["data"]
    _model(left, model, notes)
    _objective(left, model, algorithm, data["sampling"]["max_new_tokens"], notes)
    data |= {
        "rewards": _rewards(left, notes),
        "engine": _engine(left, model, notes),
        "prompts_per_rollout": sizes["batch"] // data["group_size"],
        "rollouts_per_epoch": None,
    }
    model["updates"]["minibatch_size"] = None if sizes["minibatch"] == sizes["batch"] else sizes["minibatch"]
    trainer = _trainer(left, model, sizes["batch"] // sizes["minibatch"] * model["ppo_epochs"], devices, notes)
    _evaluation(left, data, notes)
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
    number = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
    return float(value) if isinstance(value, str) and re.fullmatch(number, value) else value


def _put(config: Options, place: str, value: Any) -> None:
    *above, last = place.split(".")
    for part in above:
        config = config.setdefault(part, {})
    config[last] = value


def _part(name: str, **arguments: Any) -> Options:
    return {"class_path": name, "init_args": arguments}


def _several(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else value or []


def _sizes(left: Options, devices: int) -> dict[str, int]:
    """Number of sequences per rollout and per update."""
    group = left.get("num_generations", 8)
    device_batch = left.pop("per_device_train_batch_size", 8)
    accumulation = left.pop("gradient_accumulation_steps", 1)
    steps, batch = left.pop("steps_per_generation", None), left.pop("generation_batch_size", None)
    given = {"num_generations": group, "per_device_train_batch_size": device_batch}
    for name, value in {**given, "gradient_accumulation_steps": accumulation}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a number of at least 1. Fix it.")
    if batch is None:
        batch = device_batch * devices * (accumulation if steps is None else steps)
    minibatch = device_batch * devices * accumulation
    if batch % group or batch % minibatch:
        raise ValueError(
            f"generation_batch_size={batch} (per_device_train_batch_size x devices x steps_per_generation): must be a "
            f"multiple of num_generations={group} and of the optimizer's batch of {minibatch}. Change one of them."
        )
    return {"batch": batch, "minibatch": minibatch}


def _model(left: Options, model: Options, notes: list[str]) -> None:
    """Adds the actor's other arguments, the optimizer, and its schedule."""
    actor, kwargs = model["actor"], dict(left.pop("model_init_kwargs", None) or {})
    attention = kwargs.pop("attn_implementation", None)
    if attention is not None:
        left.setdefault("attn_implementation", attention)
    dtypes = [kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None), left.pop("torch_dtype", None)]
    dtype = left.pop("dtype", None) or next(filter(None, dtypes), None)
    if dtype not in (None, "auto", "float32"):
        actor["dtype"] = dtype
    further = {"revision": left.pop("model_revision", None), "trust_remote_code": left.pop("trust_remote_code", None)}
    kwargs |= {name: value for name, value in further.items() if value}
    if kwargs:
        actor["kwargs"] = kwargs
    targets = left.pop("lora_target_modules", None) or "all-linear"
    lora = {
        "r": left.pop("lora_r", 16),
        "alpha": left.pop("lora_alpha", 32),
        "target_modules": targets if targets == "all-linear" else _several(targets),
        "quantize_4bit": left.pop("load_in_4bit", False),
    }
    dropout = left.pop("lora_dropout", 0.05)
    if left.pop("use_peft", False):
        actor["lora"] = lora
        if dropout:
            notes.append("lora_dropout: set to 0, because dropout adds noise to log-probs and to the ratio.")
    model["updates"]["max_grad_norm"] = model["updates"]["max_grad_norm"] or None
    if left.pop("optim", "adamw_torch_fused") not in ("adamw_torch", "adamw_torch_fused"):
        notes.append("optim: set to torch.optim.AdamW; `optimizer` accepts any torch optimizer.")
    arguments = model["optimizer"]["init_args"]
    for name in ("lr", "eps"):
        arguments[name] = float(arguments[name])
    arguments["betas"] = [left.pop("adam_beta1", 0.9), left.pop("adam_beta2", 0.999)]
    model["optimizer"]["class_path"] = "torch.optim.AdamW"
    kind = str(left.pop("lr_scheduler_type", "linear"))
    if kind not in SCHEDULES:
        notes.append(f"lr_scheduler_type: {kind} set to linear; `lr_scheduler` accepts any torch scheduler.")
    ratio = left.pop("warmup_ratio", 0.0)
    model["lr_scheduler"] = {
        "name": SCHEDULES.get(kind, "linear"),
        "warmup": left.pop("warmup_steps", 0) or ratio or 0,
        "floor": (left.pop("lr_scheduler_kwargs", None) or {}).get("min_lr_rate", 0.0),
    }


def _objective(left: Options, model: Options, algorithm: str, length: int, notes: list[str]) -> None:
    """Adds KL, advantage, loss, and aggregation."""
    grpo = algorithm == "grpo"
    beta, corrected = left.pop("beta", 0.0 if grpo else 0.05), left.pop("use_bias_correction_kl", True)
    if not beta:
        model["kl"] = None
    elif grpo:
        model["kl"] = _part("KLInLoss", estimator="k3", coef=beta, ratio_correction=corrected)
    else:
        model["kl"] = _part("KLInReward", estimator="k1", coef=beta)
    low = left.pop("epsilon", 0.2)
    high = left.pop("epsilon_high", None)
    high = low if high is None else high
    if not grpo:
        clip = left.pop("reward_clip_range", None)
        if clip is not None:
            model["shaping"]["reward_clip"] = max(abs(x) for x in clip)
            if clip[0] != -clip[1]:
                notes.append(f"reward_clip_range: {clip} is not symmetric; reward_clip bounds the absolute value.")
        model["advantage"] = _part("RLOO", normalize=left.pop("normalize_advantages", False))
        model["loss"] = _part("RLOOSequence", eps_low=low, eps_high=high)
        model["aggregation"] = _part("SequenceMean")
        return
    scale = left.pop("scale_rewards", "group")
    model["advantage"] = _part("GroupRelative", scale={"True": "group", "False": "none"}.get(str(scale), scale))
    kind, level = left.pop("loss_type", "dapo"), left.pop("importance_sampling_level", "token")
    if kind not in AGGREGATIONS:
        raise ValueError(f"loss_type={kind!r}: is not supported. Use one of {', '.join(AGGREGATIONS)}.")
    losses = {
        "cispo": _part("CISPO", ratio_max=max(high, 1.0)),
        "sapo": _part(
            "SAPO",
            tau_pos=left.pop("sapo_temperature_pos", 1.0),
            tau_neg=left.pop("sapo_temperature_neg", 1.05),
        ),
        "vespo": _part(
            "VESPO",
            k_pos=left.pop("vespo_k_pos", 2.0),
            lam_pos=left.pop("vespo_lambda_pos", 3.0),
            k_neg=left.pop("vespo_k_neg", 3.0),
            lam_neg=left.pop("vespo_lambda_neg", 2.0),
        ),
    }
    loss = losses.get(kind, _part("PPOClip", eps_low=low, eps_high=high, dual_clip=left.pop("delta", None)))
    if level == "sequence" or kind == "luspo":
        loss = _part("GSPO", eps_low=low, eps_high=high)
    elif kind == "cispo" and high < 1:
        notes.append(f"epsilon_high: set to 1, because ratio_max must be at least 1; TRL clips the ratio at {high}.")
    threshold = left.pop("off_policy_mask_threshold", None)
    if threshold is not None:
        loss = _part("OffPolicySequenceMask", loss=loss, threshold=threshold)
    model["loss"] = loss
    model["aggregation"] = _part(AGGREGATIONS[kind], **({"length": length} if kind == "dr_grpo" else {}))


def _trainer(left: Options, model: Options, updates: int, devices: int, notes: list[str]) -> Options:
    """The trainer with its callbacks. `updates` is the number of updates per rollout."""
    logged = left.pop("logging_steps", 10)
    callbacks = [_part("WeightSync"), _part("ThroughputMonitor")]
    if left.pop("log_completions", False):
        callbacks.append(_part("CompletionLogger", every_n_rollouts=logged))
    if left.pop("eval_on_start", False):
        callbacks.append(_part("EvaluateFirst"))
    callbacks += _saving(left, updates, notes)
    alpha, steps = left.pop("ref_model_mixup_alpha", 0.6), left.pop("ref_model_sync_steps", 512)
    if left.pop("sync_ref_model", False):
        callbacks.append(_part("ReferenceSync", every_n_rollouts=max(steps // updates, 1), alpha=alpha))
    low, high = left.pop("entropy_coef_min", 0.0), left.pop("entropy_coef_max", 1.0)
    step, target = left.pop("entropy_coef_delta", 0.005), left.pop("entropy_target", 0.2)
    if left.pop("use_adaptive_entropy", False):
        start = max(model["extra_losses"]["entropy_coef"], low)
        callbacks.append(_part("AdaptiveEntropy", target=target, step=step, start=start, minimum=low, maximum=high))
    half, bf16 = left.pop("fp16", False), left.pop("bf16", True)
    steps, epochs = left.pop("max_steps", -1), left.pop("num_train_epochs", 3)
    if steps < 0 and epochs != int(epochs):
        notes.append(f"num_train_epochs: {epochs} was rounded up; for less, set trainer.max_steps (in updates).")
    trainer: Options = {
        "accelerator": "auto",
        "devices": devices,
        "precision": "16-mixed" if half else "bf16-mixed" if bf16 else "32-true",
        "max_epochs": -1 if steps > 0 else int(-(-epochs // 1)),
        "callbacks": callbacks,
    }
    evaluated = left.pop("eval_steps", None) or logged
    if left.get("eval_strategy") == "steps" and evaluated >= 1:
        trainer |= {"val_check_interval": max(int(evaluated) // updates, 1), "check_val_every_n_epoch": None}
        notes.append(f"eval_steps: {evaluated} updates converted to {trainer['val_check_interval']} rollouts.")
    elif left.get("eval_strategy") == "steps":
        notes.append(f"eval_steps: {evaluated} of the run converted to every epoch; set trainer.val_check_interval.")
    if devices > 1:
        trainer["strategy"] = "ddp"
    return trainer | ({"max_steps": steps} if steps > 0 else {})


def _saving(left: Options, updates: int, notes: list[str]) -> list[Options]:
    """Checkpoints and the export, of the best model if the script requests it."""
    strategy, saved = left.pop("save_strategy", "steps"), left.pop("save_steps", 500)
    keep, best = int(left.pop("save_total_limit", None) or 1), left.pop("load_best_model_at_end", False)
    metric, greater = left.pop("metric_for_best_model", None), left.pop("greater_is_better", None)
    export = _part("HFExport", **({"best": True} if best else {}))
    ranking: Options = {}
    if metric is not None or strategy == "best" or best:
        name = str(metric or "loss").removeprefix("eval_")
        evaluated = left.get("eval_strategy", "no") != "no" or left.get("do_eval", False)
        monitor = "eval/reward" if evaluated else "reward/mean"
        if name.startswith("rewards/") and evaluated:
            monitor += f"/{name.removeprefix('rewards/').removesuffix('/mean')}"
        elif name != "reward" or not evaluated:
            notes.append(
                f"metric_for_best_model: {metric or 'loss'} converted to {monitor}; check RolloutCheckpoint.monitor."
            )
        ranking = {"monitor": monitor, "mode": "min" if greater is False else "max"}
        keep = 1
    elif strategy == "no":
        return [export]
    counted = strategy == "steps" and saved >= 1
    every = max(int(saved) // updates, 1) if counted else 500
    notes.append(f"save_steps: {saved} (save_strategy: {strategy}) converted to every {every} rollouts.")
    return [_part("RolloutCheckpoint", every_n_rollouts=every, save_top_k=keep, **ranking), export]


def _evaluation(left: Options, data: Options, notes: list[str]) -> None:
    data["prompts"]["chat_template"] = False
    notes.append(
        "prompts.chat_template: set to false, because TRL applies the chat template only to conversations, not to "
        "strings. Remove it to render a string as a user message."
    )
    strategy, asked = left.pop("eval_strategy", "no"), left.pop("do_eval", False)
    split = left.pop("dataset_test_split", "test")
    batch, group = left.pop("per_device_eval_batch_size", 8), left.pop("num_generations_eval", None)
    if strategy != "no" or asked:
        group = group or data["group_size"]
        prompts = {**data["prompts"], "split": split}
        data["evaluation"] = {"prompts": prompts, "group_size": group, "batch_size": max(batch // group, 1)}


def _rewards(left: Options, notes: list[str]) -> list[Any] | Options:
    names = _several(left.pop("reward_funcs", None))
    if left.pop("reward_model_name_or_path", None):
        notes.append("reward_model_name_or_path: add it to model.init_args.reward_models: [{name: ..., path: ...}].")
    if not names:
        notes.append("reward_funcs: missing; add your reward functions to data.init_args.rewards.")
    own = [name for name in names if name not in REWARDS]
    if own:
        notes.append(
            f"reward_funcs: {', '.join(own)}: LightRL passes completions as strings; TRL passes lists of messages for "
            "conversations. `log_extra`, `log_metric`, and the dataset's columns have the same names."
        )
    functions, weights = [REWARDS.get(name, name) for name in names], left.pop("reward_weights", None)
    return functions if weights is None else {"functions": functions, "weights": weights}


def _engine(left: Options, model: Options, notes: list[str]) -> Options:
    """The engine. Wraps the loss in TRL's correction of vLLM's log-probs."""
    used, mode = left.pop("use_vllm", False), left.pop("vllm_mode", "colocate")
    url = left.pop("vllm_server_base_url", None)
    host, port = left.pop("vllm_server_host", "0.0.0.0"), left.pop("vllm_server_port", 8000)
    arguments = {
        "gpu_memory_utilization": left.pop("vllm_gpu_memory_utilization", 0.3),
        "tensor_parallel_size": left.pop("vllm_tensor_parallel_size", 1),
        "max_model_len": left.pop("vllm_max_model_length", None),
        "sleep_level": 2 if left.pop("vllm_enable_sleep_mode", False) else 0,
    }
    corrected = left.pop("vllm_importance_sampling_correction", True)
    level, _, kind = str(left.pop("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
    cap = left.pop("vllm_importance_sampling_cap", 3.0)  # its name before TRL 1
    high = left.pop("vllm_importance_sampling_clip_max", cap)
    low = left.pop("vllm_importance_sampling_clip_min", None)
    if not used:
        return _part("TransformersEngine")
    if corrected:
        bounds = {"high": 1e9 if high is None else max(high, 1.0), "low": low or 0.0}
        model["loss"] = _part("OffPolicyCorrection", loss=model["loss"], level=level, mode=kind, **bounds)
    if mode == "server":
        notes.append("vllm_mode: server: start the servers with a shared directory; see docs/generation.md.")
        return _part("ServerEngine", urls=[url or f"http://{host}:{port}"], shared_folder="outputs/weights")
    if arguments["tensor_parallel_size"] > 1:
        arguments["in_process"] = False
    return _part("VLLMEngine", **arguments)
