"""Rules against numbers worked by hand, and the extraction of answers."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from lightrl.rewards import (
    CosineLength,
    ExactAnswer,
    LengthReward,
    RegexFormat,
    RepetitionPenalty,
    Reward,
    RewardError,
    SoftOverlong,
    extract_boxed,
    extract_gsm8k,
    extract_number,
)
from tests.rewards.conftest import scored


def ids(*lengths):
    return [list(range(length)) for length in lengths]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 5 - 3 = 2 left.\n#### 2", "2"),
        ("#### 1,042", "1042"),
        ("####-3.50 dollars", "-3.50"),
        ("#### $18", "18"),
        ("Answers look like #### 7. So:\n#### 8.", "8"),  # the last mark; the full stop is no decimal point
        ("the answer is 42", None),
        ("#### none", None),
    ],
)
def test_extract_gsm8k(text, answer):
    assert extract_gsm8k(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x }", r"\left\{ x"),  # an escaped brace is text
        (r"\boxed{ 3 }", "3"),
        (r"\boxed{1 \\}", r"1 \\"),  # a line break, not an escaped brace
        (r"\boxed{3", None),  # cut off
        ("boxed 3", None),
    ],
)
def test_extract_boxed(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7.", "7"),
        ("-1,000.5", "-1000.5"),
        ("x2 has .5", ".5"),
        ("3-4", "4"),
        ("= -4", "-4"),
        ("no", None),
        ("1,2,3", "3"),
        ("1,234,567.8", "1234567.8"),
        ("12,34,567", "1234567"),
        ("1,2345", "2345"),
        ("4,", "4"),
    ],
)
def test_extract_number(text, answer):
    assert extract_number(text) == answer


def test_exact_answer_compares_the_whole_text_by_default():
    reward = ExactAnswer()
    assert reward(["42", " 42\n", "The answer is 42", "a  b", "A B"], answer=[42, "42", "42", "a b", "a b"]) == [
        1.0,
        1.0,  # whitespace at the ends does not count
        0.0,
        1.0,  # a run of whitespace is one space
        0.0,
    ]
    assert reward(["42"], answer=[None]) == [None]


def test_each_option_of_exact_answer_changes_a_reward():
    assert ExactAnswer(ignore_case=True)(["YES"], answer=["yes"]) == [1.0]
    assert ExactAnswer()(["42.0"], answer=["42"]) == [0.0]
    assert ExactAnswer(numeric=True)(["1,2,3", "123"], answer=["123", "1,2,3"]) == [0.0] * 2
    assert ExactAnswer(numeric=True)(["42.0", "1,000", "x", "0.1"], answer=["42", "1000", "x", "0.10"]) == [1.0] * 4
    assert ExactAnswer(numeric=True)(["42.1", "nan"], answer=["42", "1"]) == [0.0, 0.0]
    assert ExactAnswer("solution")(["1"], solution=["1"], answer=["2"]) == [1.0]
    assert ExactAnswer(extract="boxed")([r"thus \boxed{4}", "4"], answer=["4", "4"]) == [1.0, 0.0]
    assert ExactAnswer(extract="number")(["I think 4."], answer=[4]) == [1.0]
    gsm8k = ExactAnswer(extract="gsm8k", reference_extract="gsm8k")
    assert gsm8k(["so #### 1042", "1042"], answer=["5 + 5 ... #### 1,042"] * 2) == [1.0, 0.0]
    tagged = ExactAnswer(pattern=r"<answer>(.*?)</answer>")
    assert tagged(["<answer>1</answer><answer>2</answer>", "2"], answer=["2", "2"]) == [1.0, 0.0]
    assert ExactAnswer(pattern=r"\d+")(["a 1 b 2"], answer=["2"]) == [1.0]  # without group: the whole last match
    numeric = [ExactAnswer(numeric=True).extract_answer(text) for text in ("1,000", "1000.0", "1e3", "9e99999999999")]
    assert len({*numeric[:3]}) == 1 and len(str(numeric[3])) < 20  # all digits of the last one fill the memory
    with pytest.raises(RewardError, match=r"reference_extract='gsm8k': finds no answer in '42'"):
        ExactAnswer(reference_extract="gsm8k")(["1"], answer=["42"])


def test_format_sees_the_completion_only():
    pattern = r"(?s)<think>.*</think>\s*<answer>.*</answer>"
    good, bad = "<think>a\nb</think>\n<answer>c</answer>\n", "c"
    # The prompt shows the format, as prompts do; a completion that lacks it still earns nothing.
    assert scored(RegexFormat(pattern), [good, bad], prompts=[good, good]).total == [1.0, 0.0]


def test_format_full_and_search():
    assert RegexFormat("a+")(["aaa", " aa ", "baa"]) == [1.0, 1.0, 0.0]
    assert RegexFormat("a+", match="search")(["aaa", "baab", "b"]) == [1.0, 1.0, 0.0]


def test_length_reward():
    # -0.5 * |n - 4|: n = 2 -> -1, n = 4 -> 0, n = 7 -> -1.5
    assert LengthReward(target=4, alpha=0.5)(ids(2, 4, 7)) == [-1.0, 0.0, -1.5]
    assert LengthReward(column="want", alpha=0.5)(ids(2, 2), want=[4, None]) == [-1.0, None]
    for both in ({}, {"target": 4, "column": "want"}):  # nothing would be scored, or one of them ignored
        with pytest.raises(ValueError, match="LengthReward.target"):
            LengthReward(**both)


def test_repetition_penalty():
    # "a b a b a": bigrams ab ba ab ba, 2 distinct of 4 -> -2 * (1 - 2/4) = -1
    assert RepetitionPenalty(n=2, max_penalty=2.0)(["a b a b a"], ids(1)) == [-1.0]
    # trigrams aba bab aba, 2 distinct of 3 -> -(1 - 2/3) = -1/3; upper case and line breaks make no difference
    assert RepetitionPenalty(n=3)(["a B a\nb A"], ids(1)) == pytest.approx([-1 / 3])
    assert RepetitionPenalty(n=3)(["a b", "", "a b c d"], ids(1, 1, 1)) == [0.0, 0.0, 0.0]
    # tokens 1 1 1 1: unigrams, 1 distinct of 4 -> -(1 - 1/4)
    assert RepetitionPenalty(n=1, unit="tokens")(["a b c d"], [[1, 1, 1, 1]]) == [-0.75]


def test_soft_overlong():
    # max 10, buffer 4: nothing up to 6; 7 -> (6 - 7) / 4 = -0.25; 10 -> -1; 12 -> -1
    assert SoftOverlong(10, 4)(ids(0, 6, 7, 9, 10, 12)) == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    # DAPO's own numbers: 16384 tokens are free, 18432 is half way, 20480 is the end
    assert SoftOverlong(20480, 4096)(ids(16384, 18432, 20480)) == [0.0, -0.5, -1.0]
    assert SoftOverlong(100, 20)(ids(10, 80, 85, 90, 100, 120)) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert SoftOverlong(100, 50)(ids(90)) == [-0.8]


class Given(Reward):
    def __call__(self, right):
        return right


def cosine(right, lengths, **kwargs):
    reward = CosineLength(Given(), **kwargs)
    n = len(lengths)
    rows = {"prompts": ["p"] * n, "completions": ["c"] * n, "group_ids": [0] * n, "right": right}
    return asyncio.run(reward(completion_ids=ids(*lengths), **rows))


def test_cosine_length():
    # T = 12. cos(pi * 0/12) = 1, cos(pi * 4/12) = 0.5, cos(pi * 6/12) = 0, cos(pi * 8/12) = -0.5
    # right, (1, 0.5): 0.5 + 0.25 * (1 + cos): 1, 0.875, 0.75, 0.625
    assert cosine([1.0] * 4, [0, 4, 6, 8], max_tokens=12) == pytest.approx([1.0, 0.875, 0.75, 0.625])
    # wrong, (-1, -0.5): -0.5 - 0.25 * (1 + cos): -1, -0.875, -0.75, -0.625
    assert cosine([0.0] * 4, [0, 4, 6, 8], max_tokens=12) == pytest.approx([-1.0, -0.875, -0.75, -0.625])
    assert cosine([1.0, 0.0, None, 0.5], [12, 13, 12, 6], max_tokens=12) == [-1.0, -1.0, None, 0.75]


def test_cosine_length_in_a_scorer_passes_columns_to_its_judge():
    judged = CosineLength(ExactAnswer(), max_tokens=2)
    total = scored(judged, ["4", "5", "4"], completion_ids=ids(0, 0, 1), answer=["4", "4", None]).total
    assert total[:2] == [1.0, -1.0] and math.isnan(total[2])


# Exponential: before it can fail, the x are shared out over the two loops in every way.
ENDLESS = "(a|aa)+$"
LONG = "a" * 4000 + "b"


def test_a_backtracking_pattern_ends_within_its_time_and_is_unscored():
    logged = {}
    start = time.monotonic()
    values = RegexFormat(ENDLESS)([LONG, "aaa"], logged.__setitem__)
    assert values == [None, 1.0] and logged == {"timeouts": 0.5}
    exact = ExactAnswer(pattern=ENDLESS)
    assert exact([LONG, "aa", LONG], logged.__setitem__, answer=["a", "a", None]) == [None, 1.0, None]
    assert logged == {"timeouts": pytest.approx(1 / 3)}
    assert RegexFormat(r"(\w+\s?)*\.")(["many words " * 500]) == [0.0]
    assert time.monotonic() - start < 100
