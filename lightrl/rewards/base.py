"""Defines reward functions, loads them from import paths, and calls them."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from typing import Any, TypeAlias, Union

import numpy as np

from lightrl.compat.arguments import MAX_REWARD, at_least, imported
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
| `training_progress` | completed fraction of the run's rollouts, repeated n times, in [0, 1); 0 outside training |
| `log_metric(name, value)` | logs a number as `reward/<function>/<name>` (mean over calls) |
| `log_extra(column, values)` | shows n values with the completions as `<function>/<column>` |
| any other name | n values of that dataset column; the names above take precedence over columns |

`images`, `videos`, `audios`, and `training_progress` are passed only as named arguments, not in `**columns`. Media are
decoded once and shared with the engine, the logs, and all completions of a prompt. Don't modify them.
"""

MEDIA = ("images", "videos", "audios")
"""Arguments of reward functions with an example's media."""
ONLY_BY_NAME = (*MEDIA, "training_progress")
"""Arguments that are not passed in `**columns`."""
_SHOWN_FRAMES = 8
_SHOWN_CHARACTERS = 2000
_LONGEST_LOGGED = 100_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardError(RuntimeError):
    """Raised if a reward function fails or returns invalid rewards. The message names the function.

    Reward functions can raise it for configuration errors, which stop the run even with `on_reward_error: skip`.
    """


class CallFailed(RewardError):
    """Raised if a reward function raises or times out. `on_reward_error` controls the consequences."""


class Reward(ABC):
    """Base class of reward functions with settings, configured in YAML with `class_path` and `init_args`.

    Plain functions need no base class; YAML refers to them by import path.

    Attributes:
        max_concurrency: Maximum number of concurrent calls of this object. Defaults to the scorer's. If `__call__` is
            not `async`, it is called from several threads. Set 1 if it is not thread-safe.
        needed_columns: Required dataset columns in addition to those in the signature. Checked before training.
    """

    max_concurrency: int | None = None
    needed_columns: Sequence[str] = ()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores n completions. See `RewardFn` for the arguments, which subclasses name in their signature."""

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
        ValueError: The path can't be imported, or is not a reward function.
    """
    if not isinstance(path, str):
        if not callable(path):
            raise ValueError(f"reward function {path!r}: is not callable. Pass a function or an import path.")
        return path
    found = imported("reward function", path, [cls.__name__ for cls in Reward.__subclasses__()])
    if isinstance(found, type) and issubclass(found, Reward):
        try:
            return found()
        except TypeError as error:
            raise ValueError(
                f"reward function {path!r}: the class requires arguments ({error}). "
                f"Set class_path: {path.replace(':', '.')} and init_args."
            ) from error
    if isinstance(found, type) or not callable(found):
        kind = type(found).__name__
        raise ValueError(f"reward function {path!r}: is of type {kind}. Pass a function or a subclass of Reward.")
    return found  # type: ignore[no-any-return]


class CallLog:
    """Values logged by one call. Not shared between calls, so a timed-out call can't affect later ones."""

    def __init__(self, function: str, num_rows: int) -> None:
        self.function = function
        self.num_rows = num_rows
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number. Repeated values of a name are averaged."""
        self.metrics.setdefault(f"reward/{self.function}/{name}", []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Logs one value per completion. Values that JSON doesn't support become text."""
        if len(values) != self.num_rows:
            raise ValueError(
                f"log_extra({column!r}): got {len(values)} values for {self.num_rows} completions. Pass one each."
            )
        self.extra[f"{self.function}/{_text(column)}"] = [_loggable(value) for value in values]


def _loggable(value: Any) -> Any:
    """Converts a value to JSON types. Unsupported types become text; long values are truncated to one text."""
    try:
        written = json.dumps(value, default=_plain, skipkeys=True, ensure_ascii=False)
        if len(written) > _LONGEST_LOGGED:
            return _text(written[:_LONGEST_LOGGED] + "...")
        return json.loads(_SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", written))
    except Exception:  # circular, too deep, or with a broken `__str__`
        return f"<{type(value).__name__}>"


def _plain(value: Any) -> Any:
    if isinstance(value, Set):
        return list(value)
    return value.item() if getattr(value, "shape", None) == () else _text(value)


def _text(value: Any) -> str:
    """Text that can be encoded as UTF-8: escapes surrogates and invalid bytes."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text.encode(errors="backslashreplace").decode()


class RewardFunction:
    """A reward function with its name and the arguments of its signature.

    Raises:
        ValueError: The function has positional-only arguments, or `max_concurrency` is below 1.
    """

    def __init__(self, name: str, function: RewardFn) -> None:
        self.name = name
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in _NAMED}
        self.needs = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward function {name!r}: has positional-only arguments, but arguments are passed by keyword. "
                "Remove the / from its signature."
            )
        own_limit, label = getattr(function, "max_concurrency", None), f"reward function {name!r}: max_concurrency"
        self.max_concurrency = at_least(label, own_limit, 1, or_none="for the scorer's limit")
        self.needed_columns = tuple(getattr(function, "needed_columns", ()))
        inner = getattr(function, "func", function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._loop = BackgroundLoop(f"reward-{name}")  # a blocking function affects neither others nor timeouts

    def missing(self, names: Collection[str]) -> list[str]:
        """Required arguments other than the given names, `log_metric`, and `log_extra`."""
        return sorted(self.needs - set(names) - {"log_metric", "log_extra"})

    def complaint(self, names: Collection[str], source: str = "the dataset") -> str | None:
        """An error message if a required argument is missing from a source's names; otherwise None."""
        if not (missing := self.missing(names)):
            return None
        return (
            f"reward function {self.name!r}: requires {', '.join(missing)}, which is not a column of {source}. "
            f"Use one of: {', '.join(sorted(names))}."
        )

    async def run(self, rows: Mapping[str, Sequence[Any]], timeout: float | None) -> tuple[list[float], CallLog]:
        """Calls the function.

        Args:
            rows: Name -> n values: prompts, completions, completion_ids, group_ids, and the dataset's columns.
            timeout: Time limit for the call in seconds. None means no limit.

        Returns:
            (n floats, NaN for None; the values logged by the function).

        Raises:
            CallFailed: The function raised or timed out.
            RewardError: The function returned invalid rewards, lacks a column, or raised a RewardError itself.
        """
        num_rows = len(rows["completions"])
        log = CallLog(self.name, num_rows)
        offered = {**rows, "log_metric": log.log_metric, "log_extra": log.log_extra}
        if complaint := self.complaint(offered):
            raise RewardError(complaint)
        task = asyncio.ensure_future(self._outcome(offered))
        try:
            await asyncio.wait({task}, timeout=timeout)
        finally:
            if not task.done():  # timed out, or the scorer is closing
                task.cancel()
        if not task.done():
            raise CallFailed(
                f"reward function {self.name!r}: did not finish within timeout={timeout} seconds. "
                "Speed it up or raise data.rewards.timeout."
            )
        if task.cancelled():
            raise CallFailed(f"reward function {self.name!r}: was cancelled.")
        value, error = task.result()
        if isinstance(error, RewardError) and not isinstance(error, CallFailed):
            raise RewardError(f"reward function {self.name!r}: {error}") from error
        if error is not None:
            said = f"reward function {self.name!r} raised {type(error).__name__}: {message_of(error)}"
            lines = "" if isinstance(error, CallFailed) else users_lines(error)  # nested functions already added them
            raise CallFailed(said + lines) from error
        return check_values(self.name, value, num_rows), log

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
            if name in self.takes or (self.takes_all and name not in ONLY_BY_NAME)
        }

    async def _outcome(self, offered: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        """The returned value or the raised error. Copies the arguments in the function's thread, which can be slow."""
        if self.is_async:
            return await self._awaited(lambda: self.function(**self._arguments(offered)))
        value, error = await in_thread(lambda: self.function(**self._arguments(offered)), f"reward-{self.name}")
        if error is None and inspect.isawaitable(value):  # a sync function that returned a coroutine
            return await self._awaited(lambda: value)
        return value, error

    async def _awaited(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        return await asyncio.wrap_future(self._loop.submit(outcome_of(call)))


def check_values(name: str, values: Any, num_rows: int) -> list[float]:
    """Validates the values of a reward function. Returns `num_rows` floats, NaN for None.

    Raises:
        RewardError: The length is wrong, or a value is neither a finite number nor None.
    """
    scalar = getattr(values, "shape", None) == ()  # arrays and tensors without dimensions are also Collections
    if scalar or isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Collection):
        raise RewardError(
            f"reward function {name!r}: returned {_short(values)} of type {type(values).__name__}. "
            f"Return a list of {num_rows} values."
        )
    if len(values) != num_rows:
        raise RewardError(
            f"reward function {name!r}: returned {len(values)} values for {num_rows} completions. "
            "Return one value per completion, or None to leave a completion unscored."
        )
    return [_number(name, index, value) for index, value in enumerate(values)]


def _number(name: str, index: int, value: Any) -> float:
    if value is None or value is np.ma.masked:  # whose `item()` is 0
        return math.nan
    number = value.item() if getattr(value, "shape", None) == () else value  # of an array or a tensor
    try:
        result = float(number) if isinstance(number, numbers.Real) else math.nan
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(
            f"reward function {name!r}: value {index} is {_short(value)} of type {type(value).__name__}. "
            "Return a finite number, or None to leave the completion unscored."
        )
    if abs(result) > MAX_REWARD:
        raise RewardError(
            f"reward function {name!r}: value {index} is {result:g}, which overflows float32 sums of squares. "
            f"Scale rewards to absolute values of at most {MAX_REWARD:g}."
        )
    return result


def copied(value: Any) -> Any:
    """Copies nested lists, tuples, sets, and dictionaries, and makes read-only views of arrays.

    Keeps a reward function's changes to its arguments out of the rollout, the logs, and other functions. Other objects,
    such as images, are not copied.
    """
    if type(value) in (list, tuple, set):
        return type(value)(value if _UNCHANGING.issuperset(map(type, value)) else map(copied, value))
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    return value


def mean(numbers: Sequence[float]) -> float:
    """The mean. Inf and NaN propagate instead of raising, because a logged number must not stop a run."""
    return sum(number / len(numbers) for number in numbers)


def message_of(error: BaseException) -> str:
    """The message of an error, truncated if long."""
    text = str(error)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def users_lines(error: BaseException, *own: str) -> str:
    """Frames of the user's code with file, line, and source, innermost last.

    Args:
        error: The user's code raised it, or it was raised from that (as Python does for a coroutine's StopIteration).
        own: Files other than this one that are between the call and the user's code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename in (__file__, in_thread.__code__.co_filename, *own):
        del frames[0]
    if not frames and error.__cause__ is not None:
        return users_lines(error.__cause__, *own)
    if len(frames) > _SHOWN_FRAMES:
        del frames[1 : len(frames) - _SHOWN_FRAMES + 1]  # keeps the user's first frame and the innermost frames
    lines = "".join(traceback.format_list(frames)).rstrip()
    return f"\n{lines}" if lines else ""


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # an integer with thousands of digits, or a broken `__repr__`
        return f"a {type(value).__name__} without a repr ({error})"
    return text if len(text) <= 80 else text[:77] + "..."
