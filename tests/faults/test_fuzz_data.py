"""Random rows, conversations, rewards and files: each is a clear error, a counted drop, or works.

Anything else (a traceback that is not ours, a hang, a prompt without tokens, a reward that is not what was returned) is
a failure. `LIGHTRL_FUZZ_EXAMPLES=5000 pytest tests/faults/test_fuzz_data.py` runs a long campaign.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.rows import RowError, RowSource
from lightrl.data.sft import SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.rewards import RewardError, RewardScorer
from lightrl.rewards.calls import MAX_REWARD

EXAMPLES = int(os.environ.get("LIGHTRL_FUZZ_EXAMPLES", "40"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="LIGHTRL_FUZZ_EXAMPLES" not in os.environ,  # the same cases in every run of the suite
    database=None,
    suppress_health_check=list(HealthCheck),
)

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=8)  # lone surrogates among them
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(max_size=4))
ANY = st.recursive(
    SCALAR, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=6
)
ROLE = st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), SCALAR)
BLOCK = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image", "x"])}, optional={"text": SCALAR, "image": SCALAR}
    ),
    SCALAR,
)
CONTENT = st.one_of(st.sampled_from(["1", "12+3="]), SCALAR, st.lists(BLOCK, max_size=3))
MESSAGE = st.one_of(st.fixed_dictionaries({"role": ROLE, "content": CONTENT}), ANY)
CHAT = st.lists(MESSAGE, max_size=3)
PROMPT = st.one_of(st.sampled_from(["1+1=", "7"]), CHAT, ANY)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    made = load_tokenizer(str(MODEL))
    made.chat_template = TEMPLATE
    return made


@fuzz
@given(prompts=st.lists(PROMPT, min_size=1, max_size=4), drop=st.booleans(), limit=st.sampled_from([None, 12]))
def test_prompt_rows(chat_tokenizer: Any, prompts: list[Any], drop: bool, limit: int | None) -> None:
    rows = [{"prompt": prompt} for prompt in prompts]
    source = PromptSource(rows=rows, on_bad_row="drop" if drop else "error", max_prompt_tokens=limit)
    try:
        made = source.load(chat_tokenizer, shuffle=False)
        count = len(made)
        drawn = made.batch(0, count)
    except ValueError as error:
        assert str(error).startswith(("list", "no row is left", "Dropped"))
        return
    assert all(drawn.token_ids) and all(len(ids) <= (limit or len(ids)) for ids in drawn.token_ids)
    assert made.counts["dropped"] >= len(rows) - count if drop or limit else count == len(rows)


@fuzz
@given(messages=CHAT, prompt=PROMPT, answer=st.one_of(st.just("2"), CHAT, ANY), other=st.one_of(st.just("3"), ANY))
def test_supervised_and_preference_rows(
    chat_tokenizer: Any, messages: list[Any], prompt: Any, answer: Any, other: Any
) -> None:
    row = {"m": messages, "prompt": prompt, "completion": answer, "chosen": answer, "rejected": other}
    sources = [
        SFTSource(rows=[row]),
        SFTSource(rows=[row], messages_column="m"),
        PreferenceSource(rows=[row]),
        PreferenceSource(rows=[row], rendering="text"),
    ]
    for source in sources:
        try:
            made = source.tokenized(chat_tokenizer)
        except RowError as error:
            assert "list, row 0" in str(error)
            continue
        assert all(len(side) > 0 for side in made[0][:2])


NUMBER = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from(
        [10**400, -(10**5000), 1e308, MAX_REWARD, Decimal(1), Fraction(1, 3), 1j, np.float32(2), np.bool_(1)]
    ),
    st.floats(width=32).map(np.float32),
    st.floats(width=32).map(torch.tensor),
    st.integers(-128, 127).map(np.int8),
    TEXT,
    st.lists(st.floats(), max_size=2).map(np.array),
)
RETURNED = st.one_of(st.lists(NUMBER, min_size=2, max_size=2), st.lists(NUMBER, max_size=3).map(tuple), ANY, NUMBER)


@fuzz
@given(returned=RETURNED, weight=st.one_of(st.just(1.0), st.floats(allow_nan=False, allow_infinity=False)))
def test_reward_returns(returned: Any, weight: float) -> None:
    def fn(completions: list[str]) -> Any:
        return returned

    scorer = RewardScorer([fn], weights=[weight])
    rows = {"prompts": ["p"] * 2, "completions": ["c"] * 2, "completion_ids": [[1]] * 2, "group_ids": [0] * 2}
    try:
        scores = scorer.submit(columns={}, **rows).result(20)
    except RewardError as error:
        assert "'fn'" in str(error) or "fn=" in str(error)
        return
    finally:
        scorer.close()
    for value, part, total in zip(returned, scores.parts["fn"], scores.total, strict=True):
        if value is None or weight == 0:
            assert math.isnan(total) and (math.isnan(part) or value is not None)
        else:
            assert part == float(value) and abs(total) <= MAX_REWARD
            assert math.isfinite(torch.tensor(total, dtype=torch.float32).square().item())


LINES = st.one_of(
    st.sampled_from(
        [b'{"prompt": "1+1="}', b"{}", b"", b"[]", b'"a"', b"{", b'{"a":1,"a":2}', b"\xff", b"null", b"a,b"]
    ),
    ANY.map(lambda value: json.dumps(value, default=str).encode()),
    st.dictionaries(st.sampled_from(["prompt", "a"]), ANY, max_size=2).map(
        lambda row: json.dumps(row, default=str).encode()
    ),
    st.binary(max_size=12),
)


@fuzz
@given(
    lines=st.lists(LINES, max_size=4),
    suffix=st.sampled_from(["jsonl", "json", "csv", "parquet"]),
    end=st.sampled_from([b"\n", b"\r\n"]),
    streaming=st.booleans(),
)
def test_file_contents(chat_tokenizer: Any, lines: list[bytes], suffix: str, end: bytes, streaming: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{suffix}"
        path.write_bytes(end.join(lines))
        try:
            assert streaming or len(RowSource(path=str(path)).read()) > 0
            source = PromptSource(path=str(path), on_bad_row="drop", streaming=streaming)
            drawn = source.load(chat_tokenizer, shuffle=False).batch(0, 1)
        except ValueError as error:
            assert type(error) in (ValueError, RowError), repr(error)  # not one that a library raised
            assert str(path) in str(error)
            return
        assert drawn.token_ids[0]
