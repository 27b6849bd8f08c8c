"""Rotary embeddings whose factors would depend on the longest row of a batch, fixed for the whole run.

transformers picks the factors of LongRoPE and dynamic NTK by the largest position of a batch, so that a row's log-probs
would depend on the rows beside it. vLLM picks those of LongRoPE once, by its `max_model_len`.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"
"""The `rope_type` of a rotary embedding that no longer looks at the batch."""


def fix_rope(model: Any, *, long: bool = False) -> int | None:
    """Has a model rotate every row by the same factors. Calling it again changes nothing.

    Args:
        model: of transformers.
        long: use LongRoPE's factors for long sequences instead of those for short ones.

    Returns:
        The most tokens of a row for which transformers would pick these factors too, and vLLM in its default setting;
        None for no limit.

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
    """Most tokens of a sequence that LongRoPE's factors for short sequences are for.

    Args:
        model: its configuration, or its folder or hub name.

    Returns:
        None without LongRoPE, or if transformers doesn't know the model.
    """
    if isinstance(model, str):
        try:
            model = AutoConfig.from_pretrained(model)
        except (OSError, ValueError):
            return None
    parameters = getattr(model.get_text_config(), "rope_parameters", None) or {}
    for each in (parameters, *(x for x in parameters.values() if isinstance(x, dict))):
        if each.get("rope_type") == "longrope":
            return int(each["original_max_position_embeddings"])
    return None
