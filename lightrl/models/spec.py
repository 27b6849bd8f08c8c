"""What a model is made from, as plain data that YAML and the command line can fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Layout", "LoraSpec", "ModelSpec"]

Layout = Literal["auto", "padded", "packed", "shared_prefix"]
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class LoraSpec:
    """A low-rank adapter: `W + alpha / r * B A` with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    The base without its adapter serves as the reference model. Exported is the merged weight; what is synced is up to
    the engine (`VLLMEngine.lora_sync`).

    Args:
        r: rank of the update, at least 1.
        alpha: scale of the update, which is multiplied by alpha / r.
        dropout: on the adapter's input, in [0, 1). Above 0 log-probs are noisy, and with them the policy ratio.
        target_modules: names of linear layers that get an adapter; "all-linear" is all but the output head.
        quantize_4bit: keep W in 4-bit NF4 (QLoRA, https://arxiv.org/abs/2305.14314); needs CUDA and bitsandbytes.

    Raises:
        ValueError: a value is out of its range.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"
    quantize_4bit: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"lora.r={self.r}: the rank must be at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout={self.dropout}: must be in [0, 1).")


@dataclass
class ModelSpec:
    """A model and how it is held.

    Args:
        path: folder with a Hugging Face model, or its name on the hub.
        dtype: of the parameters: float32, bfloat16, float16 or float64; null is float32. Trained models are best left
            in float32 and run under the Trainer's bf16-mixed; a reference or reward model may be bfloat16.
        random_init: draw the weights from the configuration's initialiser with the run's seed; the folder then
            needs a config.json only.
        lora: train a low-rank adapter in place of the weights; null trains the weights.
        gradient_checkpointing: recompute each block's activations in the backward pass: less memory, about a third
            more time.
        freeze: what is not trained: names of parts, such as "visual" (all within), or patterns of whole parameter names
            in which `*` matches anything, such as "*embed_tokens*". After the first sync it is not sent again.
        layout: how sequences go through the model. auto takes the cheapest that the model supports: shared_prefix
            computes a group's prompt once, packed leaves padding out, padded is the plain rectangle.
        cpu_kernels: whether the forward on a CPU uses LightRL's fused norms, SwiGLU and rotary embedding and its
            attention; null is yes unless LIGHTRL_CPU_KERNELS=0. On other devices it has no effect.
        kwargs: further arguments of `from_pretrained`, such as trust_remote_code or revision.

    Raises:
        ValueError: a value is not one of those above, or two exclude each other.
    """

    path: str
    dtype: str | None = None
    random_init: bool = False
    lora: LoraSpec | None = None
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    layout: Layout = "auto"
    cpu_kernels: bool | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"ModelSpec.dtype={self.dtype!r}: give one of {', '.join(DTYPES)}, or null for float32.")
        if self.layout not in ("auto", "padded", "packed", "shared_prefix"):
            raise ValueError(f"ModelSpec.layout={self.layout!r}: must be auto, padded, packed or shared_prefix.")
        if self.random_init and self.lora is not None:
            raise ValueError(
                "ModelSpec.random_init with lora: an adapter on random frozen weights is of no use; drop one."
            )
