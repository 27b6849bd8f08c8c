"""`TransformersEngine`: plain PyTorch, the numerical reference."""

from lightrl.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
