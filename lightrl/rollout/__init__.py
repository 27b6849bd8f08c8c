"""How a rollout comes about: the data module, and when groups are started and handed out."""

from lightrl.rollout.datamodule import RolloutDataModule

__all__ = ["RolloutDataModule"]
