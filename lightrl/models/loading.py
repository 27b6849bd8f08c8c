"""Loads Hugging Face models for training: no dropout, fixed rotary factors, adapters, and frozen parts."""

from __future__ import annotations

from fnmatch import fnmatch
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.compat.arguments import require_model_folder
from lightrl.compat.transformers import checkpoint_activations, model_class, router_modules
from lightrl.models.spec import ModelSpec

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONFIG_KEYS = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder", "code_revision")
FIXED = "fixed"  # `rope_type` of rotary embeddings that don't depend on the batch


# ---- loading -----------------------------------------------------------------------------------------------------


def load_causal_lm(spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PreTrainedModel:
    """Loads a causal language model, or a multimodal model with a language head.

    Without `trainable`, every parameter is frozen, and `freeze`, `gradient_checkpointing`, and `lora` are ignored. With
    `in_shards`, parameters stay on the meta device for `fill_shards` to read after sharding. Models with adapters,
    random weights, `kwargs`, or weights that transformers converts are still loaded whole.

    The model is in training mode, which gradient checkpointing needs, with all dropout set to 0 so that log-probs equal
    the engine's. With LoRA, only the adapter requires gradients.
    """
    if trainable and spec.live is not None:
        return _prepared(spec.live, spec, trainable=True)
    return load_model(spec, causal_class(model_config(spec)), trainable=trainable, in_shards=in_shards)


def load_model(
    spec: ModelSpec,
    auto_class: Any,
    *,
    trainable: bool,
    in_shards: bool = False,
    new_head: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Loads a model of any auto class; `overrides` are set on the config. See `load_causal_lm`.

    Raises a ValueError if files lack weights, except the head's with `new_head`, or have non-finite ones.
    """
    config = model_config(spec)
    for name, value in overrides.items():
        setattr(config, name, value)
    dtype = getattr(torch, spec.dtype or "float32")
    lora = spec.lora if trainable else None
    model: Any = None
    if in_shards and lora is None and not spec.random_init and not spec.kwargs:
        from lightrl.models.folders import without_weights

        model = without_weights(auto_class, config, dtype)
    if model is None and spec.random_init:
        kwargs = {k: v for k, v in spec.kwargs.items() if k in ("trust_remote_code", "attn_implementation")}
        model = auto_class.from_config(config, dtype=dtype, **kwargs)
    elif model is None:
        told: Any = {**spec.kwargs, "output_loading_info": True}
        if lora is not None and lora.quantize_4bit:
            from transformers import BitsAndBytesConfig

            settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
            told["quantization_config"] = BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **settings)
        model, info = _read(auto_class, spec, config=config, dtype=dtype, **told)
        _refuse_random(model, spec, info["missing_keys"], new_head=new_head and trainable)
        _refuse_nonfinite(model, spec)
    return _prepared(model, spec, trainable=trainable)


def model_config(spec: ModelSpec) -> Any:
    """Returns the config of a model, without its weights."""
    return _read(AutoConfig, spec, **{k: v for k, v in spec.kwargs.items() if k in CONFIG_KEYS})


def _read(auto_class: Any, spec: ModelSpec, **kwargs: Any) -> Any:
    """Calls `from_pretrained`. Raises a ValueError that names the model if its files are missing or broken."""
    try:
        return auto_class.from_pretrained(spec.path, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        require_model_folder(spec.path)
        raise ValueError(f"model path {spec.path!r}: can't be loaded: {error}") from error


def _refuse_random(model: Any, spec: ModelSpec, missing: set[str], *, new_head: bool) -> None:
    """Rejects a model whose files lack weights: transformers initializes them randomly and only logs it.

    With `new_head`, only the backbone's weights are checked. An encoder's pooler belongs to the head, which critics
    don't use.
    """
    body = model.base_model
    prefix = next((f"{name}." for name, child in model.named_children() if child is body), "")
    lacking = sorted(name for name in missing if not name.removeprefix(prefix).startswith("pooler."))
    if new_head:
        lacking = [name for name in lacking if name.startswith(prefix)]
    if lacking:
        raise ValueError(
            f"Model {spec.path!r} has no weights for {', '.join(lacking[:3])}, which would be random. Use a model with "
            f"all weights of {type(model).__name__}."
        )


def _refuse_nonfinite(model: Any, spec: ModelSpec) -> None:
    """Rejects non-finite weights, which no update would reveal in a reference or teacher."""
    for name, parameter in model.named_parameters():
        looked_at = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and parameter.numel() > 0
        if looked_at and not all(bool(bound.isfinite()) for bound in parameter.detach().aminmax()):
            raise ValueError(f"Model {spec.path!r}: its weights are not finite ({name}). Use an earlier checkpoint.")


def _prepared(model: Any, spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """Applies the spec to a model: no dropout, adapters, frozen parts."""
    _switch_dropout_off(model)
    fix_rope(model)
    lora = spec.lora if trainable else None
    if lora is not None and not getattr(model, "peft_config", None):  # a loaded model's was trained by an earlier run
        from lightrl.models.lora import add_lora

        add_lora(model, lora)
    if not trainable:
        model.requires_grad_(False)
    else:
        _freeze(model, spec.freeze)
        if spec.gradient_checkpointing:
            checkpointing: dict[str, Any] = {"use_reentrant": False}
            if router_modules(model):
                from lightrl.models.routing import recompute_contexts

                checkpointing["context_fn"] = recompute_contexts
            checkpoint_activations(model, checkpointing)
    prepared: PreTrainedModel = model.train()
    return prepared


def _switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout to 0, in modules and in attributes that attention layers pass on.

    Routers with jitter and batch norms stay in evaluation mode, so that log-probs don't depend on noise or other rows.
    `eval()` is not an option, since transformers recomputes activations only in training mode.
    """
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        jitter = any("jitter" in name and value for name, value in vars(module).items())
        if jitter or isinstance(module, BATCH_NORMS):
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """`train` for routers with jitter (Phi-MoE, Mixtral, DBRX) and for batch norms."""
    return nn.Module.train(module, False)


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    unused = set(patterns)
    for name, parameter in model.named_parameters():
        for pattern in patterns:
            if fnmatch(name, pattern) or f".{pattern}." in f".{name}.":
                parameter.requires_grad_(False)
                unused.discard(pattern)
    if unused:
        raise ValueError(f"freeze={sorted(unused)}: matches no parameter or module. Use `*` as a wildcard.")


# ---- classes -----------------------------------------------------------------------------------------------------


def causal_class(config: Any) -> Any:
    """Returns the auto class with a language head, which also reads images or audio if the config requires it."""
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    classes = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((c for c in classes if model_class(c, config)), AutoModelForCausalLM)


# ---- length and rotary embeddings --------------------------------------------------------------------------------


def longest_sequence(config: Any) -> int | None:
    """Returns the maximum sequence length in tokens from the config; None if it is not specified."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def fix_rope(model: Any) -> int | None:
    """Makes a model use the same rotary factors for every sequence during the whole run. Idempotent.

    transformers chooses the factors of LongRoPE and dynamic NTK by the largest position in a batch, so a sequence's
    log-probs would depend on others. vLLM chooses the LongRoPE factors once, by its `max_model_len`.

    Returns the maximum sequence length for which transformers, and vLLM by default, use the same factors, or with
    learned positions. None for no limit.
    """
    limits: list[int | None] = []
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    if not any(hasattr(module, "rope_type") for module in model.modules()):
        longest = longest_sequence(model.config)
        limits.append(longest if longest is not None and tables & {longest, longest + 2} else None)  # 2 more in OPT
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, None, kinds)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fix(module, layer, kind) for layer, kind in kinds.items()}
        limits.append(getattr(module, "rope_limit", None))
    return min((limit for limit in limits if limit is not None), default=None)


def _fix(module: Any, layer: str | None, kind: str) -> str:
    if kind == "longrope":
        parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
        module.rope_limit = parameters["original_max_position_embeddings"]
    elif "dynamic" in kind:
        module.rope_limit = module.original_max_seq_len
    else:
        return kind
    return FIXED


def longrope_limit(path: str) -> int | None:
    """Returns the maximum length for LongRoPE's short factors; None without it, or if the config can't be read."""
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(x for x in parameters.values() if isinstance(x, dict))):
        if each.get("rope_type") == "longrope":
            return int(each["original_max_position_embeddings"])
    return None
