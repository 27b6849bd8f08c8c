"""Chat templates for training: tools where a model's own template has none, and thoughts that stay in the history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

THOUGHTS_DROPPED = re.compile(r"loop\.index0 > ns\.last_query_index")
"""How Qwen 3's templates tell turns whose thoughts they keep."""

TOOLS = Path(__file__).with_name("tools.jinja")
"""Writes tools in front of a chat template without any."""


def training_template(template: str) -> str:
    """A chat template in which turns extend each other and the model sees tools.

    A template without tools gets some: SmolLM2's in the form that its authors published, others in Qwen 2.5's. Its own
    text renders the rest. Qwen 3's keeps thoughts of earlier turns, so that a trajectory stays one row. Others are
    returned as they are.

    Args:
        template: Jinja text of the model's own template, which decides alone.
    """
    template = THOUGHTS_DROPPED.sub("true", template)
    if re.search(r"\btools\b", template):
        return template
    form = "smollm2" if "SmolLM" in template else "hermes"
    state = f"form='{form}', system={str(_takes_system(template)).lower()}, said=[], results=false"
    return f"{{%- set lightrl = namespace({state}) %}}{TOOLS.read_text(encoding='utf-8')}{template}"


def training_template_of(path: str, **kwargs: Any) -> str | None:
    """The training template of a model's tokenizer; None if it is the tokenizer's own.

    Args:
        path: Model directory or model ID.
        kwargs: Further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: The tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(path, **kwargs).chat_template
    if not isinstance(own, str):
        raise ValueError(
            f"chat_template='training': the tokenizer of {path!r} has no chat template of one text. Use an "
            "instruction-tuned model, or pass a template."
        )
    made = training_template(own)
    return None if made == own else made


def _takes_system(template: str) -> bool:
    """Whether a template writes a system message."""
    from transformers.utils.chat_template_utils import render_jinja_template

    said = [{"role": "system", "content": "Qs9"}, {"role": "user", "content": "Qu9"}]
    try:
        return "Qs9" in render_jinja_template([said], chat_template=template)[0][0]
    except Exception:  # of the template
        return False
