"""A run without models: rollouts written by hand, a module that only logs."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.records import Rollouts, pad_rows
from lightrl.rollout.learner import RolloutLearner
from tests.rows import as_experience


def make_rollouts(prompts: list[str], completions: list[list[str]], rewards: list[list[float]]) -> Rollouts:
    """A group per prompt; one token per character. Prompt and completion lengths are those of the strings."""
    rows = [(p, text) for p, texts in enumerate(completions) for text in texts]
    tokens = [[1] * len(prompts[p]) + [2] * len(text) for p, text in rows]
    mask = [[0] * len(prompts[p]) + [1] * len(text) for p, text in rows]
    response = pad_rows(mask, 0, torch.bool)
    flat = torch.tensor([reward for group in rewards for reward in group])
    return Rollouts(
        token_ids=pad_rows(tokens, 0, torch.long),
        attention_mask=pad_rows([[1] * len(row) for row in tokens], 0, torch.bool),
        response_mask=response,
        engine_logprobs=torch.where(response, -0.5, 0.0),
        group_ids=torch.tensor([p for p, _ in rows]),
        rewards=flat,
        reward_parts={"exact": flat.clone()},
        truncated=torch.tensor([len(text) > 4 for _, text in rows]),
        policy_version=3,
        prompts=[prompts[p] for p, _ in rows],
        completions=[text for _, text in rows],
        columns={"answer": [f"answer {p}" for p, _ in rows]},
    )


class Loader:
    """The same rollouts again and again."""

    def __init__(self, batches: list[Rollouts]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        yield from self.batches


class LoggingModule(RolloutLearner):
    """Calls LightRL's hooks and logs as the real modules do; learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False

    @property
    def policy_version(self) -> int:
        return 0

    def named_policy_weights(self) -> Any:
        return iter(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        self._call("on_rollout_scored", rollouts)
        # The token at position t has advantage t, so that the mean over a completion is known.
        positions = torch.arange(rollouts.token_ids.shape[1]).float().expand(rollouts.token_ids.shape)
        experience = as_experience(
            rollouts,
            trajectory_ids=rollouts.trajectory_ids,
            engine_logprobs=rollouts.engine_logprobs,
            advantages=positions * rollouts.response_mask,
            rewards=rollouts.rewards,
            valid=rollouts.rewards.isfinite(),
        )
        self._call("on_experience_made", experience)
        self.optimizers().step()
        metrics = {"reward/mean": float(rollouts.rewards.mean()), "kl/ref": 0.25}
        self.log_dict(metrics, batch_size=len(rollouts))
        return metrics

    def _call(self, hook: str, payload: Any) -> None:
        for callback in self.trainer.callbacks:
            if hasattr(callback, hook):
                getattr(callback, hook)(self.trainer, self, payload)

    def validation_step(self, rollouts: Rollouts, batch_idx: int) -> None:
        self.log("eval/reward", rollouts.rewards.mean(), batch_size=len(rollouts))

    def predict_step(self, rollouts: Rollouts, batch_idx: int) -> list[dict[str, Any]]:
        from lightrl.algorithms.evaluation import records

        return records(rollouts)
