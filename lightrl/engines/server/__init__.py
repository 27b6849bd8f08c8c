"""`ServerEngine`: rollouts from inference servers on other machines."""

from lightrl.engines.server.engine import ServerEngine

__all__ = ["ServerEngine"]
