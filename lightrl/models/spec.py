"""Model specifications, as plain data for YAML and the command line."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Layout = Literal["auto", "padded", "packed", "shared_prefix"]


@dataclass
class LoraSpec:
    """A low-rank adapter: `W + alpha / r * B A` with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    The reference model is the base without its adapter. Exports have merged weights. The engine determines what is
    synchronized (`VLLMEngine.lora_sync`).

    Args:
        r: Rank of the update, at least 1.
        alpha: Scale of the update, above 0. The update is multiplied by alpha / r.
        target_modules: Names of linear layers to adapt. "all-linear" adapts all except the output head and blocks of
            experts in a mixture-of-experts model.
        quantize_4bit: Store W in 4-bit NF4 (QLoRA, https://arxiv.org/abs/2305.14314). Requires CUDA and bitsandbytes.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    quantize_4bit: bool = False


@dataclass
class ModelSpec:
    """A model and how to load it.

    Args:
        path: Model directory or model ID.
        dtype: Dtype of the parameters: float32, bfloat16, float16, or float64. Defaults to float32. Keep trained models
            in float32 and set the Trainer's precision to bf16-mixed. A reference or reward model may use bfloat16.
        random_init: Initialize weights randomly with the run's seed. The directory then needs only a config.json.
        lora: Train a low-rank adapter. Defaults to training the weights.
        gradient_checkpointing: Recompute activations in the backward pass. Saves memory, about a third slower.
        freeze: Parts not to train, as module names or patterns of full parameter names. "visual" freezes everything
            inside the module; "*embed_tokens*" uses `*` as a wildcard.
        layout: Layout of sequences in a forward pass. `shared_prefix` computes each shared prefix in a micro-batch
            once, `packed` removes padding, and `padded` is the plain rectangle. `auto` uses the most efficient one that
            the model supports.
        chat_template: Chat template as Jinja text or file (.jinja). Defaults to the tokenizer's. "training" extends the
            tokenizer's with tools if it has none, and keeps the reasoning of earlier turns. Exported with the model.
        kwargs: Additional arguments of `from_pretrained`, such as trust_remote_code or revision, except its dtype.

    Attributes:
        live: Loaded model of `ModelSpec.of`, which is trained in place. None if the model is loaded from `path`.

    Raises:
        ValueError: The frozen weights of an adapter would be random.
    """

    path: str
    dtype: str | None = None
    random_init: bool = False
    lora: LoraSpec | None = None
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    layout: Layout = "auto"
    chat_template: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    live: Any = field(default=None, init=False, repr=False, compare=False)
    _written = 0  # fingerprint of the live model's weights in `path`

    def __post_init__(self) -> None:
        if self.random_init and self.lora is not None:
            raise ValueError("ModelSpec.random_init with lora: the frozen weights would be random. Remove one of them.")
        if self.chat_template == "training":
            from lightrl.models.chat_templates import training_template_of

            known = {name: self.kwargs[name] for name in ("revision", "trust_remote_code") if name in self.kwargs}
            self.chat_template = training_template_of(os.path.expanduser(self.path), **known)
        elif self.chat_template is not None:
            self.chat_template = read_chat_template(self.chat_template)

    @property
    def name(self) -> str:
        """Name for messages: the path, or the class of a loaded model."""
        return self.path if self.live is None else f"live {type(self.live).__name__}"

    @classmethod
    def given(cls, model: Any) -> ModelSpec:
        """Returns the spec of a path or a spec."""
        return model if isinstance(model, ModelSpec) else cls(os.fspath(model))

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **settings: Any) -> ModelSpec:
        """Returns the spec of a loaded model, which is trained in place and not copied.

        Model and tokenizer are written to a temporary directory of this process, and the model again when a run begins
        with other weights. Everything else that needs the initial weights is loaded from there (engines, reference,
        critic). Checkpoints don't record the model's origin: pass the model again to resume, or a directory to
        `lightrl export --model`.

        Args:
            model: A whole, unquantized causal language model of transformers, on any device. Frozen parameters stay
                frozen. Dropout is disabled, and the language head also returns log-probs.
            tokenizer: Its tokenizer, or the processor of a vision-language model.
            settings: Other arguments of `ModelSpec`, except path, dtype (the model's), and random_init.

        Raises:
            ValueError: `model` has adapters or quantized weights.
        """
        kind = type(model).__name__
        if getattr(model, "peft_config", None) or getattr(model, "is_quantized", False):
            raise ValueError(
                f"model={kind}: has adapters or quantized weights. Use the base in float32, bfloat16, or float16 with "
                "a LoraSpec."
            )
        spec = cls(kind, dtype=str(model.dtype).removeprefix("torch."), **settings)
        spec.path, spec.live = tempfile.mkdtemp(prefix=f"lightrl-{kind}-"), model
        weakref.finalize(spec, _remove, spec.path, os.getpid())
        spec.write_live()
        tokenizer.save_pretrained(spec.path)
        return spec

    def write_live(self) -> None:
        """Writes a loaded model to `path` if its weights have changed, such as by an SFT warm start."""
        from lightrl.distributed.strategies import fingerprint
        from lightrl.models.folders import save_model

        now = fingerprint(self.live)
        if not getattr(self.live, "peft_config", None) and self._written != now:
            save_model(self.live, self.path)
            self._written = now


def _remove(folder: str, process: int) -> None:
    """Removes a directory, unless called in a fork of the process that created it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def read_chat_template(given: str) -> str:
    """Returns the Jinja text of a chat template, passed as text or as a file."""
    return given if "{{" in given or "{%" in given else Path(given).expanduser().read_text(encoding="utf-8")
