"""Chat templates of model families, abridged to what matters for token records, with small tokenizers of their own."""

# ruff: noqa: RUF001  (DeepSeek writes its special tokens with other bars)
from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the answer is forty two and the weather in Paris is sunny today, add 1 and 2 to get 3"] * 4
CORPUS += [
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "system\nuser\nassistant\ntool\n",
    "HAVING SELECT FROM",
] * 4

CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role }}{% if m.content or not m.tool_calls %}{{ '\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thoughts are kept only after the last question of a user, and there only in turns that have some.
QWEN3 = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' }}
{{- m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Text of thoughts is always cut off; results of tools after the first round begin otherwise than those of the first.
DEEPSEEK = """{%- set ns = namespace(tool=false, first=true) %}{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set ns.tool = false %}
{{- '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}
{{- c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% endif %}
{%- if m.role == 'assistant' and not m.tool_calls %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% set ns.tool = false %}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endif %}
{%- if m.role == 'tool' %}{% set ns.tool = true %}
{%- if ns.first %}{{ '<｜tool▁outputs▁begin｜>' }}{% set ns.first = false %}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}"""

# Final answers end otherwise in history than they were sampled; thoughts stay only before a call that is not answered.
GPT_OSS = """{%- set ns = namespace(name=none) %}{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
{{- c.arguments | tojson + '<|call|>' }}{% set ns.name = c.name %}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass
class Family:
    """What is needed to write replies as a model of the family does."""

    template: str
    special: list[str]
    end: str
    added: list[str] = field(default_factory=list)
    bos: str = "<s>"
    eos: str = ""
    tools: bool = True
    parallel: bool = True
    think: bool = False
    rstrip: bool = False
    final: str = ""
    final_end: str = ""


IM = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CALLS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
FAMILIES = {
    "qwen2.5": Family(CHATML, IM, "<|im_end|>", CALLS, eos="<|im_end|>"),
    "qwen3": Family(QWEN3, IM, "<|im_end|>", CALLS, eos="<|im_end|>", think=True),
    "llama3": Family(
        LLAMA3,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        "<|eot_id|>",
        eos="<|eot_id|>",
        parallel=False,
    ),
    "gemma": Family(
        GEMMA, ["<start_of_turn>", "<end_of_turn>", "<eos>"], "<end_of_turn>", eos="<eos>", tools=False, bos="<bos>"
    ),
    "mistral": Family(
        MISTRAL,
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"],
        "</s>",
        eos="</s>",
    ),
    "phi": Family(
        PHI,
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"],
        "<|end|>",
        tools=False,
        rstrip=True,
    ),
    "smollm": Family(CHATML, IM, "<|im_end|>", eos="<|im_end|>"),
    "deepseek": Family(
        DEEPSEEK,
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        "<｜end▁of▁sentence｜>",
        [f"<｜tool▁{t}｜>" for t in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
        + [f"<｜tool▁{t}｜>" for t in ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end")],
        eos="<｜end▁of▁sentence｜>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"],
        "<|call|>",
        eos="<|return|>",
        parallel=False,
        final="<|channel|>final<|message|>",
        final_end="<|return|>",
    ),
}


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer with the family's special tokens and chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokens = dict.fromkeys([family.bos, family.eos or family.end, *family.special])
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=family.rstrip and t != family.eos) for t in tokens]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos or "<|endoftext|>",
        pad_token=family.eos or "<|endoftext|>",
        chat_template=family.template,
    )


def write_calls(name: str, calls: list[dict[str, Any]], content: str, *, as_template: bool) -> str:
    """Calls as the family's models write them: with the template's spaces in the JSON, or with none."""
    spaces = (", ", ": ") if as_template else (",", ":")
    compact = [json.dumps(call["function"]["arguments"], separators=spaces) for call in calls]
    names = [call["function"]["name"] for call in calls]
    pairs = list(zip(names, compact, strict=True))
    if name == "llama3":
        return "".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in pairs)
    if name == "mistral":
        ids = [f', "id": "{call["id"]}"' if as_template else "" for call in calls]
        written = [f'{{"name": "{n}", "arguments": {a}{i}}}' for (n, a), i in zip(pairs, ids, strict=True)]
        return "[TOOL_CALLS] [" + ", ".join(written) + "]"
    if name == "deepseek":
        return (
            content
            + "<｜tool▁calls▁begin｜>"
            + "".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>"
                for n, a in pairs
            )
            + "<｜tool▁calls▁end｜>"
        )
    if name == "gpt-oss":
        return "".join(f" to=functions.{n}<|channel|>commentary json<|message|>{a}" for n, a in pairs)
    blocks = "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in pairs)
    return f"{content}\n{blocks}" if content else blocks
