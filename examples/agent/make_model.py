"""Writes the example's model directory: a Qwen2 config and a tokenizer with a chat template for tools, without weights.

    python -m examples.agent.make_model [outputs/agent/start]

The model has 0.3 M parameters in 2 layers. Each character is a token. The marks of the chat template, the roles, and
the phrases of a call are also tokens. The SFT run initializes the weights randomly (`random_init: true`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PHRASES = [
    *('\n{"name": "add", "arguments": {"a": ', '\n{"name": "subtract", "arguments": {"a": ', ', "b": ', "}}\n"),
    *("system\n", "add ", "subtract ", "user\n", "assistant\n"),
]
"""Phrases of calls, the list of tools, and the roles. Each is one token, so turns are short."""
CHAT_TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name + ' ' }}
{%- endfor %}{{ '<tool_call></tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of bytes, the template's marks, and the phrases of a call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    learner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    learner.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS + PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=learner, pad_token="<pad>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def make_model(folder: str | Path) -> None:
    """Writes the model directory."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,  # with the usual 0.02, learning to copy takes many more updates
        # Digits are copied by position. With the usual base of 10,000, nearby positions look alike.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        **ids,
    )
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "outputs/agent/start"
    make_model(target)
    print(f"Wrote {target}.")
