"""A custom algorithm in Python that overrides one hook.

After `lightrl fit --config configs/quickstart/sft.yaml`: python examples/custom_hook.py [MODEL_FOLDER]
"""

import sys
from dataclasses import replace

from lightning.pytorch import Trainer

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.data import ArithmeticRows, PromptSource
from lightrl.engines import TransformersEngine
from lightrl.records import SamplingParams
from lightrl.rewards import ExactAnswer
from lightrl.rollout import RolloutDataModule


class PositiveOnlyGRPO(GRPOLightningModule):
    """GRPO that learns from completions better than their group's mean and ignores the others."""

    def compute_advantages(self, rollouts, outputs):
        found = super().compute_advantages(rollouts, outputs)
        return replace(found, advantages=found.advantages.clamp(min=0))


def main(model: str = "outputs/quickstart/sft/model", **trainer_arguments) -> Trainer:
    data = RolloutDataModule(
        prompts=PromptSource(rows=ArithmeticRows()),
        rewards=[ExactAnswer()],
        engine=TransformersEngine(),
        sampling=SamplingParams(max_new_tokens=5),
        group_size=8,
        prompts_per_rollout=32,
    )
    module = PositiveOnlyGRPO(model, kl=None)
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, **trainer_arguments}
    trainer = Trainer(**{"callbacks": [WeightSync()], **settings})
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
