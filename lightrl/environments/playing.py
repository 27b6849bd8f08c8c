"""Runs trajectories in environments."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import imported
from lightrl.data.rows import MediaError
from lightrl.environments import base, tools
from lightrl.environments.base import Environment, Message, Reply, Step
from lightrl.environments.bridges import Bridge
from lightrl.environments.calling import LateError, UserCode
from lightrl.environments.episodes import finite_reward
from lightrl.environments.gym import GymnasiumEnvironment
from lightrl.environments.ledger import Ledger
from lightrl.environments.multi_turn import EXAMPLE_TOOLS, Attempt, MultiTurn
from lightrl.environments.parsing import ReplyParser
from lightrl.records import StopReason, Trajectory, TrajectoryRow
from lightrl.rewards.base import message_of, users_lines

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor


class EnvironmentEpisode(MultiTurn):
    """Runs each trajectory in a separate environment.

    All environments of a group are reset with the same example (columns and `prompt`) and seed. A trajectory that
    reaches a limit ends with the limit's name as stop reason and is scored. A failure that the policy did not cause (an
    exception in the environment, `Step.failure`, or a timeout of `reset`) ends the trajectory with "failure" and
    excludes it from losses and baselines. Errors of the engine are raised.

    Args:
        environment: Environment class, or function that creates an environment for each trajectory.
        environment_timeout: Time limit for creating an environment and for each `reset`, `finish`, and `close`, in
            seconds. Exceeding it fails the trajectory, except for `close`. None means no limit. `max_seconds` starts
            after `reset`.
        on_parse_error: Response to an invalid tool call. "message" shows the error to the policy as a user message.
            "end" ends the trajectory.
        parse_error_reward: Reward added to turns with invalid tool calls.
        on_truncated: Response to a reply truncated by `max_tokens_per_turn`. "end" ends the trajectory with stop reason
            "length". "continue" passes it to the environment.
        limits: Arguments of `MultiTurn`: limits, retries, renderer, and parsers.

    Raises:
        ValueError: While playing: the chat template drops messages, `reset` returns different tasks within a group, or
            a prompt is too long.
    """

    def __init__(
        self,
        environment: Callable[[], Environment],
        *,
        environment_timeout: float | None = 300.0,
        on_parse_error: Literal["message", "end"] = "message",
        parse_error_reward: float = 0.0,
        on_truncated: Literal["end", "continue"] = "end",
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        self.environment = environment
        self.environment_timeout = environment_timeout
        self.on_parse_error = on_parse_error
        self.parse_error_reward = parse_error_reward
        self.on_truncated = on_truncated

    def setup(self, tokenizer: Any, processor: MediaProcessor | None = None) -> None:
        super().setup(tokenizer, processor)
        if _has_tools(self.environment):
            self.parser(EXAMPLE_TOOLS)  # rejects templates whose calls no parser reads before a model is loaded

    async def play(self, attempt: Attempt) -> Trajectory:
        return await _Played(settings=self, bridge=self.bridge_of(attempt.row), **vars(attempt)).play()


def _has_tools(environment: Any) -> bool:
    """Whether an environment class, or a partial of it from YAML, has tools, if known without an instance."""
    parts = [environment.func, *environment.args] if isinstance(environment, partial) else [environment]
    kind = next((part for part in parts if isinstance(part, type)), object)
    factory = getattr(environment, "keywords", {}).get("factory", parts[-1])
    if isinstance(factory, str) and issubclass(kind, (tools.ToolEnvironment, GymnasiumEnvironment)):
        factory = imported("factory:", factory)  # a mistake is found before a model is loaded
    if not issubclass(kind, tools.ToolEnvironment):
        return isinstance(declared := getattr(kind, "tools", ()), list | tuple) and bool(declared)
    return isinstance(factory, type) and bool(tools.tool_names(factory))


class _Failed(Exception):
    """A failure that the policy did not cause, with the frames of the user's code that raised."""

    def __init__(self, cause: str, raised: BaseException | None = None) -> None:
        super().__init__(cause)
        self.lines = "" if raised is None else users_lines(raised)


@dataclass
class _Played(Attempt):
    """A trajectory in progress."""

    settings: EnvironmentEpisode
    bridge: Bridge
    ledger: Ledger | None = None
    rewards: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    last: Reply = field(default_factory=lambda: Reply(""))
    seconds: float = 0.0
    calls: int = 0
    parse_errors: int = 0

    def __post_init__(self) -> None:
        self.code = UserCode(getattr(self.settings.environment, "__qualname__", "environment"))

    async def play(self) -> Trajectory:
        stop: StopReason = "failure"
        failure, raised_at, scored = None, "", False
        environment: Environment | None = None
        metrics: dict[str, float] = {}
        try:
            environment = await self._call(partial(self.settings.environment), "making it")
            self.code.name = type(environment).__qualname__
            stop = await self._turns(environment)
            if self.rewards:
                last = await self._call(partial(environment.finish, stop), "finish")
                if last is not None:
                    self.rewards[-1] += finite_reward(last, f"environment {self.code.name}: `finish`")
                scored = last is not None or any(self.rewards)
        except _Failed as error:
            stop, failure, raised_at = "failure", str(error), error.lines
        finally:
            try:
                if environment is not None:
                    metrics = await self._closed(environment)
            finally:
                self.code.close()
        ledger = self.ledger
        metrics |= {
            "turns": float(len(self.rewards)),
            "tool_calls": float(self.calls),
            "parse_errors": float(self.parse_errors),
            "environment_seconds": self.seconds,
            "forks": float(ledger.forks) if ledger is not None else 0.0,
        }
        return Trajectory(
            rows=ledger.rows if ledger is not None else [TrajectoryRow([0], [-1], [0.0], [-1])],
            completion=self.last.content,
            stop_reason=stop,
            messages=ledger.conversation if ledger is not None else [],
            turn_rewards=self.rewards if scored else [],
            states=self.states[: len(self.rewards)],
            failure=failure,
            metrics=metrics,
            raised_at=raised_at,
        )

    async def _closed(self, environment: Environment) -> dict[str, float]:
        """Closes the environment and returns its metrics."""
        metrics = {name: float(value) for name, value in environment.metrics.items()}
        closing = asyncio.ensure_future(self._call(partial(environment.close), "close"))
        await asyncio.wait([closing])  # closing continues if the trajectory is canceled
        try:
            closing.result()
        except _Failed as error:  # the trajectory itself is complete
            metrics["close_errors"] = 1.0
            rank_zero_warn(f"Failed to close an environment: {error}")
        return metrics

    async def _turns(self, environment: Environment) -> StopReason:
        """Runs all turns. Returns the stop reason."""
        settings, name = self.settings, type(environment).__name__
        messages = await self._call(partial(environment.reset, self.row, seed=self.seed), "reset")
        self.first.append(self._state(partial(Environment.state_key, environment), messages))
        if self.first[-1] != self.first[0]:
            raise ValueError(
                f"environment {name}: `reset` returned different messages for two trajectories of a group, so their "
                "rewards are not comparable. Use its argument `seed` for all randomness."
            )
        self.seconds = 0.0  # `max_seconds` starts here
        parser = settings.parser(environment.tools)
        ledger = Ledger(self.bridge, environment.tools)
        prompt_ids = self._shown(ledger.begin, messages)
        self.ledger = ledger
        self.states.append(self._state(environment.state_key, messages))
        if len(prompt_ids) >= self.max_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens}: leaves no tokens for a reply after the {len(prompt_ids)} tokens of the "
                "environment's first messages. Raise it or the engine's limit, or drop long examples."
            )
        while True:
            wanted = min(self.sampling.max_new_tokens, settings.max_tokens_per_turn or self.sampling.max_new_tokens)
            left = self.max_tokens - len(prompt_ids)
            if left < max(1, self.sampling.min_new_tokens):
                return "tokens"
            reply = await self._reply(parser, prompt_ids, environment, min(wanted, left))
            if reply.truncated and left < wanted:
                return "tokens"
            if reply.truncated and settings.on_truncated == "end":
                return "length"
            self.calls += len(reply.tool_calls)
            step = await self._step(environment, reply)
            if step is None:
                return "time"
            if step.failure is not None:
                raise _Failed(step.failure)
            self.rewards[-1] += finite_reward(step.reward, f"environment {name}: `step`")
            if step.done:
                return "stop"
            if len(self.rewards) >= settings.max_turns:
                return "turns"
            if not step.messages or any(message["role"] == "assistant" for message in step.messages):
                raise ValueError(
                    f"environment {name}: `step` returned {repr(step.messages)[:60]} without done=True. Return "
                    "messages without assistant messages."
                )
            self.bridge.check_roles(step.messages, environment.tools)
            prompt_ids = self._shown(self.ledger.answer, step.messages)
            self.states.append(self._state(environment.state_key, step.messages))

    def _shown(self, record: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message]) -> list[int]:
        try:
            return record(messages)
        except MediaError as error:
            raise _Failed(str(error)) from error
        except (TypeError, UnicodeError) as error:  # an unpaired surrogate, common in file names
            raise _Failed(f"a message from the environment can't be tokenized: {error}") from error

    def _state(self, state_key: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
        try:
            key = state_key(messages)
        except BaseException as error:  # including SystemExit
            raise _Failed(f"state_key: {type(error).__name__}: {message_of(error)}", error) from error
        return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    async def _reply(
        self, parser: ReplyParser, prompt_ids: list[int], environment: Environment, max_new_tokens: int
    ) -> Reply:
        assert self.ledger is not None
        sampling = replace(self.sampling, max_new_tokens=max_new_tokens)
        group = await self.sample(self.ledger, len(self.rewards), sampling)
        completion = group.completions[0]
        reply = parser.read(prompt_ids, completion, environment.tools, self.bridge)
        self.parse_errors += bool(reply.errors)
        self.ledger.sampled(completion, group.versions(0), reply.message())
        self.rewards.append(self.settings.parse_error_reward if reply.errors else 0.0)
        self.last = reply
        return reply

    async def _step(self, environment: Environment, reply: Reply) -> Step | None:
        """The environment's response to a reply; None after a timeout."""
        settings = self.settings
        if reply.errors and settings.on_parse_error == "end":
            return Step(done=True)
        if reply.errors:
            return Step([{"role": "user", "content": f"Error: {' '.join(reply.errors)}"}])
        left = None if settings.max_seconds is None else max(settings.max_seconds - self.seconds, 0.0)
        try:
            step = await self._call(partial(environment.step, reply), limit=left)
        except LateError:
            return None
        if not isinstance(step, Step):  # None would count as a timeout
            raise ValueError(
                f"environment {type(environment).__name__}: `step` returned {repr(step)[:60]}. Return a Step."
            )
        return step

    async def _call(self, work: partial[Any], name: str = "", limit: float | None = None) -> Any:
        """Calls the environment's code.

        With a `name` for error messages, `environment_timeout` applies, and a timeout is a failure. Otherwise, a call
        that takes longer than `limit` seconds raises a LateError. Raises `_Failed` if the call raises.
        """
        limit = self.settings.environment_timeout if name else limit
        owner = getattr(work.func, "__self__", None)
        ours = isinstance(owner, Environment) and type(owner).__module__.startswith(__package__ + ".")
        began = monotonic()
        try:
            value, error = await self.code.call(
                work, limit, here=ours or getattr(work.func, "__module__", None) == base.__name__
            )
        finally:
            self.seconds += monotonic() - began
        if isinstance(error, LateError):
            if name:
                raise _Failed(f"{name} took longer than environment_timeout, {limit:g} seconds")
            raise error
        if error is not None:
            raise _Failed(f"{type(error).__name__}: {message_of(error)}", error) from error
        return value
