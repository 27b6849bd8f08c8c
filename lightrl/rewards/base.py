"""What a reward function is, and how a name in YAML becomes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, Union

from lightrl.compat.arguments import imported

RewardValues: TypeAlias = Sequence[float | None]
"""One value per completion: a finite number, or None where the function does not apply."""

RewardFn: TypeAlias = Callable[..., RewardValues | Awaitable[RewardValues]]
"""`(prompts, completions, **columns) -> values`, plain or `async`.

Everything is passed by keyword, and only what the signature takes (`**columns` takes everything):

| name | value for the n rows of the call |
|---|---|
| `prompts` | n strings, after the chat template |
| `completions` | n strings, the sampled text alone |
| `completion_ids` | n lists of sampled token ids |
| `images` | n lists of PIL images, empty for text |
| `videos` | n lists of arrays (frames, height, width, 3) of uint8 |
| `audios` | n lists of mono arrays (samples,) of float32 |
| `group_ids` | n integers, equal for the completions of one prompt; a call always holds whole groups |
| `training_progress` | n times the fraction of the run's rollouts that are done, in [0, 1); 0 outside of training |
| `log_metric(name, value)` | logs a number as `reward/<function>/<name>` (mean over calls) |
| `log_extra(column, values)` | n values shown beside the completions as `<function>/<column>` |
| any other name | the data set's column of that name, n values |

`images`, `videos`, `audios` and `training_progress` reach only functions that name them, not `**columns`. Media are
decoded once and belong to all completions of a prompt, to the engine and to the logs: do not write into them.

Where a data set's column has one of these names, the function gets what this table says.
"""


class RewardError(RuntimeError):
    """A reward function failed, or returned what is not a reward. The message names the function.

    A function raises it itself for a mistake in the set-up, which no `on_reward_error` setting turns into a None.
    """


class Reward(ABC):
    """Base of reward functions with settings, so that YAML can name them by `class_path` and `init_args`.

    A plain function needs no base class: YAML names it by its import path.

    Attributes:
        max_concurrency: most calls of this object that may run at once; None leaves it to the scorer. A class whose
            `__call__` is not `async` is called from several threads: set 1 where that is not safe.
        needed_columns: data-set columns that it reads beyond those in its signature; looked for before training.
    """

    max_concurrency: int | None = None
    needed_columns: Sequence[str] = ()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores n completions; the contract is `RewardFn`. Subclasses name the arguments they want."""

    def extract_answer(self, completion: str) -> str | None:
        """The answer in a completion, for which it votes in `eval/maj@n`. Completions with equal strings agree.

        A plain function may have an attribute of this name. None, the default, finds no answer.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Frees what calls opened (processes, connections). May be `async`, and is called on the scorer's loop."""
        return None


RewardSpec: TypeAlias = Union[Reward, str, RewardFn]  # noqa: UP007 - jsonargparse reads it at run time
"""A reward as constructors take it: a `Reward`, an import path (see `load_reward`), or in Python any function."""


def reward_name(function: RewardFn) -> str:
    """The name a function has in logs: its `__name__`, or the name of its class."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def extracted_answer(function: RewardFn, completion: str) -> str | None:
    """What a function's `extract_answer` finds; None for a function without."""
    find = getattr(function, "extract_answer", None)
    found: str | None = find(completion) if callable(find) else None
    return found


def load_reward(path: RewardSpec) -> RewardFn:
    """Turns an import path into a reward function; anything callable is returned as it is.

    Args:
        path: `package.module:name`, `package.module.name` or `path/to/file.py:name`. A `Reward` class without
            required arguments is instantiated; one with arguments is given by `class_path` and `init_args` instead.

    Raises:
        ValueError: nothing can be imported there, or it is not callable; the message says which part failed.
    """
    if not isinstance(path, str):
        if not callable(path):
            raise ValueError(f"reward function {path!r}: neither callable nor an import path.")
        return path
    return _usable(path, imported("reward function", path, [cls.__name__ for cls in Reward.__subclasses__()]))


def _usable(path: str, found: Any) -> RewardFn:
    if isinstance(found, type) and issubclass(found, Reward):
        try:
            return found()
        except TypeError as error:
            raise ValueError(
                f"reward function {path!r}: the class needs arguments ({error}); "
                f"give it as class_path: {path.replace(':', '.')} with init_args."
            ) from error
    if isinstance(found, type) or not callable(found):
        raise ValueError(
            f"reward function {path!r}: is a {type(found).__name__}, not a function or a subclass of Reward."
        )
    return found  # type: ignore[no-any-return]
