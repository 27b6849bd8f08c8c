"""Text environments with the Gymnasium interface: `reset(seed)` and `step(action)`."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightrl.compat.arguments import imported
from lightrl.environments.base import Environment, Message, Reply, Step
from lightrl.environments.calling import UserCode
from lightrl.environments.tools import first_messages

_DRAWING = ("gem", "textarena")
"""Packages whose environments use the process-wide random generators."""
_GENERATORS = threading.Lock()


class GymnasiumEnvironment(Environment):
    """Runs a text environment with the interface of Gymnasium, GEM, or SkyRL-Gym.

    `reset(seed=..., options=row)` must return an observation, optionally with an info. `step(action)` must return
    Gymnasium's five values or SkyRL-Gym's dictionary. For SkyRL-Gym, `init(prompt)` replaces `reset`.
    Arguments that a method doesn't accept are omitted. A dataset column `seed` takes precedence over the group's seed.
    The first observation is appended to the prompt; later observations are user messages. Observations may be texts or
    lists of messages. The trajectory ends when the environment is terminated or truncated. Override `action` and `text`
    for other spaces.

    Each trajectory has its own environment and thread, so a slow `step` blocks only that trajectory. An exception
    counts as a failure that the policy did not cause. The sampled tokens are trained unchanged, so SkyRL-Gym's
    `postprocessed_action` has no effect.

    Args:
        factory: Function or class that creates an environment, or its import path, such as "gymnasium.make". A
            parameter `row` or `extras` receives the example.
        arguments: Keyword arguments of the factory.
        global_random: Whether the environment uses the process-wide generators of `random` or `numpy.random`. Calls of
            such environments run one at a time, each with its own generator states, for reproducibility. Defaults to
            true for factories of GEM and TextArena and false otherwise.

    Raises:
        ValueError: The factory can't be imported.

    Source: https://gymnasium.farama.org/api/env
    """

    def __init__(
        self,
        factory: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        global_random: bool | None = None,
    ) -> None:
        self.factory = imported("factory:", factory) if isinstance(factory, str) else factory
        self.arguments = dict(arguments or {})
        self._states: Any = None
        package = str(getattr(self.factory, "__module__", "")).partition(".")[0]
        self._isolated = package in _DRAWING if global_random is None else global_random
        self._code = UserCode(getattr(self.factory, "__qualname__", type(self).__name__))
        self._env: Any = None
        self._truncated = False

    def action(self, reply: Reply) -> Any:
        """Converts a reply to an action. Defaults to its text."""
        return reply.content

    def text(self, observation: Any) -> str:
        """Converts an observation to text. Defaults to `str`."""
        return str(observation)

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        given = row.get("seed")
        seed = seed % 2**31 if given is None else int(given)
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        extras = _accepted(self.factory, {"row": dict(row), "extras": dict(row)})
        make, begin = partial(self.factory, **self.arguments, **extras), partial(self._begin, row, seed)
        self._env = await self._code.result(partial(self._with_states, make))
        observed = await self._code.result(partial(self._with_states, begin))
        return list(observed) if _are_messages(observed) else first_messages(row, observed)

    def _begin(self, row: Mapping[str, Any], seed: int) -> Any:
        """The first observation, as text or messages."""
        env = self._env
        if not hasattr(env, "reset") and hasattr(env, "init"):
            return self._shown(env.init(first_messages(row, None)))
        reset = getattr(env, "unwrapped", env).reset  # wrappers may hide its parameters
        more = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(reset).parameters.values())
        given = {"seed": seed, "options": dict(row)}
        return self._shown(env.reset(**(given if more else _accepted(reset, given))))

    def _shown(self, result: Any) -> Any:
        """The observation of `reset` or `init`, with or without an info, as text or messages."""
        _require_sync("reset", result)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result = result[0]
        return result if _are_messages(result) else self.text(result)

    async def step(self, reply: Reply) -> Step:
        observed, reward, done = await self._code.result(partial(self._with_states, partial(self._advance, reply)))
        if done:
            return Step(reward=reward, done=True)
        return Step(observed if _are_messages(observed) else [{"role": "user", "content": observed}], reward)

    def _advance(self, reply: Reply) -> tuple[Any, float, bool]:
        """The next observation as text or messages, the reward, and whether the game is over."""
        _require_sync("step", result := self._env.step(self.action(reply)))
        if isinstance(result, Mapping):
            observation, reward, done = result["observations"], result["reward"], bool(result["done"])
        else:
            observation, reward, terminated, self._truncated, _ = result
            done = bool(terminated or self._truncated)
        return None if done else self._shown(observation), float(reward), done

    def _with_states(self, work: Callable[[], Any]) -> Any:
        """Calls a function with this environment's states of the process-wide generators, if it uses them."""
        if not self._isolated:
            return work()
        with _GENERATORS:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                return work()
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])

    @property
    def metrics(self) -> Mapping[str, float]:
        """Whether the environment truncated the episode."""
        return {"truncated": float(self._truncated)}

    async def close(self) -> None:
        await self._code.end(self._env)


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _are_messages(observation: Any) -> bool:
    listed = isinstance(observation, Sequence) and not isinstance(observation, str)
    return listed and all(isinstance(message, Mapping) and "role" in message for message in observation)


def _require_sync(name: str, result: Any) -> None:
    if inspect.isawaitable(result):
        raise TypeError(f"{name} is async, which Gymnasium's interface is not: derive from Environment instead.")
