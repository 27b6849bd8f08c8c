"""RewardScorer: what it adds up, what it refuses, and that nothing waits for what it need not wait for."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lightrl.records import Scores
from lightrl.rewards import CombinedReward, Reward, RewardError, RewardScorer
from lightrl.rewards.base import CallLog

NAN = math.nan


@pytest.fixture
def scorers():
    """Builds scorers and closes them at the end."""
    made = []

    def build(*args, **kwargs):
        made.append(RewardScorer(*args, **kwargs))
        return made[-1]

    yield build
    for scorer in made:
        scorer.close()


def submit(scorer, n=2, group=0, **columns):
    return scorer.submit(
        prompts=["p"] * n,
        completions=[f"c{i}" for i in range(n)],
        completion_ids=[list(range(i + 1)) for i in range(n)],
        columns=columns,
        group_ids=[group] * n,
    )


def same(a, b):
    assert len(a) == len(b)
    assert all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True)), (a, b)


def test_total_is_the_weighted_sum_of_what_applies(scorers):
    def first(completions):
        return [1.0, None, None, 4]

    def second(completions):
        return [10, 20, None, None]

    scores = submit(scorers([first, second], weights=[2.0, 0.5]), n=4).result(60)
    # 2*1 + 0.5*10 = 7; 0.5*20 = 10; nobody; 2*4 = 8
    same(scores.total, [7.0, 10.0, NAN, 8.0])
    same(scores.parts["first"], [1.0, NAN, NAN, 4.0])
    same(scores.parts["second"], [10.0, 20.0, NAN, NAN])


def test_a_function_of_weight_zero_is_logged_and_scores_nothing(scorers):
    def judge(completions):
        return [1.0, None]

    def watch(completions):
        return [5.0, 6.0]

    scores = submit(scorers([judge, watch], weights=[1.0, 0.0])).result(60)
    same(scores.total, [1.0, NAN])
    same(scores.parts["watch"], [5.0, 6.0])


def test_functions_get_what_their_signature_names(scorers):
    seen = {}

    def everything(prompts, completions, completion_ids, group_ids, log_metric, log_extra, **columns):
        seen.update(columns, ids=completion_ids, groups=group_ids)
        return [0.0] * len(completions)

    def only_answer(answer):
        return [float(x) for x in answer]

    scores = submit(scorers([everything, only_answer]), group=3, answer=[1, 2], other=["a", "b"]).result(60)
    assert seen == {"answer": [1, 2], "other": ["a", "b"], "ids": [[0], [0, 1]], "groups": [3, 3]}
    same(scores.parts["only_answer"], [1.0, 2.0])


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        (True, 2),
        [np.float32(1), torch.tensor(2)],
        [np.bool_(True), Fraction(2)],
    ],
)
def test_arrays_tensors_and_bools_are_rewards(scorers, values):
    def fn(completions):
        return values

    same(submit(scorers([fn])).result(60).total, [1.0, 2.0])


def test_a_masked_value_is_no_score(scorers):
    same(
        submit(scorers([lambda completions: np.ma.array([1.0, 2.0], mask=[True, False])])).result(60).total, [NAN, 2.0]
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], ["'fn'", "1 values for 2 completions"]),
        ([1.0, NAN], ["'fn'", "value 1", "nan"]),
        ([math.inf, 0.0], ["'fn'", "value 0", "inf"]),
        ([1.0, "good"], ["'fn'", "value 1", "'good'", "str"]),
        ("ab", ["'fn'", "str", "list of 2"]),
        ({"a": 1, "b": 2}, ["'fn'", "dict"]),
        (1.0, ["'fn'", "float"]),
        (None, ["'fn'", "NoneType"]),
        ([10**400, 1.0], ["'fn'", "value 0"]),
        ([10**5000, 1.0], ["'fn'", "value 0"]),
        ([1.0, 1e308], ["'fn'", "value 1 is 1e+308", "float32"]),
        ([Decimal(1), 1.0], ["'fn'", "value 0", "Decimal"]),
        (torch.tensor(1.0), ["'fn'", "Tensor", "list of 2"]),
        (np.ones((2, 2)), ["'fn'", "value 0", "ndarray"]),
    ],
)
def test_what_is_no_reward_is_an_error_whatever_on_reward_error_says(scorers, values, words):
    def fn(completions):
        return values

    with pytest.raises(RewardError) as info:
        submit(scorers([fn], on_reward_error="skip")).result(60)
    assert all(word in str(info.value) for word in words), info.value
    assert len(str(info.value).splitlines()) == 1


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1e6, 1.0], [1e6, 1e6]])
def test_a_sum_beyond_float32_names_the_functions(scorers, weights):
    def large(completions):
        return [1.0, 9e15]

    def other(completions):
        return [1.0, 9e15]

    with pytest.raises(RewardError, match=r"completion \d: the weighted sum .* large=.* other=.*at most 1e\+16"):
        submit(scorers([large, other], weights=weights)).result(60)


def test_a_function_cannot_change_the_rollout_or_what_others_get(scorers):
    ids, answers, boxes = [[1, 2], [3]], [{"steps": [1]}, {"steps": [2]}], [np.zeros(2), np.zeros(2)]

    def vandal(completions, completion_ids, answer, box):
        completion_ids[0].append(9)
        completion_ids[1] = []
        answer[0]["steps"].clear()
        with pytest.raises(ValueError, match="read-only"):
            box[0][0] = 1
        return [0.0, 0.0]

    rows = {"prompts": ["p"] * 2, "completions": ["a", "b"], "group_ids": [0, 0]}
    columns = {"answer": answers, "box": boxes}
    scorers([vandal]).submit(completion_ids=ids, columns=columns, **rows).result(60)
    assert ids == [[1, 2], [3]] and answers == [{"steps": [1]}, {"steps": [2]}] and boxes[0][0] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_the_users_own_lines_are_in_the_message(scorers, is_async):
    def helper(value):
        return 1 / value  # the line to look at

    def plain(completions):
        return [helper(0)]

    async def coroutine(completions):
        return [helper(0)]

    with pytest.raises(RewardError) as info:
        submit(scorers([coroutine if is_async else plain])).result(60)
    first, *lines = str(info.value).splitlines()
    assert first.endswith("raised ZeroDivisionError: division by zero")
    assert "return [helper(0)]" in lines[1] and "return 1 / value  # the line to look at" in "".join(lines)
    assert all("test_scorer.py" in line for line in lines if "File" in line)  # our own frames are left out


def test_missing_columns_are_named_before_anything_is_scored(scorers):
    def fn(completions, solution):
        return [0.0]

    scorers([fn]).require_columns(["solution", "prompt"])
    with pytest.raises(ValueError, match="'fn': requires solution.*one of: answer"):
        scorers([fn]).require_columns(["answer"])
    with pytest.raises(ValueError, match="label_column='kind'"):
        scorers([fn], rewards_by_label={"a": [("fn", 1.0)]}, label_column="kind").require_columns(["solution"])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_is_no_exception_does_not_end_the_scorer(scorers, kind, is_async):
    """Such as `sys.exit` in a reward function, which would end the event loop that all of them wait for."""

    def plain(completions):
        raise kind("out")

    async def coroutine(completions):
        raise kind("out")

    scorer = scorers([coroutine if is_async else plain])
    for _ in range(2):
        with pytest.raises(RewardError, match=f"raised {kind.__name__}: out"):
            submit(scorer).result(60)


def test_on_reward_error_none_leaves_the_rows_out_and_counts_them(scorers, caplog):
    def broken(completions, group_ids):
        if group_ids[0] == 1:
            raise OSError("disk")
        return [1.0, 1.0]

    def fine(completions):
        return [2.0, 2.0]

    scorer = scorers([broken, fine], on_reward_error="skip")
    scores = Scores.concat([submit(scorer, group=g).result(60) for g in (0, 1)])
    same(scores.total, [3.0, 3.0, 2.0, 2.0])
    assert scores.metrics == {"reward/broken/failed": 0.5, "reward/fine/failed": 0.0}
    assert "disk" in caplog.text and "broken" in caplog.text


def test_a_mistake_in_the_set_up_is_an_error_whatever_on_reward_error_says(scorers):
    def fn(completions):
        raise RewardError("no such column")

    with pytest.raises(RewardError, match="'fn': no such column"):
        submit(scorers([fn], on_reward_error="skip")).result(60)


@pytest.mark.parametrize("is_async", [False, True])
def test_timeout(scorers, is_async):
    release = threading.Event()

    def plain(completions):
        release.wait(60)
        return [1.0, 1.0]

    async def coroutine(completions):
        await asyncio.sleep(3600)

    def quick(completions):
        return [5.0, 5.0]

    hanging = coroutine if is_async else plain
    try:
        with pytest.raises(RewardError, match=rf"'{hanging.__name__}'.*timeout=0.05"):
            submit(scorers([hanging], timeout=0.05)).result(60)
        scores = submit(scorers([hanging, quick], timeout=2.0, on_reward_error="skip")).result(60)
        same(scores.total, [5.0, 5.0])
        assert scores.metrics[f"reward/{hanging.__name__}/failed"] == 1.0
    finally:
        release.set()


def test_an_async_function_that_blocks_its_loop_is_out_of_time_and_others_are_not(scorers):
    release = threading.Event()

    async def blocks(completions):
        release.wait(600)
        return [1.0, 1.0]

    async def other(completions):
        await asyncio.sleep(0.01)
        return [5.0, 5.0]

    try:
        with pytest.raises(RewardError, match="'blocks'.*timeout=0.2"):
            submit(scorers([blocks], timeout=0.2)).result(60)
        scores = submit(scorers([blocks, other], timeout=1.0, on_reward_error="skip")).result(60)
        same(scores.total, [5.0, 5.0])
    finally:
        release.set()


def test_what_is_logged_never_ends_the_run(scorers):
    def logs(completions, log_metric, log_extra):
        for name, values in {"big": [1e308, 1e308], "none": [math.inf, -math.inf], "two": [1.0, 3.0]}.items():
            for value in values:
                log_metric(name, value)
        log_extra("text", ["caf\udce9", b"\xff"])
        return [1.0, 2.0]

    scores = submit(scorers([logs])).result(60)
    assert scores.metrics["reward/logs/big"] == 1e308 and scores.metrics["reward/logs/two"] == 2.0
    assert math.isnan(scores.metrics["reward/logs/none"])
    assert scores.extra["logs/text"] == ["caf\\udce9", "\\xff"]


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "logged"),
    [
        ([1, 2.5, True, None, np.float32(0.5), torch.tensor(2), (3,), {4}], [1, 2.5, True, None, 0.5, 2, [3], [4]]),
        (Unspeakable(), "<Unspeakable>"),
        (datetime.date(2025, 1, 2), "2025-01-02"),
        (np.arange(3), "[0 1 2]"),
        ({"caf\udce9": b"\xff"}, {"caf\\udce9": "\\xff"}),
        ("y" * 1_000_000, '"' + "y" * 99_999 + "..."),
    ],
)
def test_what_json_cannot_hold_is_logged_as_text(value, logged):
    log = CallLog("fn", 1)
    log.log_extra("col\udce9", [value])
    assert log.extra == {"fn/col\\udce9": [logged]}
    json.dumps(log.extra, ensure_ascii=False).encode()


def test_a_call_that_timed_out_gives_its_place_back(scorers):
    release = threading.Event()

    def fn(completions, group_ids):
        if group_ids[0] == 0:
            release.wait(60)
        return [1.0, 1.0]

    scorer = scorers([fn], timeout=2.0, on_reward_error="skip", max_concurrency=1)
    handles = [submit(scorer, group=g) for g in (0, 1)]
    same(handles[1].result(60).total, [1.0, 1.0])
    release.set()
    same(handles[0].result(60).total, [NAN, NAN])


def test_submit_does_not_wait_and_later_groups_overtake(scorers):
    release = threading.Event()

    def fn(completions, group_ids):
        if group_ids[0] == 0:
            assert release.wait(60)
        return [1.0, 1.0]

    scorer = scorers([fn])
    slow, fast = submit(scorer, group=0), submit(scorer, group=1)
    fast.result(60)
    assert fast.done() and not slow.done()
    with pytest.raises(TimeoutError):
        slow.result(0.01)
    release.set()
    same(slow.result(60).total, [1.0, 1.0])


@pytest.mark.parametrize("own_limit", [None, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_at_a_time_are_bounded(scorers, is_async, own_limit):
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Event()  # as many as may run have met; one more would be counted in the moment that follows

    def enter(step):
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)
            if running == (own_limit or 3):
                full.set()

    class Plain(Reward):
        max_concurrency = own_limit

        def __call__(self, completions):
            enter(1)
            full.wait(60)
            time.sleep(0.01)
            enter(-1)
            return [0.0, 0.0]

    class Coroutine(Reward):
        max_concurrency = own_limit

        async def __call__(self, completions):
            enter(1)
            await asyncio.to_thread(full.wait, 60)
            await asyncio.sleep(0.01)
            enter(-1)
            return [0.0, 0.0]

    scorer = scorers([Coroutine() if is_async else Plain()], max_concurrency=3)
    for handle in [submit(scorer, group=g) for g in range(12)]:
        handle.result(60)
    assert most == (own_limit or 3)


def test_logged_metrics_and_columns(scorers):
    def fn(completions, log_metric, log_extra):
        log_metric("loops", 1)
        log_metric("loops", 3)
        log_extra("parsed", [c.upper() for c in completions])
        return [0.0] * len(completions)

    scorer = scorers([fn])
    scores = submit(scorer).result(60)
    assert scores.metrics == {"reward/fn/loops": 2.0}  # (1 + 3) / 2
    assert scores.extra == {"fn/parsed": ["C0", "C1"]}


def test_concat_keeps_rows_in_order_and_fills_missing_columns():
    a = Scores([1.0], {"f": [1.0]}, {"m": 1.0}, {"f/x": ["a"]})
    b = Scores([2.0, 3.0], {"f": [2.0, 3.0]}, {"m": 4.0, "k": 1.0})
    both = Scores.concat([a, b])
    assert both.total == [1.0, 2.0, 3.0] and both.parts == {"f": [1.0, 2.0, 3.0]}
    assert both.metrics == {"m": 2.5, "k": 1.0} and both.extra == {"f/x": ["a", None, None]}
    assert Scores.concat([]) == Scores([], {})


def test_recipes_choose_functions_and_weights_per_row(scorers):
    asked = {"maths": [], "style": []}

    def maths(completions):
        asked["maths"].append(completions)
        return [1.0] * len(completions)

    def style(completions, log_extra):
        asked["style"].append(completions)
        log_extra("seen", completions)
        return [10.0] * len(completions)

    rewards_by_label = {
        "sum": [("maths", 1.0)],
        "poem": [("style", 0.5)],
        "both": [("maths", 2.0), ("style", 0.5)],
        "off": [],
    }
    scorer = scorers([maths, style], rewards_by_label=rewards_by_label)
    scores = submit(scorer, n=4, label=["sum", "poem", "both", "off"]).result(60)
    same(scores.total, [1.0, 5.0, 2 * 1 + 0.5 * 10, NAN])
    same(scores.parts["maths"], [1.0, NAN, 1.0, NAN])
    assert asked == {"maths": [["c0", "c2"]], "style": [["c1", "c2"]]}  # a source runs on the rows that need it
    assert scores.extra == {"style/seen": [None, "c1", "c2", None]}
    assert scorer.weights == {"style": 0.5}  # that of maths differs between labels
    submit(scorer, label=["sum", "sum"]).result(60)
    assert len(asked["style"]) == 1  # and not at all where no row does


def test_unknown_label_and_missing_label_column(scorers):
    def fn(completions):
        return [0.0] * len(completions)

    scorer = scorers([fn], rewards_by_label={"a": [("fn", 1.0)], "b": []}, label_column="kind")
    with pytest.raises(ValueError, match=r"row 1 .*label 'c'.*labels: 'a', 'b'"):
        submit(scorer, kind=["a", "c"])
    with pytest.raises(ValueError, match="label_column='kind'"):
        submit(scorer, label=["a", "a"])


def _fn(completions):
    return [0.0] * len(completions)


class _Limited(Reward):
    def __init__(self, max_concurrency):
        self.max_concurrency = max_concurrency

    def __call__(self, completions):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"functions": []}, "functions="),
        ({"functions": [_fn], "weights": [1.0, 2.0]}, "weights"),
        ({"functions": [_fn, _fn]}, "names="),
        ({"functions": [_fn], "weights": [NAN]}, "weights"),
        ({"functions": [_fn], "max_concurrency": 0}, "max_concurrency=0"),
        ({"functions": [_Limited(-1)]}, "max_concurrency=-1"),
        ({"functions": [_Limited("2")]}, "max_concurrency='2'"),
        ({"functions": [_Limited(0)]}, "max_concurrency=0: must be at least 1"),
        ({"functions": [_fn], "timeout": 0}, "timeout=0"),
        ({"functions": [_fn], "on_reward_error": "ignore"}, "on_reward_error='ignore'"),
        ({"functions": [_fn], "rewards_by_label": {"a": [("g", 1.0)]}}, "rewards_by_label"),
        ({"functions": [_fn], "rewards_by_label": {"a": []}}, "no label uses.*_fn"),
        ({"functions": [_fn], "rewards_by_label": {"a": [("_fn", 1.0), ("_fn", 2.0)]}}, "twice"),
        ({"functions": [_fn], "rewards_by_label": {"a": [("_fn", 1.0)]}, "weights": [1.0]}, "mutually"),
        ({"functions": [lambda a, /: a]}, "positional-only"),
        ({"functions": [3]}, "not callable"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RewardScorer(**kwargs)


def test_lengths_are_checked_at_submission(scorers):
    with pytest.raises(ValueError, match="2 completions.*'answer': 3"):
        submit(scorers([_fn]), answer=[1, 2, 3])


def test_close_gives_up_frees_the_functions_and_allows_a_new_start(scorers):
    started, closed = threading.Event(), []

    class Slow(Reward):
        async def __call__(self, completions, group_ids):
            if group_ids[0] == 0:
                started.set()
                await asyncio.sleep(60)
            return [1.0, 1.0]

        async def close(self):
            closed.append(True)

    others = set(threading.enumerate())
    scorer = scorers([Slow()])
    handle = submit(scorer)
    assert started.wait(60)
    scorer.close()
    scorer.close()
    assert closed == [True]
    with pytest.raises(RewardError, match="closed before"):
        handle.result(60)
    assert not any(thread.name == "rewards" for thread in set(threading.enumerate()) - others)
    same(submit(scorer, group=1).result(60).total, [1.0, 1.0])


def test_a_hanging_function_does_not_keep_the_process_alive():
    code = """
import threading
from lightrl.rewards import RewardScorer
started = threading.Event()
def hang(completions):
    started.set()
    threading.Event().wait()
scorer = RewardScorer([hang])
handle = scorer.submit(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={}, group_ids=[0])
started.wait()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0 and done.stdout == "end\n", done.stderr


def test_ctrl_c_interrupts_the_wait():
    code = """
import signal, threading, os
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
from lightrl.rewards import RewardScorer
def hang(completions):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
scorer = RewardScorer([hang])
try:
    scorer.submit(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={}, group_ids=[0]).result()
except KeyboardInterrupt:
    scorer.close()
    print("stopped", [t.name for t in threading.enumerate() if t.name == "rewards"], flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550)
    assert done.stdout == "stopped []\n", done.stderr


def test_media_reach_only_functions_that_name_them():
    seen = {}

    def sees(completions, images, videos, **columns):
        seen["sees"] = (images, videos, sorted(columns))
        return [0.0] * len(completions)

    def everything(completions, **columns):
        seen["everything"] = sorted(columns)
        return [0.0] * len(completions)

    scorer = RewardScorer([sees, everything])
    picture = object()
    media = {"images": [[picture], []], "videos": [[], []]}
    rows = {"prompts": ["p"] * 2, "completions": ["c"] * 2, "completion_ids": [[1]] * 2, "group_ids": [0, 1]}
    scorer.submit(columns={"images": ["a.png", None], "level": [1, 2]}, media=media, **rows).result(60)
    scorer.close()
    assert seen["sees"][0][0][0] is picture and seen["sees"][1] == [[], []]
    assert not {"images", "videos"} & {*seen["everything"], *seen["sees"][2]} and "level" in seen["everything"]


# ---- another rule than the sum -----------------------------------------------------------------------------------


async def right(completions, **_):
    return [1.0, 0.5, None]


def tidy(completions, **_):
    return [0.2, -1.0, 3.0][: len(completions)]


def none(completions, **_):
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("product", [0.2, -0.5, 3.0]),
        ("min", [0.2, -1.0, 3.0]),
        ("max", [1.0, 0.5, 3.0]),
        (lambda parts: [10 * parts["tidy"][0], None, None], [2.0, NAN, NAN]),
    ],
)
def test_rewards_combine_by_another_rule(scorers, by, expected) -> None:
    scorer = scorers([CombinedReward([right, tidy], by), tidy], weights=[1.0, 0.0])
    scores = submit(scorer, n=3).result(60)
    same(scores.total, expected)
    assert scores.extra["CombinedReward/right"] == [1.0, 0.5, None]
    assert scores.metrics["reward/CombinedReward/right"] == 0.75
    same(submit(scorers([CombinedReward([none, none], "min", names=["a", "b"])]), n=2).result(60).total, [NAN, NAN])


def test_bad_combinations_are_refused() -> None:
    for arguments, text in (
        ({"rewards": [right]}, "at least two"),
        ({"rewards": [right, right]}, "names="),
        ({"rewards": [right, tidy], "by": "mean"}, "by='mean'"),
        ({"rewards": [right, lambda images: []]}, "uses images"),
    ):
        with pytest.raises(ValueError, match=text):
            CombinedReward(**arguments)
