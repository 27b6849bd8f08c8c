"""The classes of cases, and how a slice of one is drawn and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.fuzz.checkpoints import CHECKPOINTS, judge_checkpoints
from tests.fuzz.data import (
    CHAT_ROWS,
    FILES,
    MEDIA,
    PROMPT_ROWS,
    REWARDS,
    judge_chats,
    judge_files,
    judge_media,
    judge_prompts,
    judge_rewards,
)
from tests.fuzz.servers import SERVERS, judge_servers
from tests.fuzz.verdicts import Hangs, bounded

SECONDS = 60.0
"""A case that takes longer hangs."""


@dataclass(frozen=True)
class Class:
    """What is drawn, what becomes of it, and which share of a campaign it has."""

    title: str
    cases: st.SearchStrategy[Any]
    judge: Callable[[Any], str]
    share: float


CLASSES = {
    "prompts": Class("prompt rows", PROMPT_ROWS, judge_prompts, 0.25),
    "chats": Class("chats, supervised rows, preferences", CHAT_ROWS, judge_chats, 0.2),
    "files": Class("files and folders of rows", FILES, judge_files, 0.1),
    "media": Class("images, videos, sound", MEDIA, judge_media, 0.15),
    "rewards": Class("what a reward function returns", REWARDS, judge_rewards, 0.15),
    "servers": Class("answers of reward, judge and engine servers", SERVERS, judge_servers, 0.1),
    "checkpoints": Class("checkpoints", CHECKPOINTS, judge_checkpoints, 0.05),
}


def shares(cases: int) -> dict[str, int]:
    """Class -> how many of so many cases."""
    return {name: round(cases * each.share) for name, each in CLASSES.items()}


def run_slice(name: str, number: int, count: int) -> Iterator[tuple[Any, str | BaseException]]:
    """(case, verdict or what was raised) of up to `count` cases that the slice's number decides."""
    outcomes: list[tuple[Any, str | BaseException]] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CLASSES[name].cases)
    def draw(case: Any) -> None:
        try:
            with bounded(SECONDS):
                verdict: str | BaseException = CLASSES[name].judge(case)
        except (Exception, Hangs, SystemExit) as error:
            verdict = error
        outcomes.append((case, verdict))

    # Hypothesis also draws constants of the modules that are loaded: a slice would be another one in another process.
    with mock.patch.object(providers, "_get_local_constants", providers.Constants):
        draw()
    return iter(outcomes)
