"""RewardScorer: what it adds up, what it refuses, and that nothing waits for what it need not wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading

import numpy as np
import pytest
import torch

from lightrl.records import Scores
from lightrl.rewards import ExactAnswer, Reward, RewardError, RewardScorer

NAN = math.nan


@pytest.fixture
def scorers():
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
        log_metric("loops", 1)
        log_metric("loops", 3)
        log_extra("parsed", [np.float32(0.5), {4}])
        return [0.0] * len(completions)

    def only_answer(answer):
        return [float(x) for x in answer]

    scores = submit(scorers([everything, only_answer]), group=3, answer=[1, 2], other=["a", "b"]).result(60)
    assert seen == {"answer": [1, 2], "other": ["a", "b"], "ids": [[0], [0, 1]], "groups": [3, 3]}
    same(scores.parts["only_answer"], [1.0, 2.0])
    assert scores.metrics == {"reward/everything/loops": 2.0}  # (1 + 3) / 2
    assert scores.extra == {"everything/parsed": [0.5, "{4}"]}


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        (True, 2),
        [np.float32(1), torch.tensor(2)],
    ],
)
def test_arrays_tensors_and_bools_are_rewards(scorers, values):
    def fn(completions):
        return values

    same(submit(scorers([fn])).result(60).total, [1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "for 2 completions"),
        ([1.0, NAN], "value 1 is nan"),
        ([1.0, 1e30], "value 1 is 1e+30"),
        ([1.0, "good"], "value 1 is 'good'"),
        ({"a": 1, "b": 2}, "returned {'a': 1"),
        (1.0, "returned 1.0"),
        (torch.tensor(1.0), "returned tensor"),
        (np.ones((2, 2)), "value 0 is array"),
    ],
)
def test_what_is_no_reward_is_an_error_whatever_on_reward_error_says(scorers, values, words):
    def fn(completions):
        return values

    with pytest.raises(RewardError) as info:
        submit(scorers([fn], on_reward_error="skip")).result(60)
    assert "'fn'" in str(info.value) and words in str(info.value)


def test_a_function_cannot_change_the_rollout_or_what_others_get(scorers):
    ids, answers = [[1, 2], [3]], [{"steps": [1]}, {"steps": [2]}]

    def vandal(completions, completion_ids, answer):
        completion_ids[0].append(9)
        completion_ids[1] = []
        answer[0]["steps"].clear()
        return [0.0, 0.0]

    rows = {"prompts": ["p"] * 2, "completions": ["a", "b"], "group_ids": [0, 0]}
    scorers([vandal]).submit(completion_ids=ids, columns={"answer": answers}, **rows).result(60)
    assert ids == [[1, 2], [3]] and answers == [{"steps": [1]}, {"steps": [2]}]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
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


@pytest.mark.parametrize("own_limit", [None, 1])
def test_calls_at_a_time_are_bounded(scorers, own_limit):
    running, most = 0, 0

    class Counts(Reward):
        max_concurrency = own_limit

        async def __call__(self, completions):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return [0.0, 0.0]

    scorer = scorers([Counts()], max_concurrency=3)
    for handle in [submit(scorer, group=g) for g in range(12)]:
        handle.result(60)
    assert most == (own_limit or 3)


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
    with pytest.raises(ValueError, match="label 'odd'"):
        scorer.check_label("odd", "an example")
    with pytest.raises(ValueError, match="'maths': requires answer"):
        scorers([ExactAnswer()], names=["maths"]).check_source(["prompt"], "the data")


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
    with pytest.raises(concurrent.futures.CancelledError):
        handle.result(60)
    assert not any(thread.name == "rewards" for thread in set(threading.enumerate()) - others)
    same(submit(scorer, group=1).result(60).total, [1.0, 1.0])


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


def test_ambiguous_names_and_weights_are_rejected():
    for arguments in ({"names": ["a", "a"]}, {"rewards_by_label": {"x": [("b", 1.0)]}, "names": ["a", "c"]}):
        with pytest.raises(ValueError, match="names|rewards_by_label"):
            RewardScorer([tidy, none], **arguments)
    with pytest.raises(ValueError, match="mutually exclusive"):
        RewardScorer([tidy], weights=[1.0], rewards_by_label={"a": [("tidy", 1.0)]})


def tidy(completions):
    return [0.2] * len(completions)


def none(completions):
    return [None] * len(completions)
