"""`lightrl export`: converts a checkpoint to a Hugging Face model, an adapter, or a plain checkpoint on one CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import REDACTED
from lightrl.compat.arguments import require_model_folder

# No torch types here: the parser would import torch for `lightrl export --help`.
State = Mapping[str, Any]


def export(
    checkpoint: str = "",
    output: str = "",
    what: Literal["model", "adapter", "critic", "checkpoint"] = "model",
    model: str | None = None,
) -> None:
    """Export a checkpoint as a Hugging Face model, a LoRA adapter, or a plain checkpoint.

    Supports checkpoints of every strategy and number of ranks: plain files, and directories of FSDP2 and DeepSpeed
    ZeRO. The latter contain pickled objects, so only export checkpoints you trust. Models are built in host memory.

    Args:
        checkpoint: Checkpoint file or directory.
        output: Directory to write, or a file with `what: checkpoint`.
        what: What to export. `model`: the policy, or the reward model of a reward run, with LoRA merged, for
            transformers and vLLM. `adapter`: the LoRA adapter, for peft and vLLM. `critic`: the value model as a token
            classification model with one label; its output at token t is the value of the state after t. `checkpoint`:
            a plain checkpoint that resumes under any strategy and number of ranks.
        model: Model directory or model ID that training started from. Defaults to the one in the checkpoint.

    Raises:
        ValueError: The checkpoint is incomplete, lacks the requested part, or has non-finite weights.
    """
    if not checkpoint or not output:
        raise ValueError("lightrl export requires --checkpoint (to read) and --output (to write). Pass both.")
    target = Path(output)
    if not Path(checkpoint).exists():
        raise ValueError(f"checkpoint={checkpoint!r}: does not exist. Pass a checkpoint that a run saved.")
    if target.is_dir() if what == "checkpoint" else target.is_file():
        raise ValueError(f"output={output!r}: exists and can't be replaced with what={what}. Use another path.")
    if target.resolve() == Path(checkpoint).resolve():
        raise ValueError(f"output={output!r}: is the checkpoint itself. Use another path.")
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
            torch.save(without_secrets(loaded), file)  # checkpoints of earlier versions may contain some
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
        raise ValueError("what=critic: the checkpoint of a reward model has no critic. Use what=model.")
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
    """The model's specification from the checkpoint, with `path` overridden if given."""
    from dataclasses import replace

    from lightrl.models.spec import LoraSpec, ModelSpec

    values = stored.get(role)
    if values is None and (path is None or (role == "critic" and stored)):
        why = f"has no {role}. Export another part" if stored else "doesn't record its model. Pass --model"
        raise ValueError(f"what={role}: the checkpoint {why}.")
    values = dict(values or {})
    # Checkpoints contain no secrets; huggingface_hub reads its token from the environment.
    values["kwargs"] = {name: value for name, value in values.get("kwargs", {}).items() if value != REDACTED}
    lora = values.pop("lora", None)
    spec = ModelSpec(**{**values, "path": path or values["path"], "gradient_checkpointing": False})
    if path is None and spec.path.startswith("live "):
        raise ValueError(
            f"model=None: the run trained a {spec.path} built in Python. Pass the directory of its weights."
        )
    require_model_folder(spec.path)
    return replace(spec, lora=None if lora is None else LoraSpec(**{**lora, "quantize_4bit": False, "adapter": None}))


def _policy(spec: Any, state: State, shared: bool) -> Any:
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.policy import PolicyModel

    return _filled(PolicyModel(load_causal_lm(spec, trainable=True), value_head=shared), state, "actor.", spec)


def _filled(model: Any, state: State, prefix: str, spec: Any) -> Any:
    """Loads the checkpoint's tensors with that prefix. Raises a ValueError if they don't match the trained ones."""
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    needed = {name for name, p in model.named_parameters() if p.requires_grad or spec.random_init}
    known = model.state_dict()
    wrong = sorted(needed - own.keys()) + sorted(own.keys() - known.keys())
    wrong += [name for name, value in own.items() if name in known and known[name].shape != value.shape]
    if wrong:
        raise ValueError(
            f"model={spec.path!r}: doesn't match the checkpoint's {prefix[:-1]}; {len(wrong)} tensors differ, such as "
            f"{wrong[0]}. Pass the model that training started from (--model)."
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
        raise ValueError("what=adapter: the policy was trained without LoRA. Use what=model.")
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
        raise ValueError("what=critic: the checkpoint has no critic. Use what=model.")
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
        raise ValueError(
            f"what=critic: {config.model_type}'s token classifier has no linear `score` with a bias. Use what=model."
        )
    new.load_state_dict(weights, strict=False)
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(folder)
