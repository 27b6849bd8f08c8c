"""`lightrl export`: any checkpoint as a Hugging Face folder, an adapter, or a plain checkpoint; one CPU process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import REDACTED
from lightrl.compat.arguments import require_model_folder

# No types of torch here: the parser would import them for `lightrl export --help`.
State = Mapping[str, Any]


def export(
    checkpoint: str = "",
    output: str = "",
    what: Literal["model", "adapter", "critic", "checkpoint"] = "model",
    model: str | None = None,
) -> None:
    """Export a checkpoint of any strategy, on any number of ranks, to a Hugging Face folder or a plain checkpoint.

    Reads plain checkpoints and folders of FSDP2 and DeepSpeed ZeRO (these hold pickled objects: only read what you
    trust). The models are built in the host's memory.

    Args:
        checkpoint: File or folder that a run saved.
        output: Folder to write; with `what: checkpoint` a file.
        what: `model` is the policy (or the reward model of a reward run) as transformers and vLLM load it, LoRA merged;
            `adapter` the LoRA adapter alone, as peft and vLLM load it; `critic` the value model as a token
            classification model with one label, whose output at token t is the value of the state after it;
            `checkpoint` a plain checkpoint that resumes under any strategy, on any number of ranks.
        model: Folder or hub name of the model that training began with. Defaults to the run's own.

    Raises:
        ValueError: There is no complete checkpoint, it lacks what is asked for, or its weights are not finite.
    """
    if not checkpoint or not output:
        raise ValueError("lightrl export needs --checkpoint (what a run saved) and --output (where to write).")
    target = Path(output)
    if not Path(checkpoint).exists():
        raise ValueError(f"checkpoint={checkpoint!r}: does not exist. Pass what a run wrote.")
    if target.is_dir() if what == "checkpoint" else target.is_file():
        raise ValueError(f"output={output!r}: what={what} cannot replace it. Name another path.")
    if target.resolve() == Path(checkpoint).resolve():
        raise ValueError(f"output={output!r}: is the checkpoint. Name another path.")
    if model is not None:
        require_model_folder(model)
    import torch

    from lightrl.checkpoints.files import atomic_folder, atomic_write
    from lightrl.checkpoints.plugin import first_nonfinite, require_finite, without_secrets
    from lightrl.checkpoints.reading import read_checkpoint

    loaded = read_checkpoint(checkpoint)
    require_finite(first_nonfinite(loaded["state_dict"]), target)
    if what == "checkpoint":
        with atomic_write(target, checksum=True) as file:
            torch.save(without_secrets(loaded), file)  # an earlier version's may hold some
    else:
        with atomic_folder(target) as folder:
            _export_model(loaded, folder, what, model)
    print(f"Wrote {target}")


def _export_model(checkpoint: Mapping[str, Any], folder: Path, what: str, path: str | None) -> None:
    from lightrl.data.templates import load_tokenizer
    from lightrl.models.folders import save_hf_folder
    from lightrl.models.reward import RewardModel

    stored = checkpoint.get("lightrl", {}).get("models", {})
    state = checkpoint["state_dict"]
    if "reward_model" in stored and what == "critic":
        raise ValueError("what=critic: this is a checkpoint of a reward model; it has no critic. Export the model.")
    role = "reward_model" if "reward_model" in stored else "critic" if what == "critic" else "actor"
    shared = "actor.value_head.weight" in state
    spec = _spec(stored, "actor" if role == "critic" and shared else role, path)
    tokenizer_path = checkpoint["lightrl"].get("tokenizer") or spec.path
    if tokenizer_path != spec.path:
        load_tokenizer(tokenizer_path)  # raises before a model is built
    if what == "adapter":
        _export_adapter(spec, state, shared, folder)
    elif role == "critic":
        _export_critic(spec, state, folder, tokenizer_path, shared)
    else:
        if role == "actor":
            model: Any = _policy(spec, state, shared)
        else:
            model = _filled(RewardModel.for_training(spec), state, "reward_model.", spec)
        save_hf_folder(
            model,
            _weights(model),
            folder,
            tokenizer_path=tokenizer_path,
            processor_path=spec.path,
            chat_template=spec.chat_template,
        )


def _spec(stored: Mapping[str, Any], role: str, path: str | None) -> Any:
    """What the model is built from: what the checkpoint records, with another path if one is given."""
    from dataclasses import replace

    from lightrl.models.spec import LoraSpec, ModelSpec

    values = stored.get(role)
    if values is None and (path is None or (role == "critic" and stored)):
        why = "has none" if stored else "does not record how it is built. Pass --model"
        raise ValueError(f"what={role}: the checkpoint {why}.")
    values = dict(values or {})
    # Secrets are not in a checkpoint; the hub's tools find theirs in the environment.
    values["kwargs"] = {name: value for name, value in values.get("kwargs", {}).items() if value != REDACTED}
    lora = values.pop("lora", None)
    spec = ModelSpec(**{**values, "path": path or values["path"], "gradient_checkpointing": False})
    if path is None and spec.path.startswith("live "):
        raise ValueError(f"model=None: the run was given a {spec.path} from Python. Pass the folder it was saved to.")
    require_model_folder(spec.path)
    return replace(spec, lora=None if lora is None else LoraSpec(**{**lora, "quantize_4bit": False, "adapter": None}))


def _policy(spec: Any, state: State, shared: bool) -> Any:
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.policy import PolicyModel

    return _filled(PolicyModel(load_causal_lm(spec, trainable=True), value_head=shared), state, "actor.", spec)


def _filled(model: Any, state: State, prefix: str, spec: Any) -> Any:
    """The model with the checkpoint's tensors of that prefix; a ValueError if they are not those that it trains."""
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    needed = {name for name, p in model.named_parameters() if p.requires_grad or spec.random_init}
    known = model.state_dict()
    wrong = sorted(needed - own.keys()) + sorted(own.keys() - known.keys())
    wrong += [name for name, value in own.items() if name in known and known[name].shape != value.shape]
    if wrong:
        raise ValueError(
            f"model={spec.path!r}: does not fit the checkpoint's {prefix[:-1]}; {len(wrong)} tensors differ, such as "
            f"{wrong[0]}. Pass the model that training began with (--model)."
        )
    model.load_state_dict(own, strict=False)
    return model


def _weights(model: Any) -> dict[str, Any]:
    from lightrl.models.lora import named_hf_weights

    return {name: tensor.detach().clone() for name, tensor in named_hf_weights(model)}


def _export_adapter(spec: Any, state: State, shared: bool, folder: Path) -> None:
    from safetensors.torch import save_file

    from lightrl.models.lora import adapter_config, named_adapter_weights

    if spec.lora is None:
        raise ValueError("what=adapter: the policy was trained without LoRA. Export what=model.")
    policy = _policy(spec, state, shared)
    config = {**adapter_config(policy, spec.lora), "base_model_name_or_path": spec.path}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in named_adapter_weights(policy)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _export_critic(spec: Any, state: State, folder: Path, tokenizer_path: str, shared: bool) -> None:
    from types import SimpleNamespace

    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from lightrl.models.policy import ValueModel

    if not shared and not any(name.startswith("critic.") for name in state):
        raise ValueError("what=critic: the checkpoint has no critic. Export the model.")
    critic: Any = _policy(spec, state, True) if shared else _filled(ValueModel.from_spec(spec), state, "critic.", spec)
    body = critic.lm if shared else critic.backbone
    config = body.config.get_text_config()
    config.num_labels = 1
    new: Any = AutoModelForTokenClassification.from_config(config)
    prefix = "" if shared else f"{new.base_model_prefix}."
    weights = {f"{prefix}{name}": tensor for name, tensor in _weights(SimpleNamespace(lm=body)).items()}
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head.")}
    head = critic.value_head
    weights |= {"score.weight": head.weight.detach(), "score.bias": head.bias.detach()}
    if weights.keys() != dict(new.named_parameters()).keys():
        raise ValueError(f"what=critic: token classification of {config.model_type} has no linear `score` with a bias.")
    new.load_state_dict(weights, strict=False)
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(folder)
