"""https://github.com/modelscope/ms-swift/issues/6467: Arrow gives every tool the parameters of the others, as null."""

from __future__ import annotations

import json

from datasets import Dataset

from lightrl.data.prompts import PromptSource
from tests.environments.families import FAMILIES, make_tokenizer


def tool(name: str, parameter: str) -> dict[str, object]:
    properties = {parameter: {"type": "string", "enum": ["x", None]}}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_a_tool_has_only_its_own_parameters() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    tools = [tool("add", "a"), tool("say", "b")]
    data = Dataset.from_list([{"prompt": "?", "tools": tools}])
    (text,) = PromptSource(rows=data).load(tokenizer).batch(0, 1).texts
    shown = [json.loads(line) for line in text.splitlines() if line.startswith('{"type')]
    assert shown == tools  # null in a list of values is the schema's own
