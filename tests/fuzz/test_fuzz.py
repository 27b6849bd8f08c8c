"""300 cases of the fuzz campaign, and what the campaign found; `make fuzz` runs 10,000."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.data.media import MediaError, MediaSource, decode, require_present
from lightrl.data.rows import RowError
from lightrl.data.sft import SFTSource
from lightrl.data.templates import load_tokenizer
from tests.fuzz.__main__ import table
from tests.fuzz.classes import CLASSES, run_slice, shares
from tests.fuzz.data import pictures
from tests.fuzz.servers import judge_servers
from tests.fuzz.verdicts import ERROR, VERDICTS, WORKS


@pytest.mark.parametrize("name", CLASSES)
def test_each_case_is_a_clear_error_a_counted_drop_or_works(name: str) -> None:
    outcomes = list(run_slice(name, number=7, count=shares(300)[name]))
    failed = [(str(case)[:500], outcome) for case, outcome in outcomes if outcome not in VERDICTS]
    assert not failed, failed[:2]
    assert {outcome for _, outcome in outcomes} >= {ERROR, WORKS}, "the cases are all of one kind"


def test_the_table_counts_failures_too() -> None:
    from collections import Counter

    lines = table({"media": Counter({WORKS: 2, ERROR: 1, "failed": 1})}).splitlines()
    assert lines[2] == "| images, videos, sound | 4 | 2 | 0 | 1 | 1 |" and lines[3].startswith("| **all** | 4 ")


# ---- found and mended ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (torch.zeros(3, 2, 2, dtype=torch.bfloat16), "BFloat16"),
        (pictures()[-1], "60000|pixels"),  # a file of 60 bytes that says it is 60,000 pixels wide
        (10, "picture"),
    ],
)
def test_pictures_that_libraries_stumble_over_are_bad_media(value: Any, cause: str) -> None:
    with pytest.raises(MediaError, match=f"image 1.*({cause})"):
        decode([("image", value)], MediaSource(rows=[{}]))


def test_a_folder_of_nobody_and_sound_that_is_not_finite_are_bad_media() -> None:
    with pytest.raises(MediaError, match="image 1"):
        require_present([("image", "~nobody_there/x.png")], MediaSource(rows=[{}]))
    with pytest.raises(MediaError, match="audio 1.*not finite"):
        decode([("audio", [0.0, 1e300])], MediaSource(rows=[{}]))
    with pytest.raises(MediaError, match="audio 1.*sampling_rate=-350"):
        decode([("audio", {"array": [0.5], "sampling_rate": -350})], MediaSource(rows=[{}]))


def test_a_strip_of_pixels_is_capped_too() -> None:
    strip = np.zeros((1, 500), np.uint8)
    (image,) = decode([("image", strip)], MediaSource(rows=[{}], max_pixels=4)).images
    assert image.size == (4, 1)


GOOD = {"index": 0, "token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}, "text": "a", "finish_reason": "stop"}
VERSION = b'{"weight_version": "w"}'


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [3, 4]},
        {"token_ids": []},
        {"token_ids": ["x"]},
        {"logprobs": None},
        {"logprobs": {"token_logprobs": [2.0]}},
        {"logprobs": {"token_logprobs": [float("nan")]}},
        {"text": None},
        {"index": None},
        {"finish_reason": "length"},  # after fewer tokens than were asked for
        {"finish_reason": "abort"},  # asked again and again without an end
    ],
    ids=str,
)
def test_an_engine_server_that_answers_nonsense_is_named(change: dict[str, Any]) -> None:
    body = json.dumps({"choices": [GOOD | change]}).encode()
    assert judge_servers(("vllm", 200, json.dumps({"choices": [GOOD]}).encode(), VERSION)) == WORKS
    assert judge_servers(("vllm", 200, body, VERSION)) == ERROR


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 5000, b"{}", b"null"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "remote", "judge"])
def test_answers_that_are_no_json_or_another_are_named(kind: str, body: bytes) -> None:
    assert judge_servers((kind, 200, body, VERSION if kind in ("vllm", "sglang") else "error")) == ERROR


def test_supervised_rows_are_looked_at_before_any_is_tokenised(model_dir: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": 3}]
    seen: list[str] = []
    tokenizer = load_tokenizer(str(model_dir))

    class Spy:
        eos_token_id = tokenizer.eos_token_id

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **kwargs: Any) -> Any:
            seen.append(text)
            return tokenizer(text, **kwargs)

    with pytest.raises(RowError, match=r"row 1: the completion must be a string"):
        SFTSource(rows=rows).tokenized(Spy())  # type: ignore[arg-type]
    assert seen == []
    kept = SFTSource(rows=rows, on_bad_row="drop").tokenized(Spy())  # type: ignore[arg-type]
    assert len(kept) == 1 and seen
    with pytest.raises(RowError, match=r"no row is left.*row 0: the completion"):
        SFTSource(rows=rows[1:], on_bad_row="drop").tokenized(tokenizer)
