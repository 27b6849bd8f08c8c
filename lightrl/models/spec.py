"""What a model is made from, as plain data that YAML and the command line can fill."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
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

    The base without its adapter serves as the reference model, or the base with `adapter` as it was. Exported is the
    merged weight; what is synced is up to the engine (`VLLMEngine.lora_sync`).

    Args:
        r: rank of the update, at least 1.
        alpha: scale of the update, 1e-6 to 1e6, which is multiplied by alpha / r.
        dropout: on the adapter's input, in [0, 1). Above 0 log-probs are noisy, and with them the policy ratio.
        target_modules: names of linear layers that get an adapter; "all-linear" is all but the output head and, of a
            mixture of experts, the parts with the experts, which are no linear layers.
        quantize_4bit: keep W in 4-bit NF4 (QLoRA, https://arxiv.org/abs/2305.14314); needs CUDA and bitsandbytes.
        adapter: folder of a peft LoRA adapter to begin with: r, alpha and target_modules are then its own, and its
            dropout is not taken over. The base is the spec's `path`, whatever the folder names. null begins at B = 0.

    Raises:
        ValueError: a value is out of its range, or `adapter` is no plain LoRA adapter or says otherwise.
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
        """Sets what the adapter's configuration says, unless something else was asked for."""
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
                    f"lora.{name}={getattr(self, name)!r} with lora.adapter={self.adapter!r}, whose own is {value!r}: "
                    f"leave {name} out."
                )
            setattr(self, name, value)


@dataclass
class ModelSpec:
    """A model and how it is loaded.

    Args:
        path: folder with a Hugging Face model, or its name on the hub. The folder of a peft LoRA adapter stands for the
            base that it names with `lora.adapter` on it.
        dtype: of the parameters: float32, bfloat16, float16 or float64; null is float32. Trained models are best left
            in float32 and run under the Trainer's bf16-mixed; a reference or reward model may be bfloat16.
        random_init: draw the weights from the configuration's initialiser with the run's seed; the folder then
            needs a config.json only.
        lora: train a low-rank adapter in place of the weights; null trains the weights.
        gradient_checkpointing: recompute each block's activations in the backward pass: less memory, about a third
            more time.
        freeze: what is not trained: names of parts, such as "visual" (all within), or patterns of whole parameter names
            in which `*` matches anything, such as "*embed_tokens*". After the first sync it is not sent again.
        layout: Arrangement of sequences in a forward pass. `shared_prefix` computes each prefix that sequences of a
            micro-batch share once, `packed` removes padding, `padded` is the plain rectangle. `auto` uses the
            cheapest that the model supports.
        cpu_kernels: whether the forward on a CPU uses LightRL's fused norms, SwiGLU and rotary embedding and its
            attention; null is yes unless LIGHTRL_CPU_KERNELS=0. On other devices it has no effect.
        chat_template: Jinja text, or a file of it (.jinja), in place of the chat template of the tokenizer that the run
            reads with; exports have it. null is the tokenizer's own.
        kwargs: further arguments of `from_pretrained`, such as trust_remote_code or revision; not its dtype.
        long_rope: of a model with LongRoPE (Phi-3, Phi-4-mini), use the factors for long sequences for every row, as
            vLLM does when its `max_model_len` exceeds `original_max_position_embeddings`. Rows longer than that need
            it; without it they are an error. No effect on other models.

    Attributes:
        live: the model of `ModelSpec.of`, which is trained itself; None where the model is loaded from `path`.

    Raises:
        ValueError: a value is not one of those above, or two exclude each other; there is no such template, or it is
            no Jinja.
    """

    path: str
    dtype: str | None = None
    random_init: bool = False
    lora: LoraSpec | None = None
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    layout: Layout = "auto"
    cpu_kernels: bool | None = None
    chat_template: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    long_rope: bool = False
    live: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(len(os.fsencode(part)) > 255 for part in Path(self.path).parts):
            raise ValueError(f"path={self.path[:80]!r}...: a name of more than 255 bytes is no folder and no model.")
        if os.path.isfile(os.path.join(os.path.expanduser(self.path), ADAPTER_FILE)):
            self.lora = replace(self.lora or LoraSpec(), adapter=self.path)
            self.path = _base_of(self.path)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"ModelSpec.dtype={self.dtype!r}: give one of {', '.join(DTYPES)}, or null for float32.")
        for name in ("dtype", "torch_dtype"):
            if name in self.kwargs:
                raise ValueError(
                    f"ModelSpec.kwargs: {name}={self.kwargs[name]} has no effect there: set `dtype`, beside `kwargs`."
                )
        one_of("ModelSpec.layout", self.layout, *get_args(Layout))
        if self.random_init and self.lora is not None:
            raise ValueError(
                "ModelSpec.random_init with lora: an adapter on random frozen weights is of no use; drop one."
            )
        if self.chat_template is not None:
            self.chat_template = read_chat_template(self.chat_template, "chat_template")

    @property
    def name(self) -> str:
        """What the model is called where it is told from others: its path, or the class of a live one."""
        return self.path if self.live is None else f"live {type(self.live).__name__}"

    @classmethod
    def given(cls, model: Any, tokenizer: Any = None, *, argument: str = "actor") -> ModelSpec:
        """The spec of what was given as a model: a path, a spec, or a live model with its tokenizer.

        Raises:
            ValueError: it is none of these, or a tokenizer comes with what has its own.
        """
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            return cls.of(model, tokenizer)
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__} with {argument}={getattr(model, 'path', model)!r}: it belongs "
                "to a live model. For a folder give the data module's `tokenizer`, a folder or hub name."
            )
        if isinstance(model, ModelSpec):
            return model
        if isinstance(model, str | os.PathLike) and os.fspath(model):
            return cls(os.fspath(model))
        raise ValueError(
            f"{argument}={str(model)[:60]!r} of type {type(model).__name__}: give a folder or hub name, a ModelSpec, "
            "or a causal language model of transformers with its tokenizer (of a peft model the base, with a LoraSpec)."
        )

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **settings: Any) -> ModelSpec:
        """The spec of a live model: it is what is trained, in place, and is not copied.

        Model and tokenizer are written once, now, to a temporary folder, from which everything else is loaded that
        begins as the model is now (engines, the reference, a critic). The folder goes with the spec or the process;
        every process writes its own. So a checkpoint does not say where the model was: `load_from_checkpoint` and
        resuming are given the model again, `lightrl export` a folder (`--model`).

        Args:
            model: a causal language model of transformers, on any device, whole and not quantised. Its parameters that
                need no gradient stay frozen; dropout is switched off and its language head answers with log-probs too.
            tokenizer: its tokenizer, or the processor of a model that takes images.
            settings: the other arguments of `ModelSpec`, but for path, dtype (the model's) and random_init.

        Raises:
            ValueError: the model is no such model, it has adapters, or there is no tokenizer.
        """
        from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

        kind = type(model).__name__
        refused = sorted({"path", "dtype", "random_init"} & settings.keys())
        if refused:
            raise ValueError(f"ModelSpec.of(..., {refused[0]}={settings[refused[0]]!r}): that is the model's own.")
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ValueError(f"{kind} is no causal language model of transformers, with a language head.")
        if getattr(model, "peft_config", None) or getattr(model, "is_quantized", False):
            raise ValueError(
                f"{kind} has adapters or quantised weights: give the base in float32, bfloat16 or float16, and a "
                "LoraSpec (lora=LoraSpec(adapter=FOLDER) for an adapter that is there)."
            )
        if any(p.is_meta for p in model.parameters()) or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError(f"{kind} is on the meta device or spread by device_map: load it whole on one device.")
        if not isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
            raise ValueError(
                f"tokenizer={tokenizer!r} with a live {kind}: give the tokenizer that belongs to it "
                "(AutoTokenizer.from_pretrained), or its processor."
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


def _remove(folder: str, process: int) -> None:
    """Removes a folder, but not from a process that was forked off the one that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def read_chat_template(given: str, argument: str) -> str:
    """The Jinja text of a chat template that is given as such or as a file.

    Raises:
        ValueError: there is no such file, or it is no Jinja; the message names `argument` and the line.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text, source = given, "the text"
    if "{{" not in given and "{%" not in given:
        file = os.path.expanduser(given)
        if not os.path.isfile(file):
            raise ValueError(
                f"{argument}={given[:80]!r}: neither Jinja text ({{% ... %}} or {{{{ ... }}}}) nor a file that is "
                f"there (looked from {Path.cwd()})."
            )
        source = repr(given)
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{argument}={given!r} is no text in UTF-8: {error}.") from error
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{argument}={given[:80]!r} holds no Jinja, so it would show no message.")
    try:
        render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{argument}: {source} is no Jinja in line {error.lineno}: {error.message}") from error
    except Exception:  # it asks for more than this conversation has: roles, tools, variables of its own
        return text
    return text


def _adapter_config(folder: str) -> dict[str, Any]:
    """`adapter_config.json` of a folder, if it is one of a plain LoRA adapter."""
    file = Path(folder).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"lora.adapter={folder!r}: give a local folder with {ADAPTER_FILE}, as peft writes it.")
    try:
        config: dict[str, Any] = {"r": 8, "lora_alpha": 8, **json.loads(file.read_text())}
    except (ValueError, TypeError) as error:  # no JSON, or no object
        raise ValueError(f"lora.adapter={folder!r}: {ADAPTER_FILE} cannot be read ({error}): save it again.") from error
    other = [name for name in OTHER_ADAPTERS if config.get(name)]
    other += [f"bias={config['bias']}"] if config.get("bias", "none") != "none" else []
    init = config.get("init_lora_weights")
    other += [f"init_lora_weights={init}"] if init not in PLAIN_INIT else []  # PiSSA and others change the base
    kind = config.get("peft_type")
    other += [f"peft_type={kind}"] if kind != "LORA" else []
    other += [] if config.get("target_modules") else ["no target_modules"]
    if other:
        raise ValueError(
            f"Adapter {folder!r} has {', '.join(other)}: only plain LoRA can be trained further. Merge it into its "
            "base (peft's merge_and_unload) and give that folder."
        )
    return config


def _base_of(adapter: str) -> str:
    """The base that an adapter's folder names."""
    base = _adapter_config(adapter).get("base_model_name_or_path") or ""
    local = base[:1] in (".", "/", "~") or base.count("/") > 1
    if not base or (local and not Path(base).expanduser().is_dir()):
        raise ValueError(
            f"Adapter {adapter!r} names the base {base!r}, which is not here. Give the base yourself: "
            f"{{path: BASE, lora: {{adapter: {adapter}}}}}."
        )
    return base
