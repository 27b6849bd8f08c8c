"""How a rollout comes about: the data module, episodes, and when groups are started and handed out."""

from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.environments import AgentEpisode, EnvironmentEpisode

__all__ = ["AgentEpisode", "EnvironmentEpisode", "RolloutDataModule"]
