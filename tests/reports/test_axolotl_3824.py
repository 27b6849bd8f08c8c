"""https://github.com/axolotl-ai-cloud/axolotl/issues/3824: preference rows lose tool calls, tools, and thoughts."""

from __future__ import annotations

from typing import Any

from lightrl.data.preferences import PreferenceSource
from tests.environments.families import FAMILIES, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments: str, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "call00000", "function": function}], **more}


def test_both_sides_keep_calls_tools_and_thoughts() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    history = [{"role": "user", "content": "1, 2, 3?"}, call('{"a": 1}'), {"role": "tool", "content": "1"}]
    row = {
        "prompt": history,
        "chosen": [call('{"a": 2}', reasoning_content="two next")],
        "rejected": [call('{"a": 3}', reasoning_content="three next")],
        "tools": TOOLS,
    }
    ((chosen, rejected, _),) = PreferenceSource(rows=[row]).tokenized(tokenizer)
    for ids, number, thought in ((chosen, 2, "two"), (rejected, 3, "three")):
        text = tokenizer.decode(ids)
        assert '"function": {"name": "add"' in text and '"arguments": {"a": 1}' in text
        tail = f'<think>\n{thought} next\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n'
        assert text.endswith(f"{tail}</tool_call><|im_end|>")
