"""LightRL's worker extension, with the backend of `transfer_backend.py` registered on import."""

from __future__ import annotations

import tests.engines.transfer_backend  # noqa: F401
from lightrl.engines.server.worker import ServerWorker

__all__ = ["ServerWorker"]
