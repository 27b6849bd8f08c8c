"""`lightrl from-trl`: a configuration of TRL's GRPO and RLOO scripts as one of LightRL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml

from lightrl.checkpoints.files import atomic_write
from lightrl.checkpoints.redaction import plain_secrets, redact
from lightrl.cli.config_files import read_yaml
from lightrl.compat.arguments import user_path

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
    **{"dapo": "TokenMean", "bnpo": "TokenMean", "cispo": "TokenMean", "grpo": "SequenceMean", "sapo": "SequenceMean"},
    **{"vespo": "TokenMean", "luspo": "SequenceSum"},
}
SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    "cosine_with_min_lr": "cosine",
}
NO_COUNTERPART = {
    "attn_implementation": "attention is chosen by actor.layout",
    "auto_find_batch_size": "set micro_batch_tokens; `lightrl plan` says what fits",
    "average_tokens_across_devices": "normalisers always count all ranks",
    "bf16_full_eval": "evaluation samples from the engine",
    "cache_implementation": "the engine's own",
    "dataloader_num_workers": "prompts are made ready in threads",
    "ddp_find_unused_parameters": "set it on the strategy",
    "ddp_timeout": "set `timeout` on the strategy",
    "deepspeed": "take configs/strategies/deepspeed_*.yaml",
    "disable_dropout": "dropout is always 0",
    "fsdp": "take configs/strategies/fsdp2.yaml",
    "hub_model_id": "callback HFExport writes the folder; upload it with `hf upload`, or by the module's push_to_hub",
    "log_unique_prompts": "CompletionLogger shows completions by prompt",
    "max_prompt_length": "prompts.max_prompt_tokens, which TRL 1 has not",
    "multi_objective_aggregation": "normalize_then_sum: advantage: GDPO",
    "pad_to_multiple_of": "nothing is padded inside the model",
    "push_to_hub": "callback HFExport writes the folder; upload it with `hf upload`, or by the module's push_to_hub",
    "remove_unused_columns": "all columns reach the reward functions",
    "report_to": "trainer.logger takes Lightning's loggers",
    "torch_compile": "a step that samples is no graph",
    "vllm_server_timeout": "start_timeout of ServerEngine",
    "vllm_group_port": "weights: transfer and transfer_address of ServerEngine",
    "vllm_model_impl": "engine_args of VLLMEngine",
}


def from_trl(
    script: str, output: str = "config.yaml", algorithm: Literal["grpo", "rloo"] = "grpo", devices: int = 1
) -> None:
    """Turns the YAML of a TRL script (`trl grpo --config ...`) into one for `lightrl fit`.

    What has no counterpart is named, in the file and on the terminal; nothing is left out in silence. TRL's own
    defaults are written out where they differ from LightRL's.

    Args:
        script: the YAML with arguments of GRPOConfig or RLOOConfig, ModelConfig and ScriptArguments of TRL 1.16.
        output: the file to write; one that is there is not overwritten.
        algorithm: the script that it is for.
        devices: processes that the script runs on; batch sizes per device are multiplied by it.

    Raises:
        ValueError: the file is no mapping, sizes do not fit one another, or `output` is there already.
    """
    options = read_yaml(user_path("script", script), "script")
    if not isinstance(options, dict):
        raise ValueError(f"script={script}: expected names and values, found {type(options).__name__}.")
    target = user_path("output", output)
    if os.path.lexists(target):
        raise ValueError(f"output={output} is there already and would be overwritten: name another file.")
    try:
        converted, notes = convert_trl(options, algorithm, devices)
    except (TypeError, AttributeError) as error:  # text for a number, a list for a name
        wrong = f"{type(error).__name__}: {error}"
        raise ValueError(f"script={script}: a value is not of the type that TRL takes ({wrong}).") from error
    notes += [
        f"{path}: a secret stands in the script and is not copied: replace *** by ${{env:NAME}}."
        for path in dict.fromkeys(path for path, _ in plain_secrets(converted))
    ]
    converted = redact(converted)
    header = [f"# From {Path(script).name} of TRL's {algorithm}.", *(f"#   {note}" for note in notes)]
    with atomic_write(target, "w") as file:
        file.write("\n".join(header) + "\n" + yaml.safe_dump(converted, sort_keys=False))
    print(f"Wrote {output}." + "".join(f"\n  {note}" for note in notes))
    print(f"  lightrl fit --config {output}")


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for text, and TRL's parser for a number."""
    try:
        return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value) else value
    except ValueError:
        return value


class _Options:
    """The options of a script, of which each must be taken or named."""

    def __init__(self, options: dict[str, Any]) -> None:
        names = ("model_revision", "model_name_or_path", "dataset_name", "dataset_config")  # may look like numbers
        self._left = {name: value if name in names else _number(value) for name, value in options.items()}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def look(self, name: str, default: Any = None) -> Any:
        return self._left.get(name, default)

    def put(self, name: str, value: Any) -> None:
        self._left.setdefault(name, value)

    def rest(self) -> list[str]:
        return [
            f"{name}: {redact(value, name)!r} has no counterpart"
            + (f"; {NO_COUNTERPART[name]}." if name in NO_COUNTERPART else ", and was left out.")
            for name, value in self._left.items()
        ]


def convert_trl(
    options: dict[str, Any], algorithm: Literal["grpo", "rloo"] = "grpo", devices: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """What `from_trl` writes.

    Args:
        options: name -> value of TRL's arguments.
        algorithm: "grpo" or "rloo".
        devices: processes.

    Returns:
        the configuration as plain data; one line about each thing to look at.

    Raises:
        ValueError: sizes do not fit one another; or there is no model or data set.
    """
    given, notes = _Options(options), list[str]()
    sizes = _sizes(given, devices)
    model = _model(given, algorithm, sizes, notes)
    trainer, run_dir = _trainer(given, model, sizes, devices, notes)
    data = _data(given, model, sizes, notes)
    config = {
        "seed_everything": given.take("seed", 42),
        "run_dir": run_dir,
        "trainer": trainer,
        "model": {
            "class_path": "GRPOLightningModule" if algorithm == "grpo" else "RLOOLightningModule",
            "init_args": {**model, "ppo_epochs": sizes["epochs"]},
        },
        "data": {"class_path": "RolloutDataModule", "init_args": data},
    }
    return config, notes + given.rest()


def _several(value: Any) -> Any:
    """A list, also where one name stands alone; "all-linear" is no name."""
    return [value] if isinstance(value, str) and value != "all-linear" else value


def _part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


def _sizes(given: _Options, devices: int) -> dict[str, Any]:
    accumulation, group = given.take("gradient_accumulation_steps", 1), given.take("num_generations", 8)
    device_batch = given.take("per_device_train_batch_size", 8)
    steps, batch = given.take("steps_per_generation"), given.take("generation_batch_size")
    for name, value in (
        ("gradient_accumulation_steps", accumulation),
        ("num_generations", group),
        ("per_device_train_batch_size", device_batch),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r}: must be a number.")
    device_batch *= devices
    if min(accumulation, group, device_batch) < 1:
        raise ValueError("num_generations, per_device_train_batch_size, gradient_accumulation_steps: at least 1 each.")
    if batch is None:
        batch = device_batch * (accumulation if steps is None else steps)
    minibatch = device_batch * accumulation
    if batch % group or batch % minibatch:
        raise ValueError(
            f"generation_batch_size={batch} (per_device_train_batch_size x devices x steps_per_generation) must be a "
            f"multiple of num_generations={group} and of the optimizer's batch of {minibatch}."
        )
    epochs = given.take("num_iterations", 1)
    return {
        "length": given.take("max_completion_length", 512),
        "group": group,
        "prompts": batch // group,
        "minibatch": None if minibatch == batch else minibatch,
        "epochs": epochs,
        "updates": batch // minibatch * epochs,
    }


def _model(given: _Options, algorithm: str, sizes: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    path = given.take("model_name_or_path")
    if path is None:
        raise ValueError("model_name_or_path is missing: there is nothing to train.")
    actor: dict[str, Any] = {"path": path, "gradient_checkpointing": given.take("gradient_checkpointing", True)}
    init = dict(given.take("model_init_kwargs") or {})
    for name in ("attn_implementation", "dtype", "torch_dtype"):
        if name in init:
            given.put(name, init.pop(name))
    old_dtype = given.take("torch_dtype")
    dtype = given.take("dtype", old_dtype)
    if dtype not in (None, "auto", "float32"):
        actor["dtype"] = dtype
    kwargs = {name: given.take(old) for name, old in (("revision", "model_revision"), ("trust_remote_code",) * 2)}
    kwargs = {name: value for name, value in kwargs.items() if value not in (None, False)}
    if init or kwargs:
        actor["kwargs"] = {**init, **kwargs}
    lora: dict[str, Any] = {
        "r": given.take("lora_r", 16),
        "alpha": given.take("lora_alpha", 32),
        "dropout": given.take("lora_dropout", 0.05),
        "target_modules": _several(given.take("lora_target_modules")) or "all-linear",
        "quantize_4bit": given.take("load_in_4bit", False),
    }
    if given.take("use_peft", False):
        if lora["dropout"]:
            notes.append("lora_dropout becomes 0: log-probs with dropout are noisy, and with them the ratio.")
        actor["lora"] = {**lora, "dropout": 0.0}
    arguments: dict[str, Any] = {"actor": actor}
    beta = given.take("beta", 0.0 if algorithm == "grpo" else 0.05)
    corrected = given.take("use_bias_correction_kl", True)
    in_loss = _part("KLInLoss", estimator="k3", coef=beta, ratio_correction=corrected)
    kl = in_loss if algorithm == "grpo" else _part("KLInReward", estimator="k1", coef=beta)
    arguments["kl"] = kl if beta else None
    arguments |= _objective(given, algorithm, sizes["length"], notes)
    shaping = arguments.setdefault("shaping", {})
    shaping["mask_truncated"] = given.take("mask_truncated_completions", False)
    shaping["top_entropy_fraction"] = given.take("top_entropy_quantile", 1.0)
    arguments["extra_losses"] = {
        "entropy_coef": given.take("entropy_coef", 0.0),
        "aux_loss_coef": given.take("router_aux_loss_coef", 0.0) or 0.0,
    }
    arguments["updates"] = {
        "minibatch_size": sizes["minibatch"],
        "max_grad_norm": given.take("max_grad_norm", 1.0) or None,
    }
    if given.take("optim", "adamw_torch_fused") not in ("adamw_torch", "adamw_torch_fused"):
        notes.append("optim: torch.optim.AdamW took its place; any torch optimizer goes under `optimizer`.")
    betas = [given.take("adam_beta1", 0.9), given.take("adam_beta2", 0.999)]
    arguments["optimizer"] = _part(
        "torch.optim.AdamW",
        lr=float(given.take("learning_rate", 1e-6)),
        betas=betas,
        eps=float(given.take("adam_epsilon", 1e-8)),
        weight_decay=given.take("weight_decay", 0.0),
    )
    kind = str(given.take("lr_scheduler_type", "linear"))
    if kind not in SCHEDULES:
        notes.append(f"lr_scheduler_type: {kind} became linear; any torch scheduler goes under `lr_scheduler`.")
    floor = (given.take("lr_scheduler_kwargs") or {}).get("min_lr_rate", 0.0)
    warmup = given.take("warmup_steps", 0) or given.take("warmup_ratio", 0.0) or 0
    arguments["lr_scheduler"] = {"name": SCHEDULES.get(kind, "linear"), "warmup": warmup, "floor": floor}
    return arguments


def _objective(given: _Options, algorithm: str, length: int, notes: list[str]) -> dict[str, Any]:
    """Advantage, loss and aggregation."""
    low = given.take("epsilon", 0.2)
    high = given.take("epsilon_high")
    high = low if high is None else high
    if algorithm == "rloo":
        clip = given.take("reward_clip_range")
        bound = {} if clip is None else {"shaping": {"reward_clip": max(abs(x) for x in clip)}}
        if clip is not None and clip[0] != -clip[1]:
            notes.append(f"reward_clip_range: {clip} is not symmetric; reward_clip bounds the absolute value.")
        advantage = _part("RLOO", normalize=given.take("normalize_advantages", False))
        loss, mean = _part("RLOOSequence", eps_low=low, eps_high=high), _part("SequenceMean")
        return {"advantage": advantage, "loss": loss, "aggregation": mean, **bound}
    scale = given.take("scale_rewards", "group")
    scale = {"True": "group", "False": "none"}.get(str(scale), scale)
    kind, level = given.take("loss_type", "dapo"), given.take("importance_sampling_level", "token")
    taus = given.take("sapo_temperature_pos", 1.0), given.take("sapo_temperature_neg", 1.05)
    vespo = {
        new: given.take(old, default)
        for new, old, default in (
            ("k_pos", "vespo_k_pos", 2.0),
            ("lam_pos", "vespo_lambda_pos", 3.0),
            ("k_neg", "vespo_k_neg", 3.0),
            ("lam_neg", "vespo_lambda_neg", 2.0),
        )
    }
    delta = given.take("delta")
    if kind not in (*AGGREGATIONS, "dr_grpo"):
        raise ValueError(f"loss_type={kind!r}: known are {', '.join([*AGGREGATIONS, 'dr_grpo'])}.")
    loss = _part("PPOClip", eps_low=low, eps_high=high, delta=delta)
    if level == "sequence" or kind == "luspo":
        loss = _part("GSPO", eps_low=low, eps_high=high)
    elif kind == "cispo":
        loss = _part("CISPO", ratio_max=max(high, 1.0))
        if high < 1:
            notes.append(f"epsilon_high: TRL's cispo bounds the weight itself, at {high}; ratio_max is at least 1.")
    elif kind == "sapo":
        loss = _part("SAPO", tau_pos=taus[0], tau_neg=taus[1])
    elif kind == "vespo":
        loss = _part("VESPO", **vespo)
    threshold = given.take("off_policy_mask_threshold")
    if threshold is not None:
        loss = _part("OffPolicySequenceMask", loss=loss, threshold=threshold)
    if kind == "dr_grpo":
        return {"advantage": _part("GroupRelative", scale=scale), "loss": loss} | {
            "aggregation": _part("ConstantLength", length=length)
        }
    return {"advantage": _part("GroupRelative", scale=scale), "loss": loss, "aggregation": _part(AGGREGATIONS[kind])}


def _ranking(given: _Options, strategy: str, notes: list[str]) -> dict[str, Any]:
    """`monitor` and `mode` of RolloutCheckpoint, if the script keeps or loads the best checkpoint."""
    metric, greater = given.take("metric_for_best_model"), given.take("greater_is_better")
    load_best = given.look("load_best_model_at_end", False)
    if metric is None and strategy != "best" and not load_best:
        return {}
    name = str(metric or "loss").removeprefix("eval_")
    greater = not name.endswith("loss") if greater is None else greater
    if given.look("eval_strategy", "no") == "no" and not given.look("do_eval", False):
        notes.append("metric_for_best_model: eval_strategy is no, so the reward of training rollouts is monitored.")
        return {"monitor": "reward/mean", "mode": "max"}
    if name == "reward":
        monitor = "eval/reward"
    elif name.startswith("rewards/"):
        monitor = f"eval/reward/{name.removeprefix('rewards/').removesuffix('/mean')}"
    elif name == "completions/mean_length":
        monitor = "eval/length"
    else:
        notes.append(f"metric_for_best_model: {metric or 'loss'} has no counterpart; eval/reward is monitored.")
        return {"monitor": "eval/reward", "mode": "max"}
    return {"monitor": monitor, "mode": "max" if greater else "min"}


def _trainer(
    given: _Options, model: dict[str, Any], sizes: dict[str, Any], devices: int, notes: list[str]
) -> tuple[dict[str, Any], str]:
    """The trainer with its callbacks, and the run's folder. Wraps the loss where TRL corrects vLLM's log-probs."""
    run_dir = given.take("output_dir", "outputs/trl")
    half, bf16 = given.take("fp16", False), given.take("bf16", True)
    steps, epochs = given.take("max_steps", -1), given.take("num_train_epochs", 3)
    if steps < 0 and epochs != int(epochs):
        notes.append(f"num_train_epochs: {epochs} is rounded up; trainer.max_steps counts updates.")
    callbacks = [_part("WeightSync"), _part("ThroughputMonitor")]
    if given.take("log_completions", False):
        callbacks.append(_part("CompletionLogger", every_n_rollouts=given.look("logging_steps", 10)))
    evaluated = given.take("eval_steps") or given.look("logging_steps", 10)
    given.take("logging_steps")
    if given.take("eval_on_start", False):
        callbacks.append(_part("EvaluateFirst"))
    strategy, saved = given.take("save_strategy", "steps"), given.take("save_steps", 500)
    ranking = _ranking(given, strategy, notes)
    keep = given.take("save_total_limit")
    if strategy != "no" or ranking:
        counted = strategy == "steps" and saved >= 1
        every = max(int(saved) // sizes["updates"], 1) if counted else 500
        callbacks.append(
            _part("RolloutCheckpoint", every_n_rollouts=every, save_top_k=1 if ranking else int(keep or 1), **ranking)
        )
        notes.append(
            f"save_steps: {saved} updates are {every} rollouts."
            if counted
            else f"save_strategy: {strategy}, save_steps: {saved}: became every {every} rollouts; change it."
        )
    callbacks.append(_part("HFExport", best=True) if given.take("load_best_model_at_end", False) else _part("HFExport"))
    alpha, sync_steps = given.take("ref_model_mixup_alpha", 0.6), given.take("ref_model_sync_steps", 512)
    if given.take("sync_ref_model", False):
        rollouts = max(sync_steps // sizes["updates"], 1)
        callbacks.append(_part("ReferenceSync", every_n_rollouts=rollouts, alpha=alpha))
    low, high = given.take("entropy_coef_min", 0.0), given.take("entropy_coef_max", 1.0)
    step, target = given.take("entropy_coef_delta", 0.005), given.take("entropy_target", 0.2)
    if given.take("use_adaptive_entropy", False):
        start = max(model["extra_losses"]["entropy_coef"], low)
        arguments = {"target": target, "step": step, "start": start, "minimum": low, "maximum": high}
        callbacks.append(_part("AdaptiveEntropy", **arguments))
    trainer: dict[str, Any] = {
        "accelerator": "auto",
        "devices": devices,
        "precision": "16-mixed" if half else "bf16-mixed" if bf16 else "32-true",
        "max_epochs": -1 if steps > 0 else -(-epochs // 1),
        "callbacks": callbacks,
    }
    trainer["max_epochs"] = int(trainer["max_epochs"])
    if given.look("eval_strategy", "no") == "steps" and evaluated >= 1:
        every = max(int(evaluated) // sizes["updates"], 1)
        trainer |= {"val_check_interval": every, "check_val_every_n_epoch": None}
        notes.append(f"eval_steps: {evaluated} updates are {every} rollouts.")
    elif given.look("eval_strategy", "no") == "steps":
        notes.append(f"eval_steps: {evaluated} of the run became once per epoch; set trainer.val_check_interval.")
    if devices > 1:
        trainer["strategy"] = "ddp"
    return (trainer | {"max_steps": steps} if steps > 0 else trainer), run_dir


def _data(given: _Options, model: dict[str, Any], sizes: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    path, name = given.take("dataset_name"), given.take("dataset_config")
    if path is None:
        raise ValueError("dataset_name is missing: there are no prompts.")
    source = {"path": path, "streaming": given.take("dataset_streaming", False)} | ({"name": name} if name else {})
    templates = given.take("chat_template_kwargs")
    source |= {"template_kwargs": templates} if templates else {}
    source["chat_template"] = False
    notes.append(
        "prompts.chat_template: false, because TRL leaves prompts that are strings as they are and renders only "
        "conversations. Remove it to make a string the user's turn."
    )
    train, test = given.take("dataset_train_split", "train"), given.take("dataset_test_split", "test")
    sampling = {"max_new_tokens": sizes["length"], "temperature": given.take("temperature", 1.0)}
    for option, default in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = given.take(option, default)
        if value not in (None, default):
            sampling[option] = value
    regex = given.take("vllm_structured_outputs_regex")
    sampling |= {"regex": regex} if regex else {}
    extra = given.take("generation_kwargs")
    sampling |= {"extra": extra} if extra else {}
    data: dict[str, Any] = {
        "prompts": {**source, "split": train},
        "shuffle": given.take("shuffle_dataset", True),
        "rewards": _rewards(given, notes),
        "reward_weights": given.take("reward_weights"),
        "engine": _engine(given, model, notes),
        "sampling": sampling,
        "group_size": sizes["group"],
        "prompts_per_rollout": sizes["prompts"],
        "rollouts_per_epoch": None,
    }
    strategy, asked = given.take("eval_strategy", "no"), given.take("do_eval", False)
    evaluated = strategy != "no" or asked
    batch, group = given.take("per_device_eval_batch_size", 8), given.take("num_generations_eval") or sizes["group"]
    if evaluated:
        data |= {"eval_prompts": {**source, "split": test}, "eval_group_size": group}
        data["eval_batch_size"] = max(batch // group, 1)
    return data


def _rewards(given: _Options, notes: list[str]) -> list[Any]:
    names = _several(given.take("reward_funcs")) or []
    if given.take("reward_model_name_or_path"):
        notes.append("reward_model_name_or_path: goes under model.init_args.reward_models: [{name: ..., path: ...}].")
    if not names:
        notes.append("reward_funcs: none are given; name yours under data.init_args.rewards.")
    own = [name for name in names if name not in REWARDS]
    if own:
        notes.append(
            f"reward_funcs: {', '.join(own)}: completions are strings here, where TRL hands conversations lists of "
            "messages; `log_extra`, `log_metric` and the data set's columns come by the same names."
        )
    return [REWARDS.get(name, name) for name in names]


def _engine(given: _Options, model: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    used, mode = given.take("use_vllm", False), given.take("vllm_mode", "colocate")
    url = given.take("vllm_server_base_url")
    host, port = given.take("vllm_server_host", "0.0.0.0"), given.take("vllm_server_port", 8000)
    arguments = {
        "gpu_memory_utilization": given.take("vllm_gpu_memory_utilization", 0.3),
        "tensor_parallel_size": given.take("vllm_tensor_parallel_size", 1),
        "max_model_len": given.take("vllm_max_model_length"),
        "sleep_level": 2 if given.take("vllm_enable_sleep_mode", False) else 0,
    }
    corrected = given.take("vllm_importance_sampling_correction", True)
    level, _, kind = str(given.take("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
    cap = given.take("vllm_importance_sampling_cap", 3.0)  # its name before TRL 1
    high, low = given.take("vllm_importance_sampling_clip_max", cap), given.take("vllm_importance_sampling_clip_min")
    if not used:
        return _part("TransformersEngine")
    if corrected:
        bounds = {"high": 1e9 if high is None else max(high, 1.0), "low": low or 0.0}
        model["loss"] = _part("OffPolicyCorrection", loss=model["loss"], level=level, mode=kind, **bounds)
    if mode == "server":
        notes.append("vllm_mode: server: start the servers and share a folder as docs/scaling.md says.")
        return _part("ServerEngine", urls=[url or f"http://{host}:{port}"], shared_folder="outputs/weights")
    if arguments["tensor_parallel_size"] > 1:
        arguments["in_process"] = False
    return _part("VLLMEngine", **arguments)
