"""The end of a turn and the single BOS: rows, engines, and reward models agree on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.sft import SFTSource
from lightrl.data.templates import encode
from lightrl.models.folders import save_hf_folder
from lightrl.models.reward import RewardModel
from lightrl.models.turns import end_of_turn, ending_turns, text_ids
from lightrl.records import SamplingParams
from tests.environments.families import FAMILIES, make_tokenizer
from tests.rows import prompt_and_completion

LOOP = "{% for m in messages %}%s{% endfor %}%s{% if add_generation_prompt %}%s{% endif %}"
CHATML = LOOP.replace("%s", "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n", 1).replace("%s", "", 1)
CHATML = CHATML.replace("%s", "<|im_start|>assistant\n")
TEMPLATES = {
    # template: tokens that it needs, the end of a turn; EOS is <eos> throughout
    "chatml": (CHATML, "<|im_end|>"),
    "chatml without a prompt for the next turn": (
        CHATML.replace("{% if add_generation_prompt %}", "").replace("{% endif %}", ""),
        "<|im_end|>",
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
    "phi": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        "<|end|>",
    ),
    "harmony": (
        "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}<eos>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<eos>",
    ),
    "command": (
        "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|><eos>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}",
        "<eos>",
    ),
    "glm": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<eos>",
    ),
    "alternating roles only": (
        "{% for m in messages %}{% if loop.index0 > 1 %}{{ raise_exception('two turns') }}{% endif %}"
        "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|end|>",
    ),
    "no conversations": ("{{ raise_exception('no') }}", "<eos>"),
    "text": ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "<eos>"),
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>"]
SPECIAL += ["<|start|>", "<|message|>"]


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.fixture
def adds_bos(tokenizer: Any) -> Any:
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    assert tokenizer("1").input_ids == [tokenizer.bos_token_id, 5]
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_teach_the_end_that_stops_engines(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template, end = TEMPLATES[name]
    end_id = tokenizer.convert_tokens_to_ids(end)
    assert end_of_turn(tokenizer) == end_id
    stops = ending_turns(SamplingParams(stop_token_ids=[7]), tokenizer).stop_token_ids
    assert {*(stops or ())} == {7, end_id, tokenizer.eos_token_id}
    assert ending_turns(SamplingParams(ignore_eos=True), tokenizer).stop_token_ids is None
    if "no conv" in name:
        return
    (example,) = SFTSource(rows=[{"prompt": "1+1=", "completion": "2"}]).tokenized(tokenizer)
    _, completion = prompt_and_completion(example)
    assert completion[-1] == end_id and completion.count(end_id) == 1
    if end != "<eos>":
        assert tokenizer.eos_token_id not in completion  # no engine samples beyond the end


@pytest.mark.parametrize("written", ["2", "2<eos>", "2<|im_end|>", "2<|im_end|><|im_end|>"])
def test_a_completion_that_has_its_end_already_gets_no_second(written: str, tokenizer: Any) -> None:
    def ends(template: str | None) -> list[str]:
        tokenizer.chat_template = template
        (example,) = SFTSource(rows=[{"prompt": "1+1=", "completion": written}]).tokenized(tokenizer)
        return tokenizer.convert_ids_to_tokens(prompt_and_completion(example)[1])[1:]

    if "<eos>" not in written:
        assert ends(TEMPLATES["chatml"][0]) == ["<|im_end|>"]
    if "<|im_end|>" not in written:
        assert ends(None) == ["<eos>"]
    tokenizer.chat_template = TEMPLATES["chatml"][0]
    pair = {"prompt": "1+1=", "chosen": written, "rejected": "2"}
    for rendering in ("tokens", "text") if "<eos>" not in written else ():
        rows = [pair, {**pair, "rejected": "3"}]
        same, _ = PreferenceSource(rows=rows, rendering=rendering).tokenized(tokenizer)
        assert same.chosen == same.rejected


def test_an_export_stops_at_the_end_of_the_turn(tokenizer: Any, tmp_path: Path) -> None:
    source, export = tmp_path / "source", tmp_path / "export"
    tokenizer.chat_template, _ = TEMPLATES["chatml"]
    lm = Qwen2ForCausalLM(Qwen2Config.from_pretrained(tokenizer.name_or_path, vocab_size=len(tokenizer)))
    lm.generation_config.eos_token_id = tokenizer.eos_token_id
    lm.generation_config.temperature = 0.6  # without `do_sample`, as published for some models
    tokenizer.save_pretrained(source)
    save_hf_folder(SimpleNamespace(lm=lm), lm.state_dict(), export, tokenizer_path=str(source))
    settings = GenerationConfig.from_pretrained(export)
    assert settings.eos_token_id == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert settings.temperature == 0.6
    with pytest.raises(ValueError, match="do_sample"):  # transformers' own check is back
        settings.save_pretrained(tmp_path)


def test_bos_stands_once_wherever_text_is_tokenized(adds_bos: Any) -> None:
    adds_bos.chat_template, _ = TEMPLATES["gemma"]
    bos, row = adds_bos.bos_token_id, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    prompts = PromptSource(rows=[row]).load(adds_bos).batch(0, 1)
    assert prompts.token_ids[0].count(bos) == 1 and prompts.texts[0].startswith("<bos>")
    for rendering in ("tokens", "text"):
        (pair,) = PreferenceSource(rows=[row], rendering=rendering).tokenized(adds_bos)
        assert pair.chosen.count(bos) == pair.rejected.count(bos) == 1, rendering
    scored = RewardModel.__new__(RewardModel)
    scored.__dict__ |= {"tokenizer": adds_bos, "chat_template": None}
    assert scored.encode(prompts.texts[0], "2") == pair.chosen  # `text`, in training and in PPO
    assert scored.encode("1+1=", "2")[0] == bos  # still added where the text has none
    scored.__dict__["chat_template"] = "default"
    assert scored.encode("1+1=", "2").count(bos) == 1
    # Prompts that were rendered before:
    assert encode(adds_bos, prompts.texts[0], templated=False) == prompts.token_ids[0]
    assert text_ids(adds_bos, "<bos><bos>1") == [bos, bos, 5]


def test_prompts_do_not_end_with_the_eos_that_a_tokenizer_adds(tokenizer: Any) -> None:
    eos = ("<eos>", tokenizer.eos_token_id)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[eos])
    assert encode(tokenizer, "1+", templated=False) == [5, 14]
    assert encode(tokenizer, "1+<eos>", templated=False) == [5, 14, tokenizer.eos_token_id]


def test_thousands_of_special_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma has 6,249, and each read of its added tokens takes 26 ms."""
    tokenizer = make_tokenizer(FAMILIES["gemma"])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<unused{i}>" for i in range(99)]})
    added, reads = type(tokenizer).added_tokens_decoder, []
    counted = property(lambda self: reads.append(1) or added.fget(self))  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", counted)
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == "<end_of_turn>"
    assert len(reads) < 5
