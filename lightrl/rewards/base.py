"""Reward functions: what they are, how a name in YAML becomes one, and how one is called."""

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
"""One value per completion: a finite number, or None if the function does not apply."""

RewardFn: TypeAlias = Callable[..., RewardValues | Awaitable[RewardValues]]
"""`(prompts, completions, **columns) -> values`, plain or `async`.

Every argument is passed by keyword, and only what the signature takes (`**columns` takes all of it):

| name | value for the n rows of the call |
|---|---|
| `prompts` | n strings, after the chat template |
| `completions` | n strings, the sampled text alone |
| `completion_ids` | n lists of sampled token ids |
| `images` | n lists of PIL images, empty for text |
| `videos` | n lists of arrays (frames, height, width, 3) of uint8 |
| `audios` | n lists of mono arrays (samples,) of float32 |
| `group_ids` | n integers, equal for the completions of one prompt; a call always has whole groups |
| `training_progress` | n times the fraction of the run's rollouts that are done, in [0, 1); 0 outside of training |
| `log_metric(name, value)` | logs a number as `reward/<function>/<name>` (mean over calls) |
| `log_extra(column, values)` | n values shown with the completions as `<function>/<column>` |
| any other name | the dataset's column of that name, n values; the names above hide columns |

`images`, `videos`, `audios`, and `training_progress` reach only functions that name them, not `**columns`. Media are
decoded once and shared with the engine, the logs, and all completions of a prompt: do not write into them.
"""

MEDIA = ("images", "videos", "audios")
"""Names under which reward functions get a row's media."""
ONLY_BY_NAME = (*MEDIA, "training_progress")
"""Names that `**columns` does not take."""
_SHOWN_FRAMES = 8
_SHOWN_CHARACTERS = 2000
_LONGEST_LOGGED = 100_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardError(RuntimeError):
    """A reward function failed or returned something that is not a reward. The message names the function.

    Functions raise it for mistakes in the setup, which `on_reward_error: skip` does not turn into None.
    """


class CallFailed(RewardError):
    """The function raised or timed out: the failures that `on_reward_error` decides about."""


class Reward(ABC):
    """Base class of reward functions with settings, which YAML names by `class_path` and `init_args`.

    A plain function needs no base class: YAML names it by its import path.

    Attributes:
        max_concurrency: Maximum number of concurrent calls of this object. Defaults to the scorer's. A class whose
            `__call__` is not `async` is called from several threads: set 1 if that is not safe.
        needed_columns: Dataset columns that it reads beyond those in its signature; checked before training.
    """

    max_concurrency: int | None = None
    needed_columns: Sequence[str] = ()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores n completions; the contract is `RewardFn`. Subclasses name the arguments they want."""

    def extract_answer(self, completion: str) -> str | None:
        """The answer in a completion, its vote in `eval/maj@n`. Completions with equal strings agree.

        A plain function may have an attribute of this name. None, the default, finds no answer.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Frees what calls opened (processes, connections). May be `async`; runs on the loop of the calls."""
        return None


RewardSpec: TypeAlias = Union[Reward, str, RewardFn]  # noqa: UP007 - jsonargparse reads it at run time
"""A reward in a constructor: a `Reward`, an import path (see `load_reward`), or in Python any function."""


def reward_name(function: RewardFn) -> str:
    """The name of a function in logs: its `__name__`, or the name of its class."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def extracted_answer(function: RewardFn, completion: str) -> str | None:
    """What a function's `extract_answer` finds; None if it has none."""
    find = getattr(function, "extract_answer", None)
    found: str | None = find(completion) if callable(find) else None
    return found


def load_reward(path: RewardSpec) -> RewardFn:
    """Turns an import path into a reward function; returns callables unchanged.

    Args:
        path: `package.module:name`, `package.module.name`, or `path/to/file.py:name`. A `Reward` class without
            required arguments is instantiated.

    Raises:
        ValueError: It cannot be imported or is not a reward function; the message says which part failed.
    """
    if not isinstance(path, str):
        if not callable(path):
            raise ValueError(f"reward function {path!r}: neither callable nor an import path.")
        return path
    found = imported("reward function", path, [cls.__name__ for cls in Reward.__subclasses__()])
    if isinstance(found, type) and issubclass(found, Reward):
        try:
            return found()
        except TypeError as error:
            raise ValueError(
                f"reward function {path!r}: the class needs arguments ({error}). "
                f"Set class_path: {path.replace(':', '.')} and init_args."
            ) from error
    if isinstance(found, type) or not callable(found):
        kind = type(found).__name__
        raise ValueError(f"reward function {path!r}: is a {kind}, not a function or a subclass of Reward.")
    return found  # type: ignore[no-any-return]


class CallLog:
    """What one call logs. It belongs to that call alone, so a call that timed out cannot write into later ones."""

    def __init__(self, function: str, num_rows: int) -> None:
        self.function = function
        self.num_rows = num_rows
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number; several values of one name are averaged."""
        self.metrics.setdefault(f"reward/{self.function}/{name}", []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Logs one value per row of the call; what JSON cannot hold becomes text."""
        if len(values) != self.num_rows:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {self.num_rows} completions.")
        self.extra[f"{self.function}/{_text(column)}"] = [_loggable(value) for value in values]


def _loggable(value: Any) -> Any:
    """The value as JSON holds it, with anything else as text; as one cut text if it is long or cannot be written."""
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
    """Text that every file can hold: surrogates and bytes that are not UTF-8 are escaped."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text.encode(errors="backslashreplace").decode()


class RewardFunction:
    """A reward function with its name and what its signature takes.

    Raises:
        ValueError: It takes positional-only arguments, or its `max_concurrency` is below 1.
    """

    def __init__(self, name: str, function: RewardFn) -> None:
        self.name = name
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in _NAMED}
        self.needs = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
            raise ValueError(f"reward function {name!r}: takes positional-only arguments. Take all by keyword.")
        own_limit, label = getattr(function, "max_concurrency", None), f"reward function {name!r}: max_concurrency"
        self.max_concurrency = at_least(label, own_limit, 1, or_none="to leave it to the scorer")
        self.needed_columns = tuple(getattr(function, "needed_columns", ()))
        inner = getattr(function, "func", function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._loop = BackgroundLoop(f"reward-{name}")  # a function that blocks it blocks no other, and no time limit

    def missing(self, names: Collection[str]) -> list[str]:
        """What the function needs beyond the given names and LightRL's own."""
        return sorted(self.needs - set(names) - {"log_metric", "log_extra"})

    def complaint(self, names: Collection[str], source: str = "the dataset") -> str | None:
        """An error message if the function needs more than a source's names; else None."""
        if not (missing := self.missing(names)):
            return None
        return (
            f"reward function {self.name!r}: takes {', '.join(missing)}, which is neither a column of {source} "
            f"nor offered by LightRL. There are: {', '.join(sorted(names))}."
        )

    async def run(self, rows: Mapping[str, Sequence[Any]], timeout: float | None) -> tuple[list[float], CallLog]:
        """Calls the function for some rows.

        Args:
            rows: Name -> n values: prompts, completions, completion_ids, group_ids, and the dataset's columns.
            timeout: Seconds from the start of the call; None waits forever.

        Returns:
            n floats, NaN for None, and what the function logged.

        Raises:
            CallFailed: It raised or took too long.
            RewardError: It returned something else than n rewards, lacks a column, or raised a RewardError itself.
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
            if not task.done():  # out of time, or the scorer is closing
                task.cancel()
        if not task.done():
            raise CallFailed(f"reward function {self.name!r}: did not finish within timeout={timeout} seconds.")
        if task.cancelled():
            raise CallFailed(f"reward function {self.name!r}: was cancelled.")
        value, error = task.result()
        if isinstance(error, RewardError) and not isinstance(error, CallFailed):
            raise RewardError(f"reward function {self.name!r}: {error}") from error
        if error is not None:
            said = f"reward function {self.name!r} raised {type(error).__name__}: {message_of(error)}"
            lines = "" if isinstance(error, CallFailed) else users_lines(error)  # a function inside another has them
            raise CallFailed(said + lines) from error
        return check_values(self.name, value, num_rows), log

    async def close(self) -> None:
        """Calls the function's own `close`, if it has one, on the event loop of its calls."""
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
        """What it returned or raised. Its arguments are copied in its own thread, since that may take long."""
        if self.is_async:
            return await self._awaited(lambda: self.function(**self._arguments(offered)))
        value, error = await in_thread(lambda: self.function(**self._arguments(offered)), f"reward-{self.name}")
        if error is None and inspect.isawaitable(value):  # a plain function that returns a coroutine
            return await self._awaited(lambda: value)
        return value, error

    async def _awaited(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        return await asyncio.wrap_future(self._loop.submit(outcome_of(call)))


def check_values(name: str, values: Any, num_rows: int) -> list[float]:
    """Checks what a reward function returned: `num_rows` floats, NaN for None.

    Raises:
        RewardError: Wrong length, or a value that is not a finite number or None; names function, index, and value.
    """
    scalar = getattr(values, "shape", None) == ()  # an array or tensor without dimensions calls itself a collection
    if scalar or isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Collection):
        raise RewardError(
            f"reward function {name!r}: returned {_short(values)} of type {type(values).__name__}. "
            f"Return a list of {num_rows} values."
        )
    if len(values) != num_rows:
        raise RewardError(
            f"reward function {name!r}: returned {len(values)} values for {num_rows} completions. "
            "Return one value per completion, None where the function does not apply."
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
            "Return a finite number, or None where the function does not apply (that row is then left out)."
        )
    if abs(result) > MAX_REWARD:
        raise RewardError(
            f"reward function {name!r}: value {index} is {result:g}. Rewards and their squares are summed in float32: "
            f"scale them to at most {MAX_REWARD:g} in size."
        )
    return result


def copied(value: Any) -> Any:
    """A copy of nested lists, tuples, sets, and dictionaries, and a read-only view of an array.

    What a reward function changes in its arguments reaches neither the rollout, the logs, nor other functions. Other
    objects, such as images, are passed unchanged.
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
    """The mean, infinite or NaN if the numbers are: a logged number must not end a run."""
    return sum(number / len(numbers) for number in numbers)


def message_of(error: BaseException) -> str:
    """The message of an error, cut if it is long."""
    text = str(error)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def users_lines(error: BaseException, *own: str) -> str:
    """File, line, and code of each frame of the user's code, the innermost last.

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
        del frames[1 : len(frames) - _SHOWN_FRAMES + 1]  # the user's first frame stays, and the innermost ones
    lines = "".join(traceback.format_list(frames)).rstrip()
    return f"\n{lines}" if lines else ""


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # an integer of thousands of digits, or an object whose repr is broken
        return f"a {type(value).__name__} that cannot be shown ({error})"
    return text if len(text) <= 80 else text[:77] + "..."
