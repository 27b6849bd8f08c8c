"""The models of a checkpoint, built in the host's memory and written without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lightrl.checkpoints.redaction import REDACTED
from lightrl.data.templates import load_tokenizer
from lightrl.models.loading import load_causal_lm, save_hf_folder
from lightrl.models.lora import adapter_config, named_adapter_weights, named_hf_weights
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.reward import RewardModel
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.records.arguments import require_model_folder


def export_model(checkpoint: Mapping[str, Any], folder: Path, what: str, path: str | None) -> None:
    """Writes the model, adapter or critic of a checkpoint.

    Args:
        checkpoint: as `read_checkpoint` gives it.
        folder: where to write; it exists.
        what: as of `lightrl.export.export`: `model`, `adapter` or `critic`.
        path: folder or hub name of the model that training began with; None where the run found it.

    Raises:
        ValueError: the checkpoint does not hold what is asked for, or does not fit the model.
    """
    stored = checkpoint.get("lightrl", {}).get("models", {})
    state = checkpoint["state_dict"]
    if "reward_model" in stored and what == "critic":
        raise ValueError("what=critic: this is a checkpoint of a reward model; it has no critic.")
    role = "reward_model" if "reward_model" in stored else "critic" if what == "critic" else "actor"
    shared = "actor.value_head.weight" in state
    spec = _spec(stored, "actor" if role == "critic" and shared else role, path)
    tokenizer_path = checkpoint["lightrl"].get("tokenizer") or spec.path
    if tokenizer_path != spec.path:
        load_tokenizer(tokenizer_path)  # says what is wrong before a model is built
    if what == "adapter":
        _export_adapter(_policy(spec, state, shared), spec, folder)
    elif role == "critic":
        _export_critic(spec, state, folder, tokenizer_path, shared=shared)
    else:
        built = _filled(RewardModel.for_training(spec), state, "reward_model.", spec) if role != "actor" else None
        built = built or _policy(spec, state, shared)
        save_hf_folder(
            built,
            dict(_cloned(built)),
            folder,
            tokenizer_path=tokenizer_path,
            processor_path=spec.path,
            chat_template=spec.chat_template,
        )


def _spec(stored: Mapping[str, Any], role: str, path: str | None) -> ModelSpec:
    """What the model is built from: what the checkpoint says, with another path where one is given."""
    values = stored.get(role)
    if values is None and (path is None or (role == "critic" and stored)):
        raise ValueError(
            f"The checkpoint does not say how its {role} is built: "
            + ("it has none." if stored else "it is not one of LightRL's, or an old one; give --model.")
        )
    values = dict(values or {})
    # A checkpoint does not hold secrets; the hub's tools find theirs in the environment.
    values["kwargs"] = {name: value for name, value in values.get("kwargs", {}).items() if value != REDACTED}
    lora = values.pop("lora", None)
    spec = ModelSpec(**{**values, "path": path or values["path"], "gradient_checkpointing": False})
    if path is None and values["path"].startswith("live "):
        raise ValueError(
            f"The run was given a {values['path']} from Python: give --model, which its `save_pretrained` wrote."
        )
    require_model_folder(spec.path)
    return replace(spec, lora=None if lora is None else LoraSpec(**{**lora, "quantize_4bit": False, "adapter": None}))


def _policy(spec: ModelSpec, state: Mapping[str, Tensor], shared: bool) -> PolicyModel:
    return _filled(PolicyModel(load_causal_lm(spec, trainable=True), value_head=shared), state, "actor.", spec)


def _filled(model: Any, state: Mapping[str, Tensor], prefix: str, spec: ModelSpec) -> Any:
    """The model with the checkpoint's tensors of that prefix.

    Raises:
        ValueError: they are not those that this model trains.
    """
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    needed = {name for name, p in model.named_parameters() if p.requires_grad or spec.random_init}
    known = model.state_dict()
    wrong = sorted(needed - own.keys()) + sorted(own.keys() - known.keys())
    wrong += [name for name, value in own.items() if name in known and known[name].shape != value.shape]
    if wrong:
        raise ValueError(
            f"The checkpoint's {prefix[:-1]} does not fit the model {spec.path!r}: {len(wrong)} tensors are missing, "
            f"unknown or of another shape, such as {wrong[0]}. Give the model that training began with (--model)."
        )
    model.load_state_dict(own, strict=False)
    return model


def _cloned(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().clone()) for name, tensor in named_hf_weights(model)]


def _export_adapter(policy: PolicyModel, spec: ModelSpec, folder: Path) -> None:
    from safetensors.torch import save_file

    if spec.lora is None:
        raise ValueError("what=adapter: the policy was trained without LoRA; export what=model.")
    config = {**adapter_config(policy, spec.lora), "base_model_name_or_path": spec.path}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in named_adapter_weights(policy)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _export_critic(
    spec: ModelSpec, state: Mapping[str, Tensor], folder: Path, tokenizer_path: str, *, shared: bool
) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    if not shared and not any(name.startswith("critic.") for name in state):
        raise ValueError("what=critic: the checkpoint's module has no critic.")
    critic: Any = _policy(spec, state, True) if shared else _filled(ValueModel.from_spec(spec), state, "critic.", spec)
    body = critic.lm if shared else critic.backbone
    config = body.config.get_text_config()
    config.num_labels = 1
    new: Any = AutoModelForTokenClassification.from_config(config)
    prefix = "" if shared else f"{new.base_model_prefix}."
    weights = {f"{prefix}{name}": tensor for name, tensor in _cloned(SimpleNamespace(lm=body))}
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head.")}
    head: nn.Linear = critic.value_head
    weights |= {"score.weight": head.weight.detach(), "score.bias": head.bias.detach()}
    if weights.keys() != dict(new.named_parameters()).keys():
        raise ValueError(
            f"what=critic: transformers' token classification for {config.model_type} is built differently (no linear "
            "`score` with a bias on the backbone), so this critic cannot be written as one."
        )
    new.load_state_dict(weights, strict=False)
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(folder)
