"""A reference that follows the policy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import at_least, fraction
from lightrl.distributed import strategies


class ReferenceSync(RLCallback):
    """Moves the reference of the KL term towards the policy: `ref = alpha * policy + (1 - alpha) * ref`.

    The KL then bounds the speed of the policy and no longer its distance from where it began. Checkpoints hold the
    moved reference. With LoRA the merged weights are taken; the reference must then be a model of its own
    (`reference: <path>`), since the base under the adapter does not move.

    Args:
        every_n_rollouts: rollouts between two moves, at least 1.
        alpha: how far it moves, in (0, 1]; 1 copies the policy.

    Raises:
        ValueError: a value is out of range; in `setup`, the module has no reference model.

    Source: TR-DPO, https://arxiv.org/abs/2404.09656, eq. 5-6; TRL's `sync_ref_model`, whose defaults are 512 optimizer
        steps and 0.6, counts steps where this counts rollouts.
    """

    moves_reference = True
    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, every_n_rollouts: int = 100, alpha: float = 0.6) -> None:
        self.every_n_rollouts = at_least("ReferenceSync.every_n_rollouts", every_n_rollouts, 1)
        self.alpha = fraction("ReferenceSync.alpha", alpha, "(0, 1]")

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuses a module that has no reference to move."""
        super().setup(trainer, pl_module, stage)
        if pl_module.kl is None:
            raise ValueError("callback ReferenceSync with kl=None: there is no reference to move. Set kl or drop it.")
        if (pl_module.reference_spec or pl_module.actor_spec).lora is not None:
            where = "actor.lora and reference=None" if pl_module.reference_spec is None else "reference.lora"
            raise ValueError(
                f"callback ReferenceSync with {where}: the reference is the base under the adapter and cannot move. "
                f"Give it a model of its own: reference={pl_module.actor_spec.path!r}."
            )

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Moves the reference every N rollouts; every rank together, tensor by tensor."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_rollouts:
            return
        targets = dict(pl_module.reference.lm.named_parameters())
        for name, tensor in pl_module.named_policy_weights():
            strategies.blend_parameter(targets[name], tensor, self.alpha)
