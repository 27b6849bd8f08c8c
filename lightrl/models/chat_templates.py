"""Chat templates for training: they support tools and keep reasoning in the history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightrl.compat.arguments import require_model_folder

THOUGHTS_DROPPED = re.compile(r"loop\.index0 > ns\.last_query_index")
"""How Qwen 3's templates find the turns whose reasoning they keep."""

TOOLS = Path(__file__).with_name("tools.jinja")
"""Adds tools to a chat template without any."""


def training_template(template: str) -> str:
    """Returns a Jinja chat template in which turns extend each other and the model sees tools, from the model's own.

    Adds tools to a template without them, for SmolLM2 in the form published by its authors, otherwise in that of Qwen
    2.5. Qwen 3's keeps the reasoning of earlier turns, so that a trajectory stays one row. Other templates are returned
    unchanged.
    """
    template = THOUGHTS_DROPPED.sub("true", template)
    if re.search(r"\btools\b", template):
        return template
    form = "smollm2" if "SmolLM" in template else "hermes"
    state = f"form='{form}', system={str(_takes_system(template)).lower()}, said=[], results=false"
    return f"{{%- set lightrl = namespace({state}) %}}{TOOLS.read_text(encoding='utf-8')}{template}"


def training_template_of(path: str, **kwargs: Any) -> str | None:
    """Returns the training template of a model's tokenizer; None if it equals the tokenizer's.

    Raises a ValueError if the tokenizer is missing or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(path, **kwargs).chat_template
    except (OSError, ValueError) as error:
        require_model_folder(path)
        raise ValueError(f"model path {path!r}: can't load a tokenizer: {error}") from error
    if not isinstance(own, str):
        raise ValueError(
            f"chat_template='training': the tokenizer of {path!r} doesn't have a single chat template. Use an "
            "instruction-tuned model, or pass a template."
        )
    made = training_template(own)
    return None if made == own else made


def _takes_system(template: str) -> bool:
    from transformers.utils.chat_template_utils import render_jinja_template

    said = [{"role": "system", "content": "Qs9"}, {"role": "user", "content": "Qu9"}]
    try:
        return "Qs9" in render_jinja_template([said], chat_template=template)[0][0]
    except Exception:  # raised by the template
        return False
