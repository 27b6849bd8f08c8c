"""The server engine, which samples on separate inference servers."""

from lightrl.engines.server.engine import ServerEngine

__all__ = ["ServerEngine"]
