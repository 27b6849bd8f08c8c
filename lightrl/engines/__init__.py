"""Engines, which sample from a copy of the policy. Importing this package does not import vLLM or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.engines.base import (
        Engine,
        EngineDiedError,
        EngineRestartedError,
        ExtraKeys,
        StaleWeightsError,
        SteppingEngine,
    )
    from lightrl.engines.server.engine import ServerEngine
    from lightrl.engines.server.teacher import ServerTeacher
    from lightrl.engines.transformers.engine import TransformersEngine
    from lightrl.engines.vllm.engine import VLLMEngine
    from lightrl.records import EngineContext

__all__ = [
    "Engine",
    "EngineContext",
    "EngineDiedError",
    "EngineRestartedError",
    "ExtraKeys",
    "ServerEngine",
    "ServerTeacher",
    "StaleWeightsError",
    "SteppingEngine",
    "TransformersEngine",
    "VLLMEngine",
]

_LAZY = {  # to add an engine, add it here, in `__all__`, and in the imports above
    "EngineContext": "lightrl.records",
    "ServerEngine": "lightrl.engines.server.engine",
    "ServerTeacher": "lightrl.engines.server.teacher",
    "TransformersEngine": "lightrl.engines.transformers.engine",
    "VLLMEngine": "lightrl.engines.vllm.engine",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY.get(name, "lightrl.engines.base")), name)
