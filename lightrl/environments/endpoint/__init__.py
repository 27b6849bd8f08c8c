"""The endpoint: agents written with any SDK use the policy as a model server, and are trained unchanged."""

from lightrl.environments.endpoint.program import AgentProgram

__all__ = ["AgentProgram"]
