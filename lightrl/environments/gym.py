"""Environments with the interface of Gymnasium: `reset(seed)` and `step(action)` on texts."""

from __future__ import annotations

import inspect
import json
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
"""Packages whose environments draw from the generators of the process."""
_GENERATORS = threading.Lock()


class GymnasiumEnvironment(Environment):
    """Plays a text environment with the interface of Gymnasium, old Gym, GEM, or SkyRL-Gym.

    `reset(seed=..., options=row)` returns an observation, alone or with an info; `step(action)` returns Gymnasium's
    five values, Gym's four, or SkyRL-Gym's dictionary. SkyRL-Gym's `init(prompt)` takes the place of `reset`. An
    argument that the method doesn't have is left out. A column `seed` of the row takes precedence over the group's
    seed. The first observation follows the row's prompt, and later ones are the next user messages. An observation may
    be a text or a list of messages. The trajectory ends when the environment is terminated or truncated.

    Each attempt has a separate environment and thread, so a slow `step` holds up only its own game. An exception is a
    failure that the policy did not cause. Sampled tokens are trained as they are, so SkyRL-Gym's
    `postprocessed_action` has no effect.

    Args:
        factory: Function or class that makes an environment, or its import path, such as "gymnasium.make". A parameter
            `row` or `extras` gets the dataset's row.
        arguments: Keyword arguments of the factory.
        global_random: Whether the environment draws from `random` or `numpy.random` of the process. Calls of such
            environments run one at a time, each with its own generator states, so that seeds reproduce a game. None
            for GEM's and TextArena's, which do.

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
        self._detects = global_random is None
        self._isolated = _is_of(self.factory, *_DRAWING) if global_random is None else global_random
        self._code = UserCode(getattr(self.factory, "__qualname__", type(self).__name__))
        self._env: Any = None
        self._invalid = self._truncated = 0

    def action(self, reply: Reply) -> Any:
        """The action for a reply: its text, or for an action space other than `Text` the JSON value in it.

        Raises:
            ValueError: The reply is not an action. The policy reads the message.
        """
        space = getattr(self._env, "action_space", None)
        if not _is_of(space, "gymnasium", "gym") or type(space).__name__ == "Text":
            return reply.content
        try:
            action = json.loads(reply.content)
            fits = space.contains(action)  # type: ignore[union-attr] # `_is_of` has found a space
        except (ValueError, TypeError):
            fits = False
        if not fits:
            raise ValueError(f"{reply.content[:40]!r} is not an action. Answer with a JSON value of {space}.")
        return action

    def text(self, observation: Any) -> str:
        """Text of an observation: itself, or what an environment with `render_mode="ansi"` renders."""
        if isinstance(observation, str):
            return observation
        if getattr(self._env, "render_mode", None) == "ansi":
            return str(self._env.render())
        raise ValueError(
            f"observation={repr(observation)[:60]}: is not a text. Override `text`, or make the environment with "
            'render_mode="ansi".'
        )

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        given = row.get("seed")
        seed = seed % 2**31 if given is None else int(given)
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        extras = _accepted(self.factory, {"row": dict(row), "extras": dict(row)})
        self._env = await self._call(partial(self.factory, **self.arguments, **extras))
        if self._detects:
            self._isolated = _is_of(self._env, *_DRAWING)
        observed = await self._call(partial(self._begin, row, seed))
        return list(observed) if _are_messages(observed) else first_messages(row, observed)

    def _begin(self, row: Mapping[str, Any], seed: int) -> Any:
        """The first observation, as text or messages."""
        env = self._env
        if not hasattr(env, "reset") and hasattr(env, "init"):
            return self._shown(env.init(first_messages(row, None)))
        reset = getattr(env, "unwrapped", env).reset  # wrappers may hide its parameters
        arguments = _accepted(reset, {"seed": seed, "options": dict(row)})
        if "seed" not in arguments and callable(getattr(env, "seed", None)):
            env.seed(seed)
        return self._shown(env.reset(**arguments))

    def _shown(self, result: Any) -> Any:
        """The observation of `reset` or `init`, which may come with an info, as text or messages."""
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result = result[0]
        return result if _are_messages(result) else self.text(result)

    async def step(self, reply: Reply) -> Step:
        observed, reward, done = await self._call(partial(self._advance, reply))
        if done:
            return Step(reward=reward, done=True)
        return Step(observed if _are_messages(observed) else [{"role": "user", "content": observed}], reward)

    def _advance(self, reply: Reply) -> tuple[Any, float, bool]:
        """The next observation as text or messages, the reward, and whether the game is over."""
        try:
            action = self.action(reply)
        except ValueError as error:
            self._invalid += 1
            return f"Error: {error}", 0.0, False
        result = self._env.step(action)
        if isinstance(result, Mapping):
            observation, reward, done = result["observations"], result["reward"], bool(result["done"])
        elif isinstance(result, tuple) and len(result) in (4, 5):
            observation, reward, *ends, info = result
            done = any(ends)
            self._truncated = bool(ends[1]) if len(ends) == 2 else bool(info.get("TimeLimit.truncated"))
        else:
            raise ValueError(
                f"step={repr(result)[:60]}: must be Gymnasium's (observation, reward, terminated, truncated, info), "
                "Gym's (observation, reward, done, info), or SkyRL-Gym's dictionary."
            )
        return None if done else self._shown(observation), float(reward), done

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Result of a call in this environment's thread."""
        value, error = await self._code.call(partial(self._with_states, work))
        if error is not None:
            raise error
        return value

    def _with_states(self, work: Callable[[], Any]) -> Any:
        """Makes a call with this environment's states of the process's generators, if it draws from them."""
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
        """Number of replies that were not actions, and whether the environment truncated the game."""
        return {"invalid_actions": float(self._invalid), "truncated": float(self._truncated)}

    async def close(self) -> None:
        try:
            if callable(getattr(self._env, "close", None)):
                await self._call(self._env.close)
        finally:
            self._code.close()


def _is_of(value: Any, *packages: str) -> bool:
    """Whether a function, a class, or an object's class comes from one of the packages, or a base of the class."""
    if not (inspect.isroutine(value) or isinstance(value, type)):
        value = type(getattr(value, "unwrapped", value))
    return any(str(each.__module__).partition(".")[0] in packages for each in getattr(value, "__mro__", (value,)))


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _are_messages(observation: Any) -> bool:
    """Whether an observation is a list of messages."""
    listed = isinstance(observation, Sequence) and not isinstance(observation, str)
    return listed and all(isinstance(message, Mapping) and "role" in message for message in observation)
