"""What a checkpoint of an RL module holds: what was trained, what callbacks moved, and the random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightrl.modules import random_states

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = ["load_extras", "model_specs", "save_extras", "trained_state"]


def trained_state(module: PPOLightningModule, state: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what can be loaded from where it came from.

    Dropped: the reward models; the reference, unless it moves; and frozen parameters of actor and critic (the base of
    a LoRA run, `freeze`d layers), unless they were drawn at random, so that nothing else has them.
    """
    frozen: set[str] = set()
    if not module.actor_spec.random_init:
        named = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
    if module.reference_moves:
        frozen = {name for name in frozen if not name.startswith("reference.")}
    dropped = ("reward_models.",) if module.reference_moves else ("reward_models.", "reference.")
    return {name: value for name, value in state.items() if not name.startswith(dropped) and name not in frozen}


def model_specs(module: Any) -> dict[str, Any]:
    """How the module's trained models are built, as plain data: all that `lightrl export` needs beside the weights."""
    specs = {"reward_model": getattr(module, "model_spec", None), "actor": getattr(module, "actor_spec", None)}
    critic = getattr(module, "critic_spec", None)
    if critic is not None and not critic.shared:
        specs["critic"] = critic.model or module.actor_spec
    return {role: asdict(spec) for role, spec in specs.items() if spec is not None}


def save_extras(module: PPOLightningModule, checkpoint: dict[str, Any]) -> None:
    """Adds the module's class, the coefficients that callbacks move, and the random generators' states. Collective."""
    checkpoint["lightrl"] = {
        "class": type(module).__name__,
        "models": model_specs(module),
        "seed": module.seed,
        "kl_coef": float(module.kl_coef),
        "num_skipped_updates": int(module.num_skipped_updates),
        "rng": random_states.collect(),
    }


def load_extras(module: PPOLightningModule, checkpoint: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Takes over what `save_extras` stored.

    Returns:
        states of the random generators, to be restored when training starts; None outside training.

    Raises:
        ValueError: the checkpoint was written by another class of module, or lacks parameters that are trained here.
    """
    stored = checkpoint.get("lightrl", {})
    if stored.get("class") != type(module).__name__:
        raise ValueError(
            f"The checkpoint was written by {stored.get('class', 'something other than LightRL')}, not by "
            f"{type(module).__name__}: resume with the same class_path, or start anew from its exported model folder."
        )
    missing: list[str] = []
    if "state_dict" in checkpoint:  # elsewhere the strategy loads sharded weights itself, and checks them
        own = {name for name in module.state_dict() if not name.startswith("reference.")}  # it may move from now on
        missing = sorted(own - checkpoint["state_dict"].keys())
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} trained parameters of this module, such as {missing[0]}: resume with "
            "the settings of actor and critic (lora, freeze, critic.shared) that it was written with."
        )
    if not module.trainer.training:
        return None
    module.seed = stored["seed"]
    module.kl_coef = stored["kl_coef"]
    module.num_skipped_updates = stored["num_skipped_updates"]
    rng: list[dict[str, Any]] = stored["rng"]
    return rng
