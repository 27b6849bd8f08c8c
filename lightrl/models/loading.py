"""Loads Hugging Face models the way training needs them: no dropout, fixed rotary factors, adapters, frozen parts."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightrl.checkpoints.files import require_written
from lightrl.compat.arguments import require_model_folder
from lightrl.compat.transformers import model_class, router_modules, with_from_config
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.models.turns import placeholder_ids

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
CONFIG_KEYS = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder", "code_revision")
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
TABLES = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt")  # learned positions
FIXED = "fixed"  # the `rope_type` of a rotary embedding that does not depend on the batch


def require_model(spec: ModelSpec) -> None:
    """Checks that a model directory can be loaded, before anything heavy starts.

    Raises:
        ValueError: There is no model, or only a configuration, or files differ from the directory's `SHA256SUMS`.
    """
    require_model_folder(spec.path)
    folder = Path(spec.path).expanduser()
    if spec.random_init or spec.live is not None or not folder.is_dir():
        return
    if not any(file.suffix in WEIGHTS for file in folder.rglob("*")):
        raise ValueError(
            f"Model folder {spec.path!r} has a config.json and no weights (such as model.safetensors). Use a folder "
            "that `save_pretrained` wrote, or set random_init: true to start with random ones."
        )
    require_written(folder, f"Model folder {spec.path!r}")


# ---- loading -----------------------------------------------------------------------------------------------------


def load_causal_lm(spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PreTrainedModel:
    """Loads a causal language model, or a model that takes images and text and has a language head.

    Args:
        spec: What to load.
        trainable: False freezes every parameter and ignores `freeze`, `gradient_checkpointing`, and a new `lora`.
        in_shards: Leave parameters on the meta device, for `fill_shards` to read once they are sharded. Models with
            adapters, random weights, `kwargs`, or weights that transformers converts are still loaded whole.

    Returns:
        The model in training mode, which gradient checkpointing needs, with all dropout set to 0, so that log-probs
        equal the engine's. With LoRA only the adapter requires gradients.

    Raises:
        ValueError: The folder does not exist, or has no model.
    """
    if trainable and spec.live is not None:
        return _prepared(spec.live, spec, trainable=True)
    require_model_folder(spec.path)
    return load_model(spec, causal_class(_config(spec)), trainable=trainable, in_shards=in_shards)


def load_backbone(spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PreTrainedModel:
    """Loads the model without its language head, for a critic. Arguments and result: `load_causal_lm`."""
    return load_model(spec, AutoModel, trainable=trainable, in_shards=in_shards)


def load_scalar(spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """Loads a model with a head of one output. Otherwise as `load_causal_lm`.

    Raises:
        ValueError: Also if the head has more outputs, or is missing and would not be trained.
    """
    require_model_folder(spec.path)
    try:
        return load_model(spec, scalar_class(_config(spec)), trainable=trainable, new_head=True, num_labels=1)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"Model {spec.path!r}: its head does not have one output (num_labels=1).") from error


def load_model(
    spec: ModelSpec,
    auto_class: Any,
    *,
    trainable: bool,
    in_shards: bool = False,
    new_head: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Loads a model of any auto class; `overrides` are set on the configuration. Otherwise as `load_causal_lm`.

    Raises:
        ValueError: Also if the files lack weights, or have some that are not finite; with `new_head` those of a head
            that is trained may be missing.
    """
    require_model(spec)
    config = _config(spec)
    for name, value in overrides.items():
        setattr(config, name, value)
    dtype = getattr(torch, spec.dtype or "float32")
    lora = _used_lora(spec, trainable)
    model: Any = None
    if in_shards and lora is None and not spec.random_init and not spec.kwargs:
        from lightrl.models.folders import without_weights

        model = without_weights(auto_class, config, dtype)
    if model is None and spec.random_init:
        kwargs = {k: v for k, v in spec.kwargs.items() if k in ("trust_remote_code", "attn_implementation")}
        model = auto_class.from_config(config, dtype=dtype, **kwargs)
    elif model is None:
        kwargs = {**spec.kwargs, **(_quantization(dtype) if lora is not None and lora.quantize_4bit else {})}
        told: Any = {**kwargs, "output_loading_info": True}
        try:
            model, info = auto_class.from_pretrained(spec.path, config=config, dtype=dtype, **told)
        except Exception as error:  # safetensors, pickle, and hub errors do not name the model
            error.add_note(f"Model {spec.path!r} could not be loaded.")
            raise
        _refuse_random(model, spec, info["missing_keys"], new_head=new_head and trainable)
        _refuse_nonfinite(model, spec)
    return _prepared(model, spec, trainable=trainable)


def _config(spec: ModelSpec) -> Any:
    return AutoConfig.from_pretrained(spec.path, **{k: v for k, v in spec.kwargs.items() if k in CONFIG_KEYS})


def _used_lora(spec: ModelSpec, trainable: bool) -> LoraSpec | None:
    return spec.lora if spec.lora is not None and (trainable or spec.lora.adapter is not None) else None


def _quantization(dtype: torch.dtype) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ValueError("lora.quantize_4bit=True: needs a CUDA device. Set it to false.")
    from transformers import BitsAndBytesConfig

    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **settings)}


def _refuse_random(model: Any, spec: ModelSpec, missing: set[str], *, new_head: bool) -> None:
    """Rejects a model with weights that its files lack: transformers draws them, and says so in a log only.

    With `new_head` only the backbone's are checked. An encoder's pooler belongs to a head; a critic reads none.
    """
    body = model.base_model
    prefix = next((f"{name}." for name, child in model.named_children() if child is body), "")
    lacking = sorted(name for name in missing if not name.removeprefix(prefix).startswith("pooler."))
    if new_head:
        lacking = [name for name in lacking if name.startswith(prefix)]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"Model {spec.path!r} has no weights for {', '.join(lacking[:3])}{more}, which would be random. Use a "
            f"model that was trained with them, such as one that `save_pretrained` of {type(model).__name__} wrote."
        )


def _refuse_nonfinite(model: Any, spec: ModelSpec) -> None:
    """Rejects NaN weights: as a reference or teacher, no update would reveal them."""
    for name, parameter in model.named_parameters():
        looked_at = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and parameter.numel() > 0
        if looked_at and not all(bool(bound.isfinite()) for bound in parameter.detach().aminmax()):
            raise ValueError(f"Model {spec.path!r}: its weights are not finite ({name}). Use an earlier checkpoint.")


def _prepared(model: Any, spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """A model as its spec asks for: no dropout, adapters, frozen parts."""
    _switch_dropout_off(model)
    fix_rope(model, long=spec.long_rope)
    lora = _used_lora(spec, trainable)
    if lora is not None:
        from lightrl.models.lora import add_lora

        add_lora(model, lora)
    if not trainable:
        model.requires_grad_(False)
    if trainable:
        _freeze(model, spec.freeze)
        if spec.gradient_checkpointing:
            checkpointing: dict[str, Any] = {"use_reentrant": False}
            if router_modules(model):
                from lightrl.models.routing import recompute_contexts

                checkpointing["context_fn"] = recompute_contexts
            model.gradient_checkpointing_enable(checkpointing)
    prepared: PreTrainedModel = model.train()
    return prepared


def _switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout to 0, in modules and in the numbers that attention layers pass on.

    Not `eval()`: transformers recomputes activations in training mode only.
    """
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if any("jitter" in name and value for name, value in vars(module).items()):
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """`train` of a part that chooses experts at random in training (Phi-MoE, or Mixtral's and DBRX's jitter)."""
    return nn.Module.train(module, False)


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    unused = set(patterns)
    for name, parameter in model.named_parameters():
        for pattern in patterns:
            if fnmatch(name, pattern) or f".{pattern}." in f".{name}.":
                parameter.requires_grad_(False)
                unused.discard(pattern)
    if unused:
        raise ValueError(f"freeze={sorted(unused)}: no parameter or part has such a name. Use `*` for anything.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze={patterns}: leaves no parameter to train. Freeze less.")


def return_router_logits(lm: PreTrainedModel) -> None:
    """Makes a mixture-of-experts model return the router logits, from which its load-balancing loss is computed.

    Raises:
        ValueError: The model has no routers, or no such loss (DeepSeek's balance themselves).
    """
    config: Any = lm.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        raise ValueError(f"aux_loss_coef: {config.model_type} is not a mixture of experts. Set it to 0.")
    if not hasattr(sys.modules[type(lm).__module__], "load_balancing_loss_func"):
        raise ValueError(f"aux_loss_coef: {config.model_type} defines no load-balancing loss. Set it to 0.")
    config.output_router_logits = True


# ---- classes -----------------------------------------------------------------------------------------------------


def causal_class(config: Any) -> Any:
    """The auto class with a language head: that of images or sound and text if the configuration belongs to one."""
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    classes = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((c for c in classes if model_class(c, config)), AutoModelForCausalLM)


def scalar_class(config: Any) -> Any:
    """The class with a classification head.

    transformers has none for vision-language models. The one made here has the parts and names of those for text: the
    backbone as `model`, read at the last token, and the linear layer `score`.
    """
    auto = AutoModelForSequenceClassification
    body = model_class(AutoModel, config)
    if model_class(auto, config) or not placeholder_ids(config) or body is None:
        return auto
    from transformers.modeling_layers import GenericForSequenceClassification

    base = next(c for c in body.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    return with_from_config(name, (GenericForSequenceClassification, base), model_class(causal_class(config), config))


# ---- vocabulary and length ---------------------------------------------------------------------------------------


def require_vocabulary(tokenizer: Any, path: str, argument: str = "tokenizer") -> None:
    """Rejects a tokenizer with tokens that the model has no embedding for.

    Placeholders of media, and special tokens other than BOS and EOS, don't count. A model whose configuration can't be
    read is left to the code that loads it.

    Raises:
        ValueError: There is such a token; the message starts with `argument`.
    """
    config = _readable_config(path)
    size = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if size is None:
        return
    known = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    idle = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - known
    idle |= {*placeholder_ids(config).values()}
    beyond = sorted((i, text) for text, i in tokenizer.get_vocab().items() if i >= size and i not in idle)
    if beyond:
        raise ValueError(
            f"{argument}={tokenizer.name_or_path!r}: {len(beyond)} of its tokens, such as {beyond[0][1]!r} "
            f"({beyond[0][0]}), have no embedding in the model {path!r} of vocab_size={size}. Use the model's own "
            "tokenizer, or call `resize_token_embeddings` on the model and save both in one folder."
        )


def _readable_config(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def longest_sequence(config: Any) -> int | None:
    """Maximum sequence length in tokens that a model was made for; None if its configuration does not say."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def positions_of(path: str) -> tuple[int, bool] | None:
    """`longest_sequence` of a model directory or ID, and whether longer ones are an error; None if unknown.

    They are an error with a table of positions; with rotary embeddings quality decreases.
    """
    config = _readable_config(path)
    longest = None if config is None else longest_sequence(config)
    return None if longest is None else (longest, config.get_text_config().model_type in TABLES)


# ---- rotary embeddings -------------------------------------------------------------------------------------------


def fix_rope(model: Any, *, long: bool = False) -> int | None:
    """Makes a model rotate every row by the same factors, for the whole run. Idempotent.

    transformers picks the factors of LongRoPE and dynamic NTK by the largest position of a batch, so that a row's
    log-probs would depend on other rows. vLLM picks those of LongRoPE once, by its `max_model_len`.

    Args:
        model: A transformers model.
        long: Use LongRoPE's factors for long sequences instead of those for short ones.

    Returns:
        Maximum tokens of a row for which transformers, and vLLM by default, use the same factors; None for no limit.

    Raises:
        ValueError: `long` with a family whose long factors transformers doesn't compute (Phi-MoE).
    """
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, None, kinds, long)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fix(module, layer, kind, long) for layer, kind in kinds.items()}
        limits.append(getattr(module, "rope_limit", None))
    return min((limit for limit in limits if limit is not None), default=None)


def _fix(module: Any, layer: str | None, kind: str, long: bool) -> str:
    if kind == "longrope":
        parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
        original: int = parameters["original_max_position_embeddings"]
        if not long:
            module.rope_limit = original
        elif "long_mscale" in parameters:
            raise ValueError(
                f"long_rope=True: transformers rotates long rows of {type(module).__name__} by the factors for short "
                f"ones. Set long_rope to false and keep rows at {original} tokens."
            )
        else:
            name = "inv_freq" if layer is None else f"{layer}_inv_freq"
            device, keys = getattr(module, name).device, {} if layer is None else {"layer_type": layer}
            factors, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=original + 1, **keys)
            module.register_buffer(name, factors, persistent=False)
    elif "dynamic" in kind:
        module.rope_limit = module.original_max_seq_len
    else:
        return kind
    return FIXED


def longrope_limit(model: Any) -> int | None:
    """Maximum tokens that LongRoPE's factors for short sequences are for, of a configuration, model directory, or ID.

    Returns:
        None without LongRoPE, or if the configuration can't be read.
    """
    config = _readable_config(model) if isinstance(model, str) else model
    parameters = (config is not None and getattr(config.get_text_config(), "rope_parameters", None)) or {}
    for each in (parameters, *(x for x in parameters.values() if isinstance(x, dict))):
        if each.get("rope_type") == "longrope":
            return int(each["original_max_position_embeddings"])
    return None
