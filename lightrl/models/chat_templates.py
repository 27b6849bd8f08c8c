"""Chat templates for training: tools where a model's own template has none, and thoughts that stay in the history."""

from __future__ import annotations

import re
from typing import Any

THOUGHTS_DROPPED = re.compile(r"loop\.index0 > ns\.last_query_index")
"""How Qwen 3's templates tell turns whose thoughts they keep."""

HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n' }}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""Qwen 2.5's prompt."""

# https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct/blob/main/instructions_function_calling.md, and a last line
SMOLLM2 = """You are an expert in composing functions. You are given a question and a set of possible functions.\
{{ ' ' }}
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.{{ ' ' }}
If none of the functions can be used, point it out and refuse to answer.{{ ' ' }}
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{{ tools | tojson }}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, \
please make the tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call>

When you have the results of your calls, answer the question in words."""

HERMES_CALLS = ("\\n<tool_call>\\n", "\\n</tool_call>", "")
SMOLLM2_CALLS = ("", "", ", ")

# Rewrites a conversation with tools to one without, which the model's own template then renders.
PREAMBLE = """{#- Tools, written by LightRL into a chat template that has none. -#}
{%- set lightrl = namespace(said=[], text='', results=false) %}
{%- if tools %}
{%- set lightrl_tools %}PROMPT{% endset %}
{%- endif %}
{%- for m in messages %}
{%- set blocks = [] if m.content is string or not m.content else m.content %}
{%- set lightrl.text = m.content if m.content is string else blocks | map(attribute='text') | join %}
{%- set plain = not (blocks | selectattr('type', 'ne', 'text') | list) %}
{%- if tools and loop.first and m.role != 'system' and SYSTEM %}
{%- set content = [{'type': 'text', 'text': lightrl_tools}] if blocks else lightrl_tools %}
{%- set lightrl.said = [{'role': 'system', 'content': content}] %}
{%- endif %}
{%- if m.role == 'tool' %}
{%- if not plain %}{{ raise_exception('A result of a tool can only be text.') }}{% endif %}
{%- set lightrl.text = '<tool_response>\\n' + lightrl.text + '\\n</tool_response>' %}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}
{%- set lightrl.text = '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' + lightrl.text %}
{%- endif %}
{%- if m.tool_calls %}
{%- set calls = namespace(text='') %}
{%- for call in m.tool_calls %}
{%- set arguments = call.function.arguments %}
{%- set arguments = arguments if arguments is string else arguments | tojson %}
{%- set call = '{"name": ' + (call.function.name | tojson) + ', "arguments": ' + arguments + '}' %}
{%- set calls.text = calls.text + ('' if loop.first else 'BETWEEN') + 'BEGIN' + call + 'END' %}
{%- endfor %}
{%- set lightrl.text = (lightrl.text + CALLS) | trim %}
{%- endif %}
{%- elif tools and loop.first and m.role == 'system' %}
{%- set lightrl.text = lightrl.text + '\\n\\n' + lightrl_tools %}
{%- elif tools and loop.first and not SYSTEM %}
{%- set lightrl.text = lightrl_tools + '\\n\\n' + lightrl.text %}
{%- endif %}
{%- if not plain %}
{%- set first = [{'type': 'text', 'text': lightrl_tools + '\\n\\n'}] if tools and loop.first and not SYSTEM else [] %}
{%- set content = first + blocks %}
{%- elif blocks %}
{%- set content = [{'type': 'text', 'text': lightrl.text}] %}
{%- else %}
{%- set content = lightrl.text %}
{%- endif %}
{%- if lightrl.results and m.role in ['tool', 'user'] %}
{%- set last = lightrl.said[-1].content %}
{%- set between = [{'type': 'text', 'text': '\\n'}] if blocks else '\\n' %}
{%- set lightrl.said = lightrl.said[:-1] + [{'role': 'user', 'content': last + between + content}] %}
{%- else %}
{%- set lightrl.said = lightrl.said + [{'role': 'user' if m.role == 'tool' else m.role, 'content': content}] %}
{%- endif %}
{%- set lightrl.results = m.role == 'tool' %}
{%- endfor %}
{%- set messages = lightrl.said %}
"""


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
    smollm2 = "SmolLM" in template
    begin, end, between = SMOLLM2_CALLS if smollm2 else HERMES_CALLS
    calls = "'<tool_call>[' + calls.text + ']</tool_call>'" if smollm2 else "calls.text"
    parts = {"PROMPT": SMOLLM2 if smollm2 else HERMES, "SYSTEM": str(_takes_system(template)).lower(), "CALLS": calls}
    parts |= {"BETWEEN": between, "BEGIN": begin, "END": end}
    return re.sub("|".join(parts), lambda found: parts[found[0]], PREAMBLE) + template


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
