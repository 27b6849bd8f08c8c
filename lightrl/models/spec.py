"""What models are loaded from, as plain data that YAML and the command line can fill."""

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
"""Settings of peft's LoRA that make it something else than one update of one rank and scale per linear layer."""


@dataclass
class LoraSpec:
    """A low-rank adapter: `W + alpha / r * B A` with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    The base without its adapter, or with `adapter` as it was, is the reference model. Exports have the merged weight;
    what is synced depends on the engine (`VLLMEngine.lora_sync`).

    Args:
        r: Rank of the update, at least 1.
        alpha: Scale of the update, which is multiplied by alpha / r; above 0.
        dropout: On the adapter's input, in [0, 1). Above 0, log-probs and the policy ratio are noisy.
        target_modules: Names of linear layers that get an adapter; "all-linear" is all except the output head and the
            parts of a mixture of experts that hold the experts, which are not linear layers.
        quantize_4bit: Keep W in 4-bit NF4 (QLoRA, https://arxiv.org/abs/2305.14314); needs CUDA and bitsandbytes.
        adapter: Folder of a peft LoRA adapter to start with; r, alpha, and target_modules are then its own, its dropout
            is ignored. The base is the spec's `path`, whatever the folder names. null starts at B = 0.

    Raises:
        ValueError: A value is out of its range, or `adapter` is not a plain LoRA adapter or has other settings.
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
        """Sets the values of the adapter's configuration, unless others were asked for."""
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
                    f"lora.{name}={getattr(self, name)!r}: lora.adapter={self.adapter!r} has {value!r}. "
                    f"Leave {name} out."
                )
            setattr(self, name, value)


@dataclass
class ModelSpec:
    """A model and how it is loaded.

    Args:
        path: Model directory or model ID. The folder of a peft LoRA adapter stands for the base that it names, with
            `lora.adapter` on it.
        dtype: Of the parameters: float32, bfloat16, float16, or float64; null is float32. Keep trained models in
            float32 and run them under the Trainer's bf16-mixed; a reference or reward model may be bfloat16.
        random_init: Initialize the weights randomly with the run's seed; the folder then needs only a config.json.
        lora: Train a low-rank adapter instead of the weights; null trains the weights.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        freeze: Parts that are not trained: names, such as "visual" (everything within), or patterns of whole parameter
            names in which `*` matches anything, such as "*embed_tokens*". They are sent with the first sync only.
        layout: Arrangement of sequences in a forward pass. `shared_prefix` computes each prefix that sequences of a
            micro-batch share once, `packed` removes padding, `padded` is the plain rectangle. `auto` uses the
            cheapest that the model supports.
        chat_template: Jinja text, or a file of it (.jinja), instead of the tokenizer's own chat template. "training" is
            the own template with tools if it has none, and with the thoughts of earlier turns. Exported.
        kwargs: Further arguments of `from_pretrained`, such as trust_remote_code or revision; not its dtype.
        long_rope: With LongRoPE (Phi-3, Phi-4-mini), use the factors for long sequences for every row, as vLLM does if
            its `max_model_len` exceeds `original_max_position_embeddings`. Rows longer than that are an error without
            it. No effect on other models.

    Attributes:
        live: The model of `ModelSpec.of`, which is trained itself; None if the model is loaded from `path`.

    Raises:
        ValueError: A value is not one of those above, two exclude each other, or the template is not valid.
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
        """For messages: the path, or the class of a live model."""
        return self.path if self.live is None else f"live {type(self.live).__name__}"

    @classmethod
    def given(cls, model: Any, tokenizer: Any = None, *, argument: str = "actor") -> ModelSpec:
        """The spec of a path, a spec, or a live model with its tokenizer.

        Raises:
            ValueError: `model` is none of these, or a tokenizer comes with a model that has its own.
        """
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            return cls.of(model, tokenizer)
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__}: with {argument}={getattr(model, 'path', model)!r} the folder's "
                "own is used. Set the data module's `tokenizer` for another one."
            )
        if isinstance(model, ModelSpec):
            return model
        if isinstance(model, str | os.PathLike) and os.fspath(model):
            return cls(os.fspath(model))
        raise ValueError(
            f"{argument}={str(model)[:60]!r} of type {type(model).__name__}: is not a model. Use a model directory, a "
            "model ID, a ModelSpec, or a causal language model of transformers (of a peft model its base, with a "
            "LoraSpec)."
        )

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **settings: Any) -> ModelSpec:
        """The spec of a live model, which is trained in place and not copied.

        Model and tokenizer are written once, now, to a temporary folder of this process, from which everything else
        that starts with these weights is loaded (engines, the reference, a critic). Checkpoints don't know where the
        model came from: pass the model again to resume, or a folder to `lightrl export --model`.

        Args:
            model: A whole, unquantized causal language model of transformers, on any device. Its frozen parameters stay
                frozen; dropout is switched off, and its language head also returns log-probs.
            tokenizer: Its tokenizer, or the processor of a model that takes images.
            settings: Other arguments of `ModelSpec`, except path, dtype (the model's), and random_init.

        Raises:
            ValueError: `model` is not such a model, or has adapters, or the tokenizer is missing.
        """
        from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

        kind = type(model).__name__
        refused = sorted({"path", "dtype", "random_init"} & settings.keys())
        if refused:
            raise ValueError(f"ModelSpec.of({refused[0]}={settings[refused[0]]!r}): is the model's own. Remove it.")
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ValueError(f"model={kind}: is not a causal language model of transformers. Use one with a head.")
        if getattr(model, "peft_config", None) or getattr(model, "is_quantized", False):
            raise ValueError(
                f"model={kind}: has adapters or quantized weights. Use the base in float32, bfloat16, or float16 and a "
                "LoraSpec (with `adapter` for an existing one)."
            )
        if any(p.is_meta for p in model.parameters()) or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError(f"model={kind}: is on the meta device or several devices. Load it whole on one device.")
        if not isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
            raise ValueError(
                f"tokenizer={tokenizer!r}: a live {kind} needs its own. Use AutoTokenizer.from_pretrained."
            )
        spec = cls(kind, dtype=str(model.dtype).removeprefix("torch."), **settings)  # refuses them before it is written
        spec.path = folder = tempfile.mkdtemp(prefix=f"lightrl-{kind}-")
        weakref.finalize(spec, _remove, folder, os.getpid())
        # Each process has a folder of its own; transformers would write on the first rank only.
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
        name: For its metrics; letters, digits, and underscores.
        path: Model directory or ID of a sequence-classification model with one label; one for images and text has a
            backbone `model` and a linear layer `score` (see `scalar_class`).
        weight: Of its reward in the sum.
        dtype: Of the weights; null is float32, bfloat16 halves the memory.
        tokenizer: "own" scores text with the model's tokenizer; "policy" scores the policy's token IDs and pixels as
            they are, which is right only if both share a vocabulary. Rows with images need "policy".
        chat_template: Jinja text, or a file of it, that the own tokenizer renders [user: prompt, assistant: completion]
            with; "default" is the tokenizer's; null scores prompt + completion as plain text.
        max_length: Maximum text length in tokens; longer texts lose their start. null is the model's limit.
        layout: See `ModelSpec`.
        long_rope: See `ModelSpec`.
        kwargs: Further arguments of `from_pretrained`.
        labels: Score only rows with one of these in `label_column`; null scores all.
        label_column: Dataset column with the label.

    Raises:
        ValueError: A value is not one of those above.
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
        """Which rows it scores, by their columns; None for all."""
        if self.labels is None:
            return None
        if self.label_column not in columns:
            raise ValueError(
                f"reward_models.{self.name}.label_column={self.label_column!r}: the data has no such column. Use one "
                f"of {sorted(columns)}."
            )
        return [label in self.labels for label in columns[self.label_column]]


def _remove(folder: str, process: int) -> None:
    """Removes a folder, unless called in a process that was forked off the one that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def read_chat_template(given: str, argument: str) -> str:
    """The Jinja text of a chat template that is given as such or as a file.

    Raises:
        ValueError: There is no such file, or it is not valid Jinja; the message names `argument` and the line.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text, source = given, "the text"
    if "{{" not in given and "{%" not in given:
        file, source = Path(given).expanduser(), repr(given)
        if not file.is_file():
            raise ValueError(
                f"{argument}={given[:80]!r}: is neither Jinja text ({{% ... %}} or {{{{ ... }}}}) nor an existing file "
                f"(relative to {Path.cwd()}). Correct the path."
            )
        text = file.read_text(encoding="utf-8")
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{argument}={given[:80]!r}: has no Jinja, so it would ignore all messages. Use a template.")
    try:
        render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{argument}: {source} is not valid Jinja in line {error.lineno}: {error.message}") from error
    except Exception:  # it needs more than this conversation has: roles, tools, its own variables
        return text
    return text


def _adapter_config(folder: str) -> dict[str, Any]:
    """`adapter_config.json` of a folder, if it is one of a plain LoRA adapter."""
    file = Path(folder).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"lora.adapter={folder!r}: has no {ADAPTER_FILE}. Use a local folder that peft wrote.")
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
            f"lora.adapter={folder!r}: has {', '.join(other)}, and only plain LoRA can be trained further. Merge it "
            "into its base (peft's merge_and_unload) and use that folder."
        )
    return config


def _base_of(adapter: str) -> str:
    """The base that an adapter's folder names."""
    base = _adapter_config(adapter).get("base_model_name_or_path") or ""
    local = base[:1] in (".", "/", "~") or base.count("/") > 1
    if not base or (local and not Path(base).expanduser().is_dir()):
        raise ValueError(
            f"lora.adapter={adapter!r}: its base {base!r} does not exist here. Set the base: "
            f"{{path: BASE, lora: {{adapter: {adapter}}}}}."
        )
    return base
