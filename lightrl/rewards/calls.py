"""One call of one reward function: its arguments, its thread or task, its time limit, and the check of its values."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias

import numpy as np

from lightrl.background import in_thread, lock_limit
from lightrl.rewards.base import RewardError, RewardFn
from lightrl.rewards.media import MEDIA

__all__ = ["MAX_REWARD", "CallFailed", "CallLog", "RewardFunction", "check_values"]

MAX_REWARD = 1e16
"""Largest size of a reward: the squares of a batch of them, which a standard deviation sums, still fit in float32."""

Outcome: TypeAlias = tuple[Literal["returned", "raised"], Any]
ONLY_BY_NAME = (*MEDIA, "training_progress")
"""Not among what `**columns` takes."""
_SHOWN_FRAMES = 8
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Values of these types need no copy; the lists of token ids are long."""
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
        """Logs one value per row of the call."""
        if len(values) != self.num_rows:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {self.num_rows} completions.")
        self.extra[f"{self.function}/{column}"] = list(values)


class RewardFunction:
    """A reward function with its name and what its signature takes."""

    def __init__(self, name: str, function: RewardFn) -> None:
        self.name = name
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in _NAMED}
        self.needs = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
            raise ValueError(f"reward function {name!r}: takes positional-only arguments; all are passed by keyword.")
        inner = getattr(function, "func", function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    def missing(self, names: Collection[str]) -> list[str]:
        """What the function needs beyond the given names and LightRL's own."""
        return sorted(self.needs - set(names) - {"log_metric", "log_extra"})

    def complaint(self, names: Collection[str]) -> str | None:
        """What to tell the user where something is missing among the given names; None where nothing is."""
        if not (missing := self.missing(names)):
            return None
        return (
            f"reward function {self.name!r}: takes {', '.join(missing)}, which is neither a column of the data set "
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
        arguments = self._arguments({**rows, "log_metric": log.log_metric, "log_extra": log.log_extra})
        call = _settle(self.function(**arguments)) if self.is_async else self._beside(arguments)
        task = asyncio.ensure_future(call)
        try:
            with lock_limit(timeout):
                await asyncio.wait({task}, timeout=timeout)
        finally:
            if not task.done():  # out of time, or the scorer is closing
                task.cancel()
        if not task.done():
            raise CallFailed(f"reward function {self.name!r}: did not finish within timeout={timeout} seconds.")
        if task.cancelled():
            raise CallFailed(f"reward function {self.name!r}: was cancelled.")
        outcome, value = task.result()
        if isinstance(value, RewardError) and not isinstance(value, CallFailed):  # a mistake in the set-up
            raise RewardError(f"reward function {self.name!r}: {value}") from value
        if outcome == "raised":
            try:
                cause = str(value)
            except Exception:  # as broken as its owner
                cause = "(its message cannot be shown)"
            said = f"reward function {self.name!r} raised {type(value).__name__}: {cause}"
            lines = "" if isinstance(value, CallFailed) else users_lines(value)  # a function inside another has them
            raise CallFailed(said + lines) from value
        return check_values(self.name, value, num_rows), log

    async def close(self) -> None:
        """Calls the function's own `close`, where it has one."""
        close = getattr(self.function, "close", None)
        closing = close() if callable(close) else None
        if inspect.isawaitable(closing):
            await closing

    def _arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        if complaint := self.complaint(offered):
            raise RewardError(complaint)
        return {
            name: value if name in MEDIA else copied(value)
            for name, value in offered.items()
            if name in self.takes or (self.takes_all and name not in ONLY_BY_NAME)
        }

    async def _beside(self, arguments: Mapping[str, Any]) -> Outcome:
        value, error = await in_thread(lambda: self.function(**arguments), f"reward-{self.name}")
        if error is not None:
            return "raised", error
        if inspect.isawaitable(value):  # a plain function that hands out a coroutine
            return await _settle(value)
        return "returned", value


async def _settle(call: Any) -> Outcome:
    """Awaits a reward function and keeps what it raises, SystemExit among it, which would end the event loop."""
    try:
        return "returned", await call
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return "raised", error


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
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # a tensor or array without dimensions
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"reward function {name!r}: value {index} is {_short(value)} of type {type(value).__name__}. "
            "Return a number, or None where the function does not apply."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
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


def users_lines(error: BaseException) -> str:
    """Where the user's code raised: file, line and code of each frame below our own, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename in (__file__, in_thread.__code__.co_filename):
        del frames[0]
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
