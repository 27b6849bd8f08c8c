"""Model specifications, as plain data for YAML and the command line."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightrl.compat.arguments import above, at_least, fraction, one_of

Layout = Literal["auto", "padded", "packed", "shared_prefix"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
ADAPTER_FILE = "adapter_config.json"
PLAIN_INIT = (None, True, False, "gaussian")
OTHER_ADAPTERS = (
    *("alpha_pattern", "exclude_modules", "layers_to_transform", "lora_bias", "modules_to_save", "rank_pattern"),
    *("target_parameters", "trainable_token_indices", "use_dora", "use_rslora"),
)
"""Settings of PEFT's LoRA that change more than one update with one rank and scale per linear layer."""


@dataclass
class LoraSpec:
    """A low-rank adapter: `W + alpha / r * B A` with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    The reference model is the base without its adapter, or with the initial `adapter`. Exports have merged weights. The
    engine determines what is synchronized (`VLLMEngine.lora_sync`).

    Args:
        r: Rank of the update, at least 1.
        alpha: Scale of the update, above 0. The update is multiplied by alpha / r.
        dropout: Dropout of the adapter's input, in [0, 1). Above 0, log-probs and policy ratios are noisy.
        target_modules: Names of linear layers to adapt. "all-linear" adapts all except the output head and blocks of
            experts in a mixture-of-experts model.
        quantize_4bit: Store W in 4-bit NF4 (QLoRA, https://arxiv.org/abs/2305.14314). Requires CUDA and bitsandbytes.
        adapter: Directory of a PEFT LoRA adapter to continue training. It determines r, alpha, and target_modules; its
            dropout and base are ignored. Defaults to a new adapter with B = 0.

    Raises:
        ValueError: A value is out of range, or `adapter` is not a plain LoRA adapter or has other settings.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"
    quantize_4bit: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            self._take_over(_adapter_config(self.adapter))
        at_least("lora.r", self.r, 1)
        above("lora.alpha", self.alpha, note=", or the adapter has no effect")
        fraction("lora.dropout", self.dropout, "[0, 1)")

    def _take_over(self, config: dict[str, Any]) -> None:
        """Uses the values of the adapter's config, unless other values were set."""
        targets = config["target_modules"]
        theirs = {
            "r": config["r"],
            "alpha": float(config["lora_alpha"]),
            "target_modules": targets if isinstance(targets, str) else sorted(targets),
        }
        defaults = {f.name: f.default for f in fields(self)}
        for name, value in theirs.items():
            if getattr(self, name) not in (value, defaults[name]):
                raise ValueError(
                    f"lora.{name}={getattr(self, name)!r}: lora.adapter={self.adapter!r} has {value!r}. Remove {name}."
                )
            setattr(self, name, value)


@dataclass
class ModelSpec:
    """A model and how to load it.

    Args:
        path: Model directory or model ID. For the directory of a PEFT LoRA adapter, its base model is loaded with the
            adapter as `lora.adapter`.
        dtype: Dtype of the parameters: float32, bfloat16, float16, or float64. Defaults to float32. Keep trained models
            in float32 and set the Trainer's precision to bf16-mixed. A reference or reward model may use bfloat16.
        random_init: Initialize weights randomly with the run's seed. The directory then needs only a config.json.
        lora: Train a low-rank adapter. Defaults to training the weights.
        gradient_checkpointing: Recompute activations in the backward pass. Saves memory, about a third slower.
        freeze: Parts not to train, as module names or patterns of full parameter names. "visual" freezes everything
            inside the module; "*embed_tokens*" uses `*` as a wildcard. Sent to the engine only with the first sync.
        layout: Layout of sequences in a forward pass. `shared_prefix` computes each shared prefix in a micro-batch
            once, `packed` removes padding, and `padded` is the plain rectangle. `auto` uses the most efficient one that
            the model supports.
        chat_template: Chat template as Jinja text or file (.jinja). Defaults to the tokenizer's. "training" extends the
            tokenizer's with tools if it has none, and keeps the reasoning of earlier turns. Exported with the model.
        kwargs: Additional arguments of `from_pretrained`, such as trust_remote_code or revision, except its dtype.
        long_rope: For LongRoPE models (Phi-3, Phi-4-mini), use the factors for long sequences for every sequence, as
            vLLM does if its `max_model_len` exceeds `original_max_position_embeddings`. Required for sequences longer
            than that. No effect on other models.

    Attributes:
        live: Loaded model of `ModelSpec.of`, which is trained in place. None if the model is loaded from `path`.

    Raises:
        ValueError: A value is out of range, two are incompatible, or the template is invalid.
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
    long_rope: bool = False
    live: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if os.path.isfile(os.path.join(os.path.expanduser(self.path), ADAPTER_FILE)):
            self.lora = replace(self.lora or LoraSpec(), adapter=self.path)
            self.path = _base_of(self.path)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"ModelSpec.dtype={self.dtype!r}: is not supported. Use one of {', '.join(DTYPES)}.")
        for name in {"dtype", "torch_dtype"} & self.kwargs.keys():
            raise ValueError(f"ModelSpec.kwargs: {name}={self.kwargs[name]} has no effect there. Set `dtype` instead.")
        one_of("ModelSpec.layout", self.layout, *get_args(Layout))
        if self.random_init and self.lora is not None:
            raise ValueError("ModelSpec.random_init with lora: the frozen weights would be random. Remove one of them.")
        if self.chat_template == "training":
            from lightrl.models.chat_templates import training_template_of

            known = {name: self.kwargs[name] for name in ("revision", "trust_remote_code") if name in self.kwargs}
            self.chat_template = training_template_of(os.path.expanduser(self.path), **known)
        elif self.chat_template is not None:
            self.chat_template = read_chat_template(self.chat_template, "chat_template")

    @property
    def name(self) -> str:
        """Name for messages: the path, or the class of a loaded model."""
        return self.path if self.live is None else f"live {type(self.live).__name__}"

    @classmethod
    def given(cls, model: Any, tokenizer: Any = None, *, argument: str = "actor") -> ModelSpec:
        """Returns the spec of a path, a spec, or a loaded model with its tokenizer.

        Raises:
            ValueError: `model` is none of these, or a tokenizer is passed with a model that has one.
        """
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            return cls.of(model, tokenizer)
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__}: with {argument}={getattr(model, 'path', model)!r}, the model's "
                "tokenizer is used. Set the data module's `tokenizer` for another one."
            )
        if isinstance(model, ModelSpec):
            return model
        if isinstance(model, str | os.PathLike) and os.fspath(model):
            return cls(os.fspath(model))
        raise ValueError(
            f"{argument}={str(model)[:60]!r}: is not a model, but a {type(model).__name__}. Use a model directory, a "
            "model ID, a ModelSpec, or a causal language model of transformers (for a PEFT model, its base with a "
            "LoraSpec)."
        )

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **settings: Any) -> ModelSpec:
        """Returns the spec of a loaded model, which is trained in place and not copied.

        Model and tokenizer are written once to a temporary directory of this process. Everything else that needs the
        initial weights is loaded from there (engines, reference, critic). Checkpoints don't record the model's origin:
        pass the model again to resume, or a directory to `lightrl export --model`.

        Args:
            model: A whole, unquantized causal language model of transformers, on any device. Frozen parameters stay
                frozen. Dropout is disabled, and the language head also returns log-probs.
            tokenizer: Its tokenizer, or the processor of a vision-language model.
            settings: Other arguments of `ModelSpec`, except path, dtype (the model's), and random_init.

        Raises:
            ValueError: `model` is not such a model, has adapters, or the tokenizer is missing.
        """
        from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

        kind = type(model).__name__
        refused = sorted({"path", "dtype", "random_init"} & settings.keys())
        if refused:
            raise ValueError(
                f"ModelSpec.of({refused[0]}={settings[refused[0]]!r}): the model determines it. Remove it."
            )
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ValueError(f"model={kind}: is not a causal language model of transformers. Use one with a head.")
        if getattr(model, "peft_config", None) or getattr(model, "is_quantized", False):
            raise ValueError(
                f"model={kind}: has adapters or quantized weights. Use the base in float32, bfloat16, or float16 with "
                "a LoraSpec (with `adapter` for an existing one)."
            )
        if any(p.is_meta for p in model.parameters()) or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError(f"model={kind}: is on the meta device or several devices. Load it whole on one device.")
        if not isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
            raise ValueError(
                f"tokenizer={tokenizer!r}: is not the tokenizer of {kind}. Use AutoTokenizer.from_pretrained."
            )
        spec = cls(kind, dtype=str(model.dtype).removeprefix("torch."), **settings)  # validates before writing
        spec.path = folder = tempfile.mkdtemp(prefix=f"lightrl-{kind}-")
        weakref.finalize(spec, _remove, folder, os.getpid())
        # Each process has a separate directory; transformers would write only on the first rank.
        model.should_save_on_this_rank = lambda is_main_process: is_main_process
        try:
            model.save_pretrained(folder)
        finally:
            del model.should_save_on_this_rank
        tokenizer.save_pretrained(folder)
        spec.live = model
        return spec


@dataclass
class RewardModelSpec:
    """A frozen reward model.

    Args:
        name: Name in metrics: letters, digits, and underscores.
        path: Model directory or model ID of a sequence-classification model with one label. A model for images and text
            must have a backbone `model` and a linear layer `score` (see `scalar_class`).
        weight: Weight of its reward in the sum.
        dtype: Dtype of the weights. Defaults to float32; bfloat16 halves the memory.
        tokenizer: "own" scores text with the model's tokenizer. "policy" scores the policy's token IDs and pixels,
            which requires the same vocabulary. Prompts with images need "policy".
        chat_template: Jinja text or its file, with which the "own" tokenizer renders [user: prompt, assistant:
            completion]. "default" is the tokenizer's. Defaults to scoring prompt + completion as plain text.
        max_length: Maximum text length in tokens. Longer texts lose their start. Defaults to the model's limit.
        layout: See `ModelSpec`.
        long_rope: See `ModelSpec`.
        kwargs: Additional arguments of `from_pretrained`.
        labels: Score only examples with one of these values in `label_column`. Defaults to all.
        label_column: Dataset column with the label.
    """

    name: str
    path: str
    weight: float = 1.0
    dtype: str | None = None
    tokenizer: str = "own"
    chat_template: str | None = None
    max_length: int | None = None
    layout: Layout = "auto"
    kwargs: dict[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    label_column: str = "label"
    long_rope: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"reward_models.name={self.name!r}: is not a name. Use letters, digits, and underscores.")
        at_least(f"reward_models.{self.name}.weight", self.weight, float("-inf"))
        one_of("reward_models.tokenizer", self.tokenizer, "own", "policy")
        if self.chat_template not in (None, "default"):
            self.chat_template = read_chat_template(str(self.chat_template), f"reward_models.{self.name}.chat_template")
        if self.tokenizer == "policy" and self.chat_template is not None:
            raise ValueError("reward_models.chat_template: tokenizer='policy' scores token IDs. Remove one of them.")

    def applies(self, columns: Mapping[str, Sequence[Any]]) -> list[bool] | None:
        """Returns which rows it scores, by their columns; None for all."""
        if self.labels is None:
            return None
        if self.label_column not in columns:
            raise ValueError(
                f"reward_models.{self.name}.label_column={self.label_column!r}: not in the data. Use one of "
                f"{sorted(columns)}."
            )
        return [label in self.labels for label in columns[self.label_column]]


def _remove(folder: str, process: int) -> None:
    """Removes a directory, unless called in a fork of the process that created it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def read_chat_template(given: str, argument: str) -> str:
    """Returns the Jinja text of a chat template, passed as text or as a file.

    Raises:
        ValueError: The file doesn't exist, or the text is not valid Jinja. The message has `argument` and the line.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text, source = given, "the text"
    if "{{" not in given and "{%" not in given:
        file, source = Path(given).expanduser(), repr(given)
        if not file.is_file():
            raise ValueError(
                f"{argument}={given[:80]!r}: is neither Jinja text ({{% ... %}} or {{{{ ... }}}}) nor an existing file "
                f"(relative to {Path.cwd()}). Fix the path."
            )
        text = file.read_text(encoding="utf-8")
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{argument}={given[:80]!r}: has no Jinja, so it would ignore all messages. Use a template.")
    try:
        render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{argument}: {source} is not valid Jinja in line {error.lineno}: {error.message}") from error
    except Exception:  # it needs more than this test conversation: roles, tools, or variables
        return text
    return text


def _adapter_config(folder: str) -> dict[str, Any]:
    file = Path(folder).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"lora.adapter={folder!r}: has no {ADAPTER_FILE}. Use a local directory written by PEFT.")
    config: dict[str, Any] = {"r": 8, "lora_alpha": 8, **json.loads(file.read_text())}
    other = [name for name in OTHER_ADAPTERS if config.get(name)]
    other += [f"bias={config['bias']}"] if config.get("bias", "none") != "none" else []
    init = config.get("init_lora_weights")
    other += [f"init_lora_weights={init}"] if init not in PLAIN_INIT else []  # PiSSA and others change the base
    kind = config.get("peft_type")
    other += [f"peft_type={kind}"] if kind != "LORA" else []
    other += [] if config.get("target_modules") else ["no target_modules"]
    if other:
        raise ValueError(
            f"lora.adapter={folder!r}: has {', '.join(other)}, but training supports only plain LoRA. Merge it into "
            "its base (PEFT's merge_and_unload) and use that directory."
        )
    return config


def _base_of(adapter: str) -> str:
    base = _adapter_config(adapter).get("base_model_name_or_path") or ""
    local = base[:1] in (".", "/", "~") or base.count("/") > 1
    if not base or (local and not Path(base).expanduser().is_dir()):
        raise ValueError(
            f"lora.adapter={adapter!r}: its base {base!r} does not exist here. Set the base: "
            f"{{path: BASE, lora: {{adapter: {adapter}}}}}."
        )
    return base
