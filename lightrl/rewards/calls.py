"""One call of one reward function: its arguments, its thread or task, its time limit, and the check of its values."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from itertools import islice
from typing import Any

import numpy as np

from lightrl.compat.arguments import MAX_REWARD, at_least
from lightrl.engines.background import BackgroundLoop, in_thread, outcome_of
from lightrl.rewards.base import RewardError, RewardFn
from lightrl.rewards.media import MEDIA

ONLY_BY_NAME = (*MEDIA, "training_progress")
"""Not among what `**columns` takes."""
_SHOWN_FRAMES = 8
_SHOWN_CHARACTERS = 2000
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Values of these types need no copy; the lists of token ids are long."""
_MOST_LOGGED = 1_000_000
"""Characters in one value that is given to `log_extra`, each value inside it counted as ten; what is beyond is cut."""
_DEEPEST_LOGGED = 20
_LONGEST_WHOLE = 1024
"""Bits of a whole number that stays one; Python refuses to write those of thousands of digits."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallFailed(RewardError):
    """The function raised or ran out of time: the failures that `on_reward_error` decides about."""


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
        """Logs one value per row of the call; what JSON cannot hold becomes text, very long ones are cut."""
        if len(values) != self.num_rows:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {self.num_rows} completions.")
        self.extra[f"{self.function}/{_writable(column)}"] = [_writable(value) for value in values]


def _writable(value: Any) -> Any:
    """What files of samples can hold in place of any value: None, booleans, numbers, texts, lists and mappings.

    Text that is no Unicode, such as names of files, is escaped; keys of mappings and all else become text, or the name
    of their type where they have none.
    """
    left = _MOST_LOGGED

    def plain(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 10
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if value.bit_length() <= _LONGEST_WHOLE else f"<a number of {value.bit_length()} bits>"
        if isinstance(value, bytes):
            value = value.decode(errors="surrogateescape")
        if isinstance(value, str):
            kept = value[: max(left, 0)]
            left -= len(kept)
            more = f"... ({len(value)} characters)" if len(kept) < len(value) else ""
            return kept.encode(errors="backslashreplace").decode() + more
        if left <= 0 or depth == _DEEPEST_LOGGED:
            return "..."
        most = left // 10
        if isinstance(value, Mapping):
            entries = [(key if isinstance(key, str) else str(key), x) for key, x in islice(value.items(), most)]
            entries += [("...", "...")] if len(value) > most else []
            return {tried(key, depth): tried(x, depth) for key, x in entries}
        if isinstance(value, list | tuple | Set):
            return [tried(x, depth) for x in islice(value, most)] + (["..."] if len(value) > most else [])
        return tried(value.item() if getattr(value, "shape", None) == () else str(value), depth)

    def tried(value: Any, depth: int) -> Any:
        try:
            return plain(value, depth + 1)
        except Exception:  # its `__str__`, or anything else of it, may be broken
            return f"<{type(value).__name__}>"

    return tried(value, 0)


class RewardFunction:
    """A reward function with its name and what its signature takes.

    Attributes:
        max_concurrency: most calls at once; None leaves it to who calls.

    Raises:
        ValueError: it takes positional-only arguments, or its `max_concurrency` is no number of calls.
    """

    def __init__(self, name: str, function: RewardFn) -> None:
        self.name = name
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in _NAMED}
        self.needs = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
            raise ValueError(f"reward function {name!r}: takes positional-only arguments; all are passed by keyword.")
        own_limit, label = getattr(function, "max_concurrency", None), f"reward function {name!r}: max_concurrency"
        self.max_concurrency = at_least(label, own_limit, 1, or_none="to leave it to the scorer")
        self.needed_columns = tuple(getattr(function, "needed_columns", ()))
        inner = getattr(function, "func", function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._loop = BackgroundLoop(f"reward-{name}")  # its own: one that blocks it blocks no other, and no time limit

    def missing(self, names: Collection[str]) -> list[str]:
        """What the function needs beyond the given names and LightRL's own."""
        return sorted(self.needs - set(names) - {"log_metric", "log_extra"})

    def complaint(self, names: Collection[str], source: str = "the data set") -> str | None:
        """What to tell the user where something is missing among the names that a source has; None where nothing is."""
        if not (missing := self.missing(names)):
            return None
        return (
            f"reward function {self.name!r}: takes {', '.join(missing)}, which is neither a column of {source} "
            f"nor offered by LightRL. There are: {', '.join(sorted(names))}."
        )

    async def run(self, rows: Mapping[str, Sequence[Any]], timeout: float | None) -> tuple[list[float], CallLog]:
        """Calls the function for some rows.

        Args:
            rows: name -> n values: prompts, completions, completion_ids, group_ids and the data set's columns.
            timeout: seconds from the start of the call; None waits for ever.

        Returns:
            n floats, NaN for None, and what the function logged.

        Raises:
            CallFailed: it raised or took too long.
            RewardError: it returned what is not n rewards, needs what is not there, or raised a RewardError itself.
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
        if isinstance(error, RewardError) and not isinstance(error, CallFailed):  # a mistake in the set-up
            raise RewardError(f"reward function {self.name!r}: {error}") from error
        if error is not None:
            said = f"reward function {self.name!r} raised {type(error).__name__}: {message_of(error)}"
            lines = "" if isinstance(error, CallFailed) else users_lines(error)  # a function inside another has them
            raise CallFailed(said + lines) from error
        return check_values(self.name, value, num_rows), log

    async def close(self) -> None:
        """Calls the function's own `close`, where it has one, on the event loop that its calls had."""
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
        """What it returned or raised; called elsewhere, where its arguments are copied too, which may take long."""
        if self.is_async:
            return await self._awaited(lambda: self.function(**self._arguments(offered)))
        value, error = await in_thread(lambda: self.function(**self._arguments(offered)), f"reward-{self.name}")
        if error is None and inspect.isawaitable(value):  # a plain function that hands out a coroutine
            return await self._awaited(lambda: value)
        return value, error

    async def _awaited(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        return await asyncio.wrap_future(self._loop.submit(outcome_of(call)))


def message_of(error: BaseException) -> str:
    """What an error says, cut where it is long."""
    try:
        text = str(error)
    except Exception:  # as broken as its owner
        return "(its message cannot be shown)"
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


def mean(numbers: Sequence[float]) -> float:
    """Their mean, which may be infinite or NaN where they are: what is only logged ends no run."""
    try:
        return math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):  # a sum beyond the range of floats, or inf - inf
        return sum(number / len(numbers) for number in numbers)


def check_values(name: str, values: Any, num_rows: int) -> list[float]:
    """Checks what a reward function returned.

    Returns:
        `num_rows` floats, NaN where the function said None.

    Raises:
        RewardError: wrong length, or a value that is not a finite number or None; names function, index and value.
    """
    scalar = getattr(values, "shape", None) == ()  # an array or tensor without dimensions calls itself a collection
    if scalar or isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Collection):
        raise RewardError(
            f"reward function {name!r}: returned {_short(values)} of type {type(values).__name__}, "
            f"not a list of {num_rows} values."
        )
    try:  # a lazy or closed collection of another library may only fail now
        values = [*values]
    except Exception as error:
        raise RewardError(
            f"reward function {name!r}: returned {_short(values)} of type {type(values).__name__}, which cannot be "
            f"read: {type(error).__name__}: {error}. Return a list of {num_rows} values."
        ) from error
    if len(values) != num_rows:
        raise RewardError(
            f"reward function {name!r}: returned {len(values)} values for {num_rows} completions. "
            "Return one value per completion, None where the function does not apply."
        )
    return [_number(name, index, value) for index, value in enumerate(values)]


def _number(name: str, index: int, value: Any) -> float:
    if value is None or value is np.ma.masked:  # whose `item()` is 0
        return math.nan
    try:
        if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
            value = value.item()  # a tensor or array without dimensions
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    except Exception as error:  # a tensor without data, or a number of somebody's own
        raise RewardError(
            f"reward function {name!r}: value {index} is {_short(value)} of type {type(value).__name__}, which is no "
            f"number: {type(error).__name__}: {message_of(error)}. Return a number, or None where it does not apply."
        ) from error
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"reward function {name!r}: value {index} is {_short(value)} of type {type(value).__name__}. "
            "Return a number, or None where the function does not apply."
        )
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name!r}: value {index} is {_short(value)}. Return a finite number, or None where the "
            "function does not apply (that row is then left out)."
        )
    if abs(number) > MAX_REWARD:
        raise RewardError(
            f"reward function {name!r}: value {index} is {number:g}. Rewards and their squares are summed in float32: "
            f"scale them to at most {MAX_REWARD:g} in size."
        )
    return number


def copied(value: Any) -> Any:
    """A copy of lists, tuples, sets and dictionaries, nested ones too, and a read-only view of an array.

    What a reward function changes in its arguments is then its own: the rollout, the logs and other functions keep
    theirs. Other objects, such as pictures, are handed over as they are.
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


def users_lines(error: BaseException, *own: str) -> str:
    """Where the user's code raised: file, line and code of each frame below our own, the innermost last.

    Args:
        error: that it raised, or that was raised from that (as Python does from a coroutine's StopIteration).
        own: files beside this module's that are between the call and the user's code.
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
