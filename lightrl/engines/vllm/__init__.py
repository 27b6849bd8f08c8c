"""`VLLMEngine`: vLLM embedded in the run."""

from lightrl.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
