"""`lightrl export`: converts a checkpoint to a Hugging Face model or an adapter on one CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightrl.checkpoints.redaction import REDACTED

# No torch types here: the parser would import torch for `lightrl export --help`.
State = Mapping[str, Any]


def export(
    checkpoint: str = "", output: str = "", what: Literal["model", "adapter"] = "model", model: str | None = None
) -> None:
    """Export a checkpoint as a Hugging Face model or a LoRA adapter.

    Supports checkpoints of every strategy and number of ranks: plain files, and directories of FSDP2 and DeepSpeed
    ZeRO. The latter contain pickled objects, so only export checkpoints you trust. Models are built in host memory.

    Args:
        checkpoint: Checkpoint file or directory.
        output: Directory to write.
        what: What to export. `model`: the policy, or the reward model of a reward run, with LoRA merged, for
            transformers and vLLM. `adapter`: the LoRA adapter, for peft and vLLM.
        model: Model directory or model ID that training started from. Defaults to the one in the checkpoint.

    Raises:
        ValueError: The checkpoint is incomplete, lacks the requested part, or has non-finite weights.
    """
    if not checkpoint or not output:
        raise ValueError("lightrl export requires --checkpoint (to read) and --output (to write). Pass both.")
    target = Path(output)
    if not Path(checkpoint).exists():
        raise ValueError(f"checkpoint={checkpoint!r}: does not exist. Pass a checkpoint that a run saved.")
    if target.resolve() == Path(checkpoint).resolve():
        raise ValueError(f"output={output!r}: same path as the checkpoint. Use another path.")
    from lightrl.checkpoints.checkpoint_io import first_nonfinite, read_checkpoint, require_finite
    from lightrl.checkpoints.files import atomic_folder

    loaded = read_checkpoint(checkpoint)
    require_finite(first_nonfinite(loaded["state_dict"]), target)
    with atomic_folder(target) as folder:
        _export_model(loaded, folder, what, model)
    print(f"Wrote {target}")


def _export_model(checkpoint: Mapping[str, Any], folder: Path, what: str, path: str | None) -> None:
    from lightrl.models.folders import save_hf_folder
    from lightrl.models.policy import named_hf_weights
    from lightrl.models.reward import RewardModel

    stored, state = checkpoint["lightrl"]["models"], checkpoint["state_dict"]
    role = "reward_model" if "reward_model" in stored else "actor"
    spec = _spec(stored[role], path)
    if what == "adapter":
        _export_adapter(spec, state, folder)
        return
    if role == "actor":
        model: Any = _policy(spec, state)
    else:
        model = _filled(RewardModel.for_training(spec), state, "reward_model.", spec)
    save_hf_folder(
        model,
        {name: tensor.detach().clone() for name, tensor in named_hf_weights(model)},
        folder,
        tokenizer_path=checkpoint["lightrl"].get("tokenizer") or spec.path,
        processor_path=spec.path,
        chat_template=spec.chat_template,
    )


def _spec(stored: Mapping[str, Any], path: str | None) -> Any:
    """The model's specification from the checkpoint, with `path` overridden if given."""
    from lightrl.models.spec import LoraSpec, ModelSpec

    values = {**stored, "path": path or stored["path"], "gradient_checkpointing": False}
    # Checkpoints contain no secrets; huggingface_hub reads its token from the environment.
    values["kwargs"] = {name: value for name, value in values.get("kwargs", {}).items() if value != REDACTED}
    if values.get("lora") is not None:
        values["lora"] = LoraSpec(**{**values["lora"], "quantize_4bit": False})
    return ModelSpec(**values)


def _policy(spec: Any, state: State) -> Any:
    from lightrl.models.loading import load_causal_lm
    from lightrl.models.policy import PolicyModel
    from lightrl.models.reward import new_value_head

    lm = load_causal_lm(spec, trainable=True)
    policy = PolicyModel(lm)
    if "actor.value_head.weight" in state:
        policy.value_head = new_value_head(lm)
    return _filled(policy, state, "actor.", spec)


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


def _export_adapter(spec: Any, state: State, folder: Path) -> None:
    from lightrl.models.lora import adapter_config, named_adapter_weights, save_adapter

    if spec.lora is None:
        raise ValueError("what=adapter: the policy was trained without LoRA. Use what=model.")
    policy = _policy(spec, state)
    config = {**adapter_config(policy, spec.lora), "base_model_name_or_path": spec.path}
    save_adapter(folder, named_adapter_weights(policy), config)
