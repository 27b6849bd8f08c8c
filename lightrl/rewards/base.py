"""Defines reward functions, loads them from import paths, and calls them."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Union

from lightrl.compat.arguments import MAX_REWARD, imported
from lightrl.engines.background import BackgroundLoop, in_thread, outcome_of

RewardValues: TypeAlias = Sequence[float | None]
"""One value per completion: a finite number, or None to leave the completion unscored."""

RewardFn: TypeAlias = Callable[..., RewardValues | Awaitable[RewardValues]]
"""A reward function `(prompts, completions, **columns) -> values`, sync or `async`.

Arguments are passed by keyword. A function gets only the arguments in its signature; `**columns` collects the rest:

| argument | value for a call with n completions |
|---|---|
| `prompts` | n strings, after applying the chat template |
| `completions` | n strings, without the prompt |
| `completion_ids` | n lists of sampled token IDs |
| `images` | n lists of PIL images, empty for text-only examples |
| `videos` | n lists of uint8 arrays of shape (frames, height, width, 3) |
| `audios` | n lists of float32 mono arrays of shape (samples,) |
| `group_ids` | n integers, equal for completions of the same prompt; a call always contains complete groups |
| `log_metric(name, value)` | logs a number as `reward/<function>/<name>` (mean over calls) |
| `log_extra(column, values)` | shows n values with the completions as `<function>/<column>` |
| any other name | n values of that dataset column; the names above take precedence over columns |

`images`, `videos`, and `audios` are passed only as named arguments, not in `**columns`. Media are decoded once and
shared with the engine, the logs, and all completions of a prompt. Don't modify them.
"""

MEDIA = ("images", "videos", "audios")
"""Arguments of reward functions with an example's media, which are not passed in `**columns`."""
OFFERED = ("prompts", "completions", "completion_ids", "group_ids", *MEDIA)
"""Arguments that every function can use in addition to the dataset's columns."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_SHOWN_CHARACTERS = 2000
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardError(RuntimeError):
    """Raised if a reward function fails or returns invalid rewards. The message names the function.

    Reward functions can raise it for configuration errors, which stop the run even with `on_reward_error: skip`.
    """


class CallFailed(RewardError):
    """Raised if a reward function raises or times out. `on_reward_error` controls the consequences."""


class Reward:
    """Base class of reward functions with settings, configured in YAML with `class_path` and `init_args`.

    Plain functions need no base class; YAML refers to them by import path.

    Attributes:
        max_concurrency: Maximum number of concurrent calls of this object. Defaults to the scorer's. If `__call__` is
            not `async`, it is called from several threads. Set 1 if it is not thread-safe.
        needed_columns: Required dataset columns in addition to those in the signature. Checked before training.
    """

    max_concurrency: int | None = None
    needed_columns: Sequence[str] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores n completions. See `RewardFn` for the arguments, which subclasses name in their signature."""
        raise NotImplementedError

    def extract_answer(self, completion: str) -> str | None:
        """Extracts the answer from a completion for majority voting (`eval/maj@n`). None means no answer.

        A plain function may have an attribute of this name.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Releases processes and connections. May be `async`; runs on the event loop of the calls."""
        return None


RewardSpec: TypeAlias = Union[Reward, str, RewardFn]  # noqa: UP007 - jsonargparse reads it at run time
"""A reward function: a `Reward`, an import path (see `load_reward`), or in Python any callable."""


def reward_name(function: RewardFn) -> str:
    """Name of a function in logs: its `__name__`, or the name of its class."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def extracted_answer(function: RewardFn, completion: str) -> str | None:
    """The result of a function's `extract_answer`; None if it has no such method."""
    find = getattr(function, "extract_answer", None)
    found: str | None = find(completion) if callable(find) else None
    return found


def load_reward(path: RewardSpec) -> RewardFn:
    """Loads a reward function from an import path. Returns callables unchanged.

    Args:
        path: `package.module:name`, `package.module.name`, or `path/to/file.py:name`. A `Reward` class without
            required arguments is instantiated.

    Raises:
        ValueError: The path can't be imported.
    """
    found = imported("reward function", path) if isinstance(path, str) else path
    return found() if isinstance(found, type) else found  # type: ignore[no-any-return]


class Call(NamedTuple):
    """Result of a call for n completions."""

    values: list[float]
    """n rewards, NaN for None."""
    metrics: dict[str, float]
    """Means of logged numbers."""
    extra: dict[str, list[Any]]
    """n logged values by column."""


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else str(value)


class RewardFunction:
    """A reward function with its name and the arguments of its signature."""

    def __init__(self, name: str, function: RewardFn) -> None:
        self.name = name
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in _NAMED}
        self.needs = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
        self.max_concurrency: int | None = getattr(function, "max_concurrency", None)
        self.needed_columns = tuple(getattr(function, "needed_columns", ()))
        self._loop = BackgroundLoop(f"reward-{name}")  # a blocking function affects neither others nor timeouts

    def missing(self, names: Collection[str]) -> list[str]:
        """Required arguments other than the given names, `log_metric`, and `log_extra`."""
        return sorted(self.needs - set(names) - {"log_metric", "log_extra"})

    async def run(self, rows: Mapping[str, Sequence[Any]], timeout: float | None = None) -> Call:
        """Calls the function with name -> n values. `timeout` is in seconds; None means no limit.

        Raises:
            CallFailed: The function raised or timed out.
            RewardError: The function returned invalid rewards, lacks a column, or raised a RewardError itself.
        """
        num_rows = len(rows["completions"])
        numbers: dict[str, list[float]] = {}  # of this call only: a late one must not affect others
        extra: dict[str, list[Any]] = {}

        def log_metric(name: str, value: float) -> None:
            numbers.setdefault(f"reward/{self.name}/{name}", []).append(float(value))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != num_rows:
                count = f"{len(values)} values for {num_rows} completions"
                raise ValueError(f"log_extra({column!r}): got {count}. Pass one each.")
            extra[f"{self.name}/{column}"] = [json.loads(json.dumps(value, default=_plain)) for value in values]

        offered = {**rows, "log_metric": log_metric, "log_extra": log_extra}
        if missing := self.missing(offered):
            raise RewardError(
                f"reward function {self.name!r}: requires {', '.join(missing)}, which is not a column of the dataset. "
                f"Use one of: {', '.join(sorted(rows))}."
            )
        try:
            value, error = await asyncio.wait_for(self._outcome(offered), timeout)
        except asyncio.TimeoutError as late:
            raise CallFailed(
                f"reward function {self.name!r}: did not finish within timeout={timeout} seconds. "
                "Speed it up or raise data.rewards.timeout."
            ) from late
        if isinstance(error, RewardError) and not isinstance(error, CallFailed):
            raise RewardError(f"reward function {self.name!r}: {error}") from error
        if error is not None:
            said = f"reward function {self.name!r} raised {type(error).__name__}: {message_of(error)}"
            lines = "" if isinstance(error, CallFailed) else users_lines(error)  # nested functions already added them
            raise CallFailed(said + lines) from error
        values = check_values(self.name, value, num_rows)
        return Call(values, {name: mean(found) for name, found in numbers.items()}, extra)

    async def close(self) -> None:
        """Calls the function's `close`, if it has one, on the event loop of its calls."""
        close = getattr(self.function, "close", None)

        async def last() -> None:
            closing = close() if callable(close) else None
            if inspect.isawaitable(closing):
                await closing

        if not self._loop.started:
            await last()
            return
        _, error = await in_thread(lambda: self._loop.close(last), f"reward-{self.name}'s end")
        if error is not None:
            raise error

    def _arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value if name in MEDIA else copied(value)
            for name, value in offered.items()
            if name in self.takes or (self.takes_all and name not in MEDIA)
        }

    async def _outcome(self, offered: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        """The returned value or the raised error. Copies the arguments in the function's thread, which can be slow."""
        value, error = await in_thread(lambda: self.function(**self._arguments(offered)), f"reward-{self.name}")
        if error is None and inspect.isawaitable(value):
            return await asyncio.wrap_future(self._loop.submit(outcome_of(lambda: value)))
        return value, error


def check_values(name: str, values: Any, num_rows: int) -> list[float]:
    """Returns `num_rows` floats, NaN for None. Raises a RewardError for anything but finite numbers and None."""
    try:
        count = -1 if isinstance(values, (Mapping, Set)) else len(values)
    except TypeError:  # None or a single number
        count = -1
    if count != num_rows:
        raise RewardError(
            f"reward function {name!r}: returned {values!r:.80} for {num_rows} completions. Return a list with one "
            "number each, or None to leave a completion unscored."
        )
    numbers = []
    for index, value in enumerate(values):
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if value is not None and not abs(number) <= MAX_REWARD:  # float32 or its squares would overflow: no score
            raise RewardError(
                f"reward function {name!r}: value {index} is {value!r:.80}. Return a finite number, or None to leave "
                "the completion unscored."
            )
        numbers.append(number)
    return numbers


def copied(value: Any) -> Any:
    """Copies nested lists, tuples, sets, and dictionaries. Other objects, such as images, are not copied.

    Keeps a reward function's changes to its arguments out of the rollout, the logs, and other functions.
    """
    if type(value) in (list, tuple, set):
        return type(value)(value if _UNCHANGING.issuperset(map(type, value)) else map(copied, value))
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    return value


def mean(numbers: Sequence[float]) -> float:
    """The mean. Inf and NaN propagate instead of raising, because a logged number must not stop a run."""
    return sum(number / len(numbers) for number in numbers)


def message_of(error: BaseException) -> str:
    """The message of an error, truncated if long."""
    text = str(error)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def users_lines(error: BaseException) -> str:
    """Frames outside LightRL with file, line, and source, innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    if not frames and error.__cause__ is not None:  # as of a coroutine's StopIteration
        return users_lines(error.__cause__)
    lines = "".join(traceback.format_list(frames)).rstrip()
    return f"\n{lines}" if lines else ""
