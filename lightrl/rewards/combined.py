"""One reward out of several, by another rule than the weighted sum."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.rewards.base import Reward, RewardSpec, RewardValues, extracted_answer, load_reward, reward_name
from lightrl.rewards.calls import ONLY_BY_NAME, RewardFunction

RULES: dict[str, Callable[[list[float]], float]] = {"product": math.prod, "min": min, "max": max}


class CombinedReward(Reward):
    """The product, minimum or maximum of several reward functions, or what a function of your own makes of them.

        r = prod_f r_f    (a right answer in the wrong format earns nothing)      min_f r_f      max_f r_f

    over the functions that scored the row; None where none did. They run at the same time. Each one's mean is logged as
    `reward/CombinedReward/<function>`, its values are shown beside the completions.

    Args:
        rewards: at least two reward functions; those that read images, videos, audio or `training_progress` cannot be
            among them.
        by: `product`, `min`, `max`, or a function (in YAML its import path) that is called with a dictionary, name -> n
            values, None where the function said nothing, and returns n values.
        names: one per function; the function's or class's own name where None.

    Raises:
        ValueError: fewer than two functions, equal names, no such rule, or a function that cannot be among them.
    """

    def __init__(
        self,
        rewards: list[RewardSpec],
        by: str | Callable[..., Any] = "product",
        names: list[str] | None = None,
    ) -> None:
        functions = [load_reward(reward) for reward in rewards]
        names = [reward_name(function) for function in functions] if names is None else names
        if len(functions) < 2 or len(set(names)) < len(functions) or len(names) != len(functions):
            raise ValueError(
                f"CombinedReward: {len(functions)} functions called {names}: give at least two, each with a name of "
                "its own (names=[...])."
            )
        self.parts = [RewardFunction(name, function) for name, function in zip(names, functions, strict=True)]
        self.needed_columns = tuple(name for part in self.parts for name in part.needed_columns)
        for part in self.parts:
            if unheard := part.needs.intersection(ONLY_BY_NAME):
                raise ValueError(
                    f"CombinedReward: {part.name!r} takes {', '.join(sorted(unheard))}, which only the run's own "
                    "reward functions get. Give it beside CombinedReward, or combine inside a function of your own."
                )
        if isinstance(by, str) and by not in RULES and "." not in by:
            raise ValueError(f"CombinedReward: by={by!r}: give {', '.join(RULES)}, or the import path of a function.")
        limits = [part.max_concurrency for part in self.parts if part.max_concurrency is not None]
        self.max_concurrency = min(limits, default=None)
        self._by = RULES.get(by) if isinstance(by, str) else None
        self._own = None if self._by is not None else load_reward(by)

    async def __call__(
        self,
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        **rows: Any,
    ) -> RewardValues:
        offered = {**rows, "completions": completions}
        ran = await asyncio.gather(*(part.run(offered, timeout=None) for part in self.parts))
        parts = {
            part.name: [None if math.isnan(value) else value for value in values]
            for part, (values, _) in zip(self.parts, ran, strict=True)
        }
        for name, values in parts.items():
            log_extra(name, values)
            if scored := [value for value in values if value is not None]:
                log_metric(name, math.fsum(scored) / len(scored))
        if self._own is not None:
            made = self._own(parts)
            return await made if inspect.isawaitable(made) else made  # type: ignore[no-any-return]
        return [self._of_row([values[row] for values in parts.values()]) for row in range(len(completions))]

    def extract_answer(self, completion: str) -> str | None:
        found = (extracted_answer(part.function, completion) for part in self.parts)
        return next((answer for answer in found if answer is not None), None)

    def _of_row(self, values: list[float | None]) -> float | None:
        scored = [value for value in values if value is not None]
        return self._by(scored) if self._by is not None and scored else None

    async def close(self) -> None:  # type: ignore[override]
        """Closes the functions."""
        for part in self.parts:
            await part.close()
