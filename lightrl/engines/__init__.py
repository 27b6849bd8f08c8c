"""Engines, which sample from a copy of the policy. Importing this package does not import vLLM or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.engines.base import Engine, EngineDiedError, StaleWeightsError, SteppingEngine
    from lightrl.engines.server.engine import ServerEngine, ServerTeacher
    from lightrl.engines.transformers.engine import TransformersEngine
    from lightrl.engines.vllm.engine import VLLMEngine
    from lightrl.records import EngineContext

__all__ = [
    "Engine",
    "EngineContext",
    "EngineDiedError",
    "ServerEngine",
    "ServerTeacher",
    "StaleWeightsError",
    "SteppingEngine",
    "TransformersEngine",
    "VLLMEngine",
]

# To add an engine, add its module here and its name above.
_MODULES = ("base", "vllm.engine", "transformers.engine", "server.engine")
__getattr__ = lazy_names(__name__, _MODULES, __all__)
