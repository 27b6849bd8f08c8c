"""The embedded vLLM engine."""

from lightrl.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
