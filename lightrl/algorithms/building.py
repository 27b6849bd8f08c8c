"""Builds the models and parameter groups of an RL module, and selects the weights that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import nn

from lightrl.algorithms.hooks import may_move_reference
from lightrl.algorithms.settings import CriticSpec
from lightrl.distributed.states import fingerprint
from lightrl.models.loading import return_router_logits
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.spec import ModelSpec


def build_policy(spec: ModelSpec, critic: CriticSpec | None, aux_loss: bool, in_shards: bool) -> PolicyModel:
    """Builds the trained policy, with a value head if the critic shares its backbone."""
    shared = critic is not None and critic.shared
    actor = PolicyModel.from_spec(spec, trainable=True, in_shards=in_shards, value_head=shared)
    if aux_loss:
        return_router_logits(actor.lm)
    return actor


def build_critic(critic: CriticSpec | None, actor: ModelSpec, in_shards: bool) -> ValueModel | None:
    """Builds the critic; None if disabled, or if it shares the policy's backbone."""
    if critic is None or critic.shared:
        return None
    return ValueModel.from_spec(critic.model or actor, in_shards=in_shards)


def build_reference(reference: ModelSpec | None, spec: ModelSpec, in_shards: bool) -> PolicyModel | None:
    """Builds the frozen reference; None if it is the policy without its adapter."""
    if reference is None and spec.lora is not None:
        return None
    reference = reference or replace(spec, lora=None, gradient_checkpointing=False)
    return PolicyModel.from_spec(reference, trainable=False, in_shards=in_shards)


def build_reward_models(specs: list[Any]) -> nn.ModuleDict:
    """Builds the reward models, by name."""
    if not specs:
        return nn.ModuleDict()
    from lightrl.models.reward import RewardModel

    return nn.ModuleDict({spec.name: RewardModel.from_spec(spec) for spec in specs})


def parameter_groups(
    actor: PolicyModel, critic: ValueModel | None, critic_spec: CriticSpec | None
) -> list[dict[str, Any]]:
    """Returns the optimizer's groups, named `policy` and `critic`."""
    head = set(actor.value_head.parameters()) if actor.value_head is not None else set()
    policy = [p for p in actor.parameters() if p.requires_grad and p not in head]
    values = [*head] if critic is None else [p for p in critic.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": policy, "name": "policy"}]
    if values and critic_spec is not None:
        lr = {} if critic_spec.lr is None else {"lr": critic_spec.lr}
        groups.append({"params": values, "name": "critic", **lr})
    return groups


class WeightsAtStart:
    """Records the initial state of the reference and frozen parameters, so that checkpoints can omit unchanged ones."""

    def __init__(self, module: Any) -> None:
        reference = module.reference
        self._reference = None if reference is None else fingerprint(reference)
        self._frozen = {name: fingerprint([p]) for name, p in _own_parameters(module) if not p.requires_grad}

    def has(self, name: str, parameter: nn.Parameter, in_parts: bool) -> bool:
        """Whether a frozen parameter has been frozen from the start and is unchanged (not checked for shards)."""
        before = self._frozen.get(name)
        return before is not None and (in_parts or fingerprint([parameter]) == before)

    def reference_moved(self, module: Any, strategy: Strategy | None) -> bool:
        """Whether the reference differs from the model it was built from.

        FSDP2 asks for names before it loads, so there the result is True if anything may change the reference.
        """
        if self._reference is None:
            return False
        if not isinstance(strategy, ModelParallelStrategy):
            return fingerprint(module.reference) != self._reference
        own = type(module).__module__.startswith("lightrl.")
        return not own or any(may_move_reference(callback) for callback in module.trainer.callbacks)


def needed_weights(module: Any, state: Mapping[str, Any], start: WeightsAtStart | None) -> dict[str, Any]:
    """Returns the entries of a state dict that can't be reloaded from their source.

    Omits reward models, teachers, an unchanged reference, and parameters of policy and critic that were built frozen
    (the base of a LoRA run, `freeze`). Randomly initialized or changed parameters are kept.
    """
    try:
        strategy: Strategy | None = module.trainer.strategy
    except RuntimeError:  # built without a trainer
        strategy = None
    in_parts = isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)
    frozen: set[str] = set()
    if not module.actor_spec.random_init:
        named = [(name, p) for name, p in _own_parameters(module) if not p.requires_grad]
        frozen = {name for name, p in named if start is None or start.has(name, p, in_parts)}
    moved = start is not None and start.reference_moved(module, strategy)
    dropped = ("reward_models.", "teachers.") if moved else ("reward_models.", "teachers.", "reference.")
    return {name: value for name, value in state.items() if not name.startswith(dropped) and name not in frozen}


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = module.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in named if not name.startswith(("reward_models.", "reference.", "teachers."))]
