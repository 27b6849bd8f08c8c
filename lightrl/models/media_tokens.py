"""Tokens that stand for the features of images, videos and sound."""

from __future__ import annotations

from typing import Any

TOKEN_INPUT = "token_type_ids"
"""Model inputs whose name ends like this have an entry per token; all others have entries per medium or feature."""

_KINDS = ("image", "video", "audio")


def placeholder_ids(config: Any) -> dict[str, int]:
    """Kind of media -> id of the token that each of its features takes the place of; {} for models of text.

    Args:
        config: a model's configuration. Families call it `image_token_id` or, the older ones, `image_token_index`.
    """
    found = {}
    for kind in _KINDS:
        values = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[kind] = int(value)
    return found


def causal_type(config: Any) -> int:
    """Token type of text that attends to earlier tokens alone: 1 for PaliGemma, whose type 0 is a two-way prefix."""
    return int(config.model_type == "paligemma")
