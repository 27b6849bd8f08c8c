"""https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4072: supervised rows are rendered without their tools."""

from __future__ import annotations

from lightrl.data.sft import SFTSource
from tests.environments.families import FAMILIES, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_tokens_are_those_of_the_template_with_tools() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    messages = [{"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": "3"}]
    row = {"messages": messages, "tools": TOOLS}
    ((prompt, completion),) = SFTSource(rows=[row], messages_column="messages").tokenized(tokenizer)
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert tokenizer.decode(prompt + completion) + "\n" == expected
