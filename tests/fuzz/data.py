"""Random rows, conversations, files, media and rewards, and what may become of each."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from lightrl.arguments import MAX_REWARD, MOST_COEF
from lightrl.data.media import MediaError, MediaSource, decode, require_present
from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.rows import RowError, RowSource
from lightrl.data.sft import SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.rewards import RewardError, RewardScorer
from lightrl.rewards.scorer import Scores
from tests.fuzz.verdicts import DROPPED, ERROR, WORKS

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


def often(good: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of two, the first in three of four; `one_of` would weigh the alternatives inside the second."""
    return st.integers(0, 3).flatmap(lambda k: good if k else other)


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
GOOD_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.just("1+2=")})
MESSAGE = often(GOOD_MESSAGE, st.one_of(st.fixed_dictionaries({"role": ROLE, "content": CONTENT}), ANY))
ANSWER = st.fixed_dictionaries({"role": st.just("assistant"), "content": st.just("3")})
CHAT = st.lists(MESSAGE, max_size=3)
PROMPT = often(st.one_of(st.sampled_from(["1+1=", "7"]), st.lists(GOOD_MESSAGE, min_size=1)), st.one_of(CHAT, ANY))


@functools.cache
def chat_tokenizer() -> Any:
    made = load_tokenizer(str(MODEL))
    made.chat_template = TEMPLATE
    return made


# ---- prompts -----------------------------------------------------------------------------------------------------

PROMPT_ROWS = st.fixed_dictionaries(
    {
        "prompts": st.lists(PROMPT, min_size=1, max_size=4),
        "drop": st.booleans(),
        "limit": st.sampled_from([None, 12]),
    }
)


def judge_prompts(case: dict[str, Any]) -> str:
    """Loads them as training would."""
    rows, drop, limit = [{"prompt": prompt} for prompt in case["prompts"]], case["drop"], case["limit"]
    source = PromptSource(rows=rows, on_bad_row="drop" if drop else "error", max_prompt_tokens=limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = source.load(chat_tokenizer(), shuffle=False)
        count = len(made)
        drawn = made.batch(0, count)
    except ValueError as error:
        assert str(error).startswith(("list", "no row is left", "Dropped")), error
        return ERROR
    assert all(drawn.token_ids) and all(len(ids) <= (limit or len(ids)) for ids in drawn.token_ids)
    assert made.counts["dropped"] >= len(rows) - count if drop or limit else count == len(rows)
    return DROPPED if count < len(rows) else WORKS


# ---- chats, supervised rows, preferences ---------------------------------------------------------------------------

CHAT_ROWS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["pair", "messages", "preference", "text preference"]),
        "drop": st.booleans(),
        "rows": st.lists(
            st.fixed_dictionaries(
                {
                    "m": often(st.builds(lambda chat, last: [*chat, last], CHAT, ANSWER), CHAT),
                    "prompt": PROMPT,
                    "completion": often(st.just("2"), st.one_of(CHAT, ANY)),
                    "chosen": often(st.just("2"), st.one_of(CHAT, ANY)),
                    "rejected": often(st.just("3"), ANY),
                }
            ),
            min_size=1,
            max_size=2,
        ),
    }
)
CHAT_SOURCES: dict[str, Callable[..., Any]] = {
    "pair": SFTSource,
    "messages": functools.partial(SFTSource, messages_column="m"),
    "preference": PreferenceSource,
    "text preference": functools.partial(PreferenceSource, rendering="text"),
}


def judge_chats(case: dict[str, Any]) -> str:
    """Tokenizes supervised rows and preferences."""
    rows = case["rows"]
    source = CHAT_SOURCES[case["kind"]](rows=rows, on_bad_row="drop" if case["drop"] else "error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = source.tokenized(chat_tokenizer())
    except RowError as error:
        assert "row 0" in str(error) or "row 1" in str(error), error
        return ERROR
    assert all(len(side) > 0 for row in made for side in row[:2])
    assert len(made) == len(rows) or case["drop"]
    return DROPPED if len(made) < len(rows) else WORKS


# ---- files -------------------------------------------------------------------------------------------------------

BAD_LINES = st.one_of(
    st.sampled_from(
        [b'{"prompt": "1+1="}', b"{}", b"", b"[]", b'"a"', b"{", b'{"a":1,"a":2}', b"\xff", b"null", b"a,b"]
    ),
    ANY.map(lambda value: json.dumps(value, default=str).encode()),
    st.dictionaries(st.sampled_from(["prompt", "a"]), ANY, max_size=2).map(
        lambda row: json.dumps(row, default=str).encode()
    ),
    st.binary(max_size=12),
)
LINES = often(
    often(st.just(b'{"prompt": "1+1="}'), TEXT.map(lambda text: json.dumps({"prompt": text}).encode())), BAD_LINES
)
FILES = st.fixed_dictionaries(
    {
        "files": st.lists(
            st.tuples(st.lists(LINES, max_size=4), st.sampled_from(["jsonl", "jsonl", "json", "csv", "parquet"])),
            min_size=1,
            max_size=2,
        ),
        "folder": st.booleans(),
        "end": st.sampled_from([b"\n", b"\r\n"]),
        "streaming": st.booleans(),
    }
)


def judge_files(case: dict[str, Any]) -> str:
    """Draws a prompt from a file, or from a folder of files."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (lines, suffix) in enumerate(case["files"]):
            path = Path(folder) / f"rows{number}.{suffix}"
            path.write_bytes(case["end"].join(lines))
        named = Path(folder) if case["folder"] else path
        try:
            assert case["streaming"] or len(RowSource(path=str(named)).read()) > 0
            source = PromptSource(path=str(named), on_bad_row="drop", streaming=case["streaming"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = source.load(chat_tokenizer(), shuffle=False)
                drawn = made.batch(0, 1)
        except ValueError as error:
            assert type(error) in (ValueError, RowError), repr(error)  # not one that a library raised
            assert str(named) in str(error), error
            return ERROR
        assert drawn.token_ids[0]
        return DROPPED if made.counts.get("dropped") else WORKS


# ---- media -------------------------------------------------------------------------------------------------------


def _encoded(size: tuple[int, int], mode: str, form: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, form)
    return buffer.getvalue()


def _huge_png() -> bytes:
    """A PNG whose header speaks of 60,000 x 60,000 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


@functools.cache
def pictures() -> list[bytes]:
    """Small files of several kinds, and one that pretends to be huge."""
    plain = [((2, 3), "RGB", "PNG"), ((1, 1), "L", "PNG"), ((3, 2), "RGBA", "PNG"), ((4, 4), "RGB", "JPEG")]
    others = [((2, 2), "P", "GIF"), ((2, 2), "1", "BMP"), ((2, 2), "I;16", "PNG"), ((2, 2), "CMYK", "TIFF")]
    return [*(_encoded(*each) for each in [*plain, *others]), _huge_png()]


@st.composite
def _picture_bytes(draw: st.DrawFn) -> bytes:
    """A file, sometimes cut, sometimes with a byte changed."""
    data = bytearray(draw(st.sampled_from(pictures())))
    damage = draw(st.sampled_from(["none", "none", "cut", "flip"]))
    if damage == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    elif damage == "flip":
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return bytes(data)


PIXELS = st.one_of(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5)).map(lambda shape: np.zeros(shape, np.uint8)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda shape: np.full(shape, 0.5)),
    st.sampled_from(
        [
            np.full((2, 2, 3), np.nan),
            np.full((2, 2, 3), 300),
            np.full((2, 2), -1),
            np.array([["a"]]),
            np.zeros((2, 2), complex),
            np.zeros((3, 2, 2), bool),
            torch.zeros(3, 4, 4),
            torch.zeros(3, 4, 4, dtype=torch.bfloat16),
        ]
    ),
)
IMAGE = st.one_of(
    _picture_bytes(),
    _picture_bytes().map(lambda data: base64.b64encode(data).decode()),
    _picture_bytes().map(lambda data: "data:image/png;base64," + base64.b64encode(data).decode()),
    _picture_bytes().map(lambda data: {"bytes": data, "path": None}),
    st.sampled_from(
        ["", ".", "/", "~nobody/x.png", "file:///", "file://%00", "http://127.0.0.1/x.png", "x" * 5000, "\0", {}]
    ),
    PIXELS,
    ANY,
)
SOUND = st.one_of(
    st.lists(st.floats(), max_size=3),
    st.fixed_dictionaries({"array": st.one_of(st.lists(st.floats(), max_size=3), ANY), "sampling_rate": SCALAR}),
    st.binary(max_size=60),
    ANY,
)
MEDIA = st.fixed_dictionaries(
    {
        "found": st.lists(
            st.one_of(
                st.tuples(st.just("image"), IMAGE),
                st.tuples(st.just("video"), st.one_of(st.lists(IMAGE, max_size=3), IMAGE)),
                st.tuples(st.just("audio"), SOUND),
            ),
            min_size=1,
            max_size=2,
        ),
        "max_pixels": st.sampled_from([None, 1, 4]),
        "max_frames": st.sampled_from([1, 2]),
    }
)


def judge_media(case: dict[str, Any]) -> str:
    """Looks for them as the set-up does, and reads them as a rollout does."""
    source = MediaSource(rows=[{}], max_pixels=case["max_pixels"], max_frames=case["max_frames"])
    found = case["found"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            require_present(found, source)
        except MediaError as error:
            assert found[0][0] in str(error) or found[-1][0] in str(error), error
            return ERROR
        try:
            media = decode(found, source)
        except MediaError as error:
            assert any(f"{kind} " in str(error) for kind, _ in found), error
            return ERROR
    assert all(image.mode == "RGB" and min(image.size) > 0 for image in media.images)
    assert all(image.size[0] * image.size[1] <= (case["max_pixels"] or 10**9) for image in media.images)
    assert all(
        v.dtype == np.uint8 and v.ndim == 4 and 0 not in v.shape and len(v) <= case["max_frames"] for v in media.videos
    )
    assert all(a.dtype == np.float32 and a.ndim == 1 and len(a) and np.isfinite(a).all() for a in media.audios)
    assert all(isinstance(rate, int) and rate >= 0 for rate in media.sampling_rates)
    return WORKS


# ---- rewards -----------------------------------------------------------------------------------------------------

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
GOOD_NUMBER = st.one_of(st.none(), st.floats(-1e3, 1e3), st.integers(-9, 9), st.booleans())
RETURNED = often(
    st.lists(GOOD_NUMBER, min_size=2, max_size=2),
    st.one_of(
        st.lists(NUMBER, min_size=2, max_size=2),
        st.lists(NUMBER, max_size=3).map(tuple),
        st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
        ANY,
        NUMBER,
    ),
)
REWARDS = st.fixed_dictionaries(
    {
        "returned": RETURNED,
        "weight": st.one_of(
            st.just(1.0), st.floats(-MOST_COEF, MOST_COEF), st.floats(allow_nan=False, allow_infinity=False)
        ),
        "how": st.sampled_from(["plain", "plain", "plain", "coroutine", "coroutine", "raises"]),
    }
)


def score(fn: Any, num_rows: int = 2, weight: float = 1.0, **settings: Any) -> Scores:
    """What the scorer makes of a reward function."""
    scorer = RewardScorer([fn], weights=[weight], **settings)
    rows = {
        "prompts": ["p"] * num_rows,
        "completions": ["c"] * num_rows,
        "completion_ids": [[1]] * num_rows,
        "group_ids": [0] * num_rows,
    }
    try:
        return scorer.submit(columns={}, **rows).result(20)
    finally:
        scorer.close()


def judge_rewards(case: dict[str, Any]) -> str:
    """Scores two completions by a function that returns, or raises, anything."""
    returned, weight = case["returned"], case["weight"]

    def fn(completions: list[str]) -> Any:
        if case["how"] == "raises":
            raise RuntimeError(repr(type(returned)))
        return returned

    async def later(completions: list[str]) -> Any:
        return returned

    function = later if case["how"] == "coroutine" else fn
    try:
        scores = score(function, weight=weight)
    except RewardError as error:
        name = function.__name__
        assert f"'{name}'" in str(error) or f"{name}=" in str(error), error
        return ERROR
    except ValueError as error:
        named = "weights=" if weight == 0 else f"that of {function.__name__!r}="
        assert (weight == 0 or abs(weight) > MOST_COEF) and named in str(error), error
        return ERROR
    assert case["how"] != "raises" and weight != 0 and abs(weight) <= MOST_COEF
    for value, part, total in zip(returned, scores.parts[function.__name__], scores.total, strict=True):
        if value is None:
            assert math.isnan(total) and (math.isnan(part) or value is not None)
        else:
            assert part == float(value) and abs(total) <= MAX_REWARD
            assert math.isfinite(torch.tensor(total, dtype=torch.float32).square().item())
    return DROPPED if any(value is None for value in returned) else WORKS
