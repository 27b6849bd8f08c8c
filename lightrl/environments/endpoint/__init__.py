"""The endpoint: agents written with any SDK talk to the policy as to a model server, and are trained as they are."""

from lightrl.environments.endpoint.program import AgentProgram

__all__ = ["AgentProgram"]
