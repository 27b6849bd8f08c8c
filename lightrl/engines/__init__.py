"""Engines: own a copy of the policy's weights and sample from it. Importing this package loads no engine's library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.engines.base import (
    Engine,
    EngineContext,
    EngineDiedError,
    EngineRestartedError,
    StaleWeightsError,
)

if TYPE_CHECKING:
    from lightrl.engines.server import ServerEngine
    from lightrl.engines.transformers import TransformersEngine
    from lightrl.engines.vllm import VLLMEngine

__all__ = [
    "Engine",
    "EngineContext",
    "EngineDiedError",
    "EngineRestartedError",
    "ServerEngine",
    "StaleWeightsError",
    "TransformersEngine",
    "VLLMEngine",
]

_LAZY = {
    "ServerEngine": "lightrl.engines.server",
    "TransformersEngine": "lightrl.engines.transformers",
    "VLLMEngine": "lightrl.engines.vllm",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
