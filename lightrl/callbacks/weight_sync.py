"""Keeps the engine's weights equal to the trainer's, and proves it before anything is sampled."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightrl.engines.base import Engine, StaleWeightsError
from lightrl.models.multimodal import harmless_id
from lightrl.models.placeholders import placeholder_ids

__all__ = ["WeightSync"]

TOLERANCE = {"float32": 5e-4, "bfloat16": 0.15, "float16": 0.05}


class WeightSync(Callback):
    """Pushes the policy's weights to the engine right before it generates, whenever they have changed.

    Lazy, because no single Lightning hook precedes every generation (a resumed run skips `on_train_epoch_start`,
    validation comes at its own time): the data module asks `ensure_synced`, and a push happens if the engine's
    `policy_version` is not the module's. Nothing is stored in a checkpoint, so a resumed run pushes first. An engine
    that takes adapters gets the adapter alone.

    After a push a *canary* asks engine and trainer for the log-probs of a few fixed tokens. If they differ by more
    than `tolerance` the run stops: training on samples of stale or half-loaded weights fails silently otherwise.

    Args:
        canary: whether to ask after each push.
        tolerance: largest allowed mean absolute difference in nats. None takes 5e-4 for a float32 engine, 0.15 for
            bfloat16, 0.05 for float16.
        num_sequences: sequences of the canary.
        num_tokens: tokens in each.

    Raises:
        StaleWeightsError: from `ensure_synced`, with the gap.
    """

    def __init__(
        self, canary: bool = True, tolerance: float | None = None, num_sequences: int = 2, num_tokens: int = 16
    ) -> None:
        for name, value, low in (("num_sequences", num_sequences, 1), ("num_tokens", num_tokens, 2)):
            if value < low:
                raise ValueError(f"WeightSync.{name}={value}: must be at least {low}.")
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"WeightSync.tolerance={tolerance}: must be above 0, or null for the dtype's own.")
        self.canary, self.tolerance = canary, tolerance
        self.num_sequences, self.num_tokens = num_sequences, num_tokens
        self.last_gap: float | None = None
        """Mean absolute log-prob gap in nats of the last canary."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fills the data module's hook."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(datamodule, "ensure_synced"):
            raise ValueError(
                f"WeightSync needs a data module with an engine (RolloutDataModule), not {type(datamodule).__name__}: "
                "remove the callback or change the data module."
            )
        datamodule.ensure_synced = lambda: self.ensure_synced(pl_module, datamodule.engine)

    def ensure_synced(self, pl_module: Any, engine: Engine) -> None:
        """Pushes if the versions differ. Collective: every rank calls it at the same time."""
        if engine.policy_version == pl_module.policy_version:
            return
        with torch.no_grad():
            if engine.takes_adapter:
                engine.load_adapter(*pl_module.policy_adapter(), policy_version=pl_module.policy_version)
            elif engine.takes_parts and engine.policy_version >= 0 and _some_frozen(pl_module):
                # What is frozen is there from an earlier push.
                trained = pl_module.named_policy_weights(trained_only=True)
                some: Any = {"partial": True}
                engine.load_weights(trained, policy_version=pl_module.policy_version, **some)
            else:
                engine.load_weights(pl_module.named_policy_weights(), policy_version=pl_module.policy_version)
            if self.canary:
                self._check(pl_module, engine)

    def _check(self, pl_module: Any, engine: Engine) -> None:
        vocabulary = pl_module.actor.lm.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        length = min(self.num_tokens, engine.max_model_len - 1)
        tokens = torch.randint(vocabulary, (self.num_sequences, length), generator=generator)
        for placeholder in placeholder_ids(pl_module.actor.lm.config).values():  # stands for what is not there
            tokens[tokens == placeholder] = harmless_id(pl_module.actor.lm.config)
        theirs = torch.tensor(engine.logprobs(tokens.tolist()))
        ours = pl_module.token_logprobs(tokens.to(pl_module.device)).cpu()[:, 1:]
        gaps = (ours - theirs).abs()
        self.last_gap = float(gaps.mean())
        tolerance = self.tolerance or TOLERANCE.get(engine.dtype or "float32", TOLERANCE["bfloat16"])
        worst = bool(pl_module.all_max(torch.tensor(float(not self.last_gap <= tolerance))))
        if worst:
            version, engine.policy_version = engine.policy_version, -1
            raise StaleWeightsError(
                f"After pushing the weights of policy version {version} the engine's log-probs differ from the "
                f"trainer's by {self.last_gap:.2e} on average (at most {gaps.max():.2e}; allowed: {tolerance:g} on "
                "average). The engine holds stale or incomplete weights. Check that its dtype matches the trainer's "
                "precision; raise WeightSync.tolerance only if the gap is rounding."
            )


def _some_frozen(pl_module: Any) -> bool:
    """Whether the policy has weights that no update changes; else a push of all can be checked by name."""
    return not all(parameter.requires_grad for parameter in pl_module.actor.lm.parameters())
