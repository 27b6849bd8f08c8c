"""The reference scoring server."""

from lightrl.rewards.server.serve import serve_reward

__all__ = ["serve_reward"]
