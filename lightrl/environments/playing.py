"""One attempt at a task in an environment: from the first message to a trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import MAX_REWARD, above, imported, one_of
from lightrl.data.media import MediaError
from lightrl.engines.background import outcome_of
from lightrl.environments import base, calling, tools
from lightrl.environments.base import Environment, Message, Reply, Step
from lightrl.environments.bridges import Bridge, ImageProcessor
from lightrl.environments.calling import UserCode
from lightrl.environments.ledger import Ledger
from lightrl.environments.multi_turn import EXAMPLE_TOOLS, Attempt, MultiTurn
from lightrl.environments.parsing import ReplyParser
from lightrl.records import GenerationRequest, StopReason, Trajectory, TrajectoryRow
from lightrl.rewards.calls import message_of, users_lines


class EnvironmentEpisode(MultiTurn):
    """Plays each attempt in an environment of its own.

    A group's environments are reset with one row, its columns and the column `prompt`, and one seed. Limits end a
    trajectory with their name as its stop reason; it is scored like any other, because the policy caused them. What the
    policy did not cause (an exception in the environment, `Step.failure`, a reset that takes too long) ends it with
    "failure": it is in no loss and no baseline. An error of the engine is raised.

    Args:
        environment: makes one; in YAML a class with its arguments. Called once for each attempt.
        environment_timeout: seconds that making an environment and each of its `reset`, `finish` and `close` may take;
            whatever takes longer, except `close`, is a failure. None waits for ever. `max_seconds` counts from after
            `reset`.
        on_parse_error: what follows a reply with a tool call that cannot be read. "message": the policy is told, in a
            message of `parse_error_message`, and goes on; "end": the trajectory ends; "environment": the environment's
            `step` decides (`Reply.errors`).
        parse_error_message: what the policy reads; `{error}` is filled in.
        parse_error_role: the message's role: "user", or "tool" where the template takes a tool message without a call.
        parse_error_reward: added to the reward of such a turn: a punishment where negative.
        train_parse_errors: False trains on no token of such a turn; it stays context.
        on_truncated: what follows a reply that was cut by `max_tokens_per_turn`. "end": the trajectory ends with stop
            reason "length"; "continue": the environment answers it.
        limits: retries, renderer and parsers too: the arguments of `MultiTurn`.

    Raises:
        ValueError: a value is out of its range; on playing, a template without tool messages, a `reset` that draws
            another task for each attempt, a prompt that does not fit.
    """

    def __init__(
        self,
        environment: Callable[[], Environment],
        *,
        environment_timeout: float | None = 300.0,
        on_parse_error: Literal["message", "end", "environment"] = "message",
        parse_error_message: str = "Error: {error}",
        parse_error_role: Literal["user", "tool"] = "user",
        parse_error_reward: float = 0.0,
        train_parse_errors: bool = True,
        on_truncated: Literal["end", "continue"] = "end",
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        if not callable(environment):
            raise ValueError(
                f"environment={repr(environment)[:60]} ({type(environment).__name__}): give the class, or a function "
                "that makes one, since each attempt has an environment of its own."
            )
        self.environment = environment
        self.environment_timeout = above(
            "environment_timeout", environment_timeout, note=" seconds", or_none="for no limit"
        )
        self.on_parse_error = one_of("on_parse_error", on_parse_error, "message", "end", "environment")
        self.parse_error_message = parse_error_message
        self.parse_error_role = one_of("parse_error_role", parse_error_role, "user", "tool")
        self.parse_error_reward = parse_error_reward
        self.train_parse_errors = train_parse_errors
        self.on_truncated = one_of("on_truncated", on_truncated, "end", "continue")

    def setup(self, tokenizer: Any, processor: ImageProcessor | None = None) -> None:
        super().setup(tokenizer, processor)
        if _has_tools(self.environment):
            self.parser(EXAMPLE_TOOLS)

    @contextlib.asynccontextmanager
    async def player(self) -> AsyncIterator[Callable[[Attempt], Awaitable[Trajectory]]]:
        first: list[list[Message]] = []
        yield lambda attempt: _Played(settings=self, bridge=self.bridge_of(attempt.row), **vars(attempt)).play(first)


def _has_tools(environment: Any) -> bool:
    """Whether a class has tools, as far as it says without an object of it; a partial's class, as YAML makes them."""
    parts = [environment.func, *environment.args] if isinstance(environment, partial) else [environment]
    kinds = [part for part in parts if isinstance(part, type)]
    if not kinds or not issubclass(kinds[0], tools.ToolEnvironment):
        return bool(kinds) and isinstance(declared := getattr(kinds[0], "tools", ()), list | tuple) and bool(declared)
    factory = getattr(environment, "keywords", {}).get("factory", parts[-1])
    factory = imported("factory:", factory) if isinstance(factory, str) else factory
    methods = inspect.getmembers(factory, inspect.isfunction) if isinstance(factory, type) else []
    return any(not name.startswith("_") and name not in tools.NOT_TOOLS for name, _ in methods)


_LATE: Any = object()
"""What stands for the answer of an environment that took too long."""
Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a call returned, or what it raised."""


class _Failed(Exception):
    """Carries the cause of a failure that the policy did not cause, and the lines of the user's code that raised it."""

    def __init__(self, cause: str, raised: BaseException | None = None) -> None:
        super().__init__(cause)
        self.lines = "" if raised is None else users_lines(raised, __file__, calling.__file__, tools.__file__)


@dataclass
class _Played(Attempt):
    """An attempt while it is played."""

    settings: EnvironmentEpisode
    bridge: Bridge
    ledger: Ledger | None = None
    rewards: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    last: Reply = field(default_factory=lambda: Reply(""))
    seconds: float = 0.0
    calls: int = 0
    parse_errors: int = 0
    trusted: bool = False

    def __post_init__(self) -> None:
        self.code = UserCode(self.settings.environment)

    async def play(self, first: list[list[Message]]) -> Trajectory:
        """Plays to the end.

        Args:
            first: the first messages of the group's attempts so far; this one's are added, and must be the same.
        """
        stop: StopReason = "failure"
        failure, raised_at = None, ""
        environment: Environment | None = None
        metrics: dict[str, float] = {}
        try:
            made = await self._of_environment(
                self.code.make(self.settings.environment), self.settings.environment_timeout, late="making it"
            )
            if not isinstance(made, Environment):
                raise ValueError(
                    f"environment={self.settings.environment!r} made {made!r}: it must make a new Environment."
                )
            environment = made
            self.trusted = type(made).__module__.partition(".")[0] == __name__.partition(".")[0]
            stop = await self._turns(environment, first)
            if self.rewards:
                finish, seconds = self._call(environment.finish, stop), self.settings.environment_timeout
                last = await self._of_environment(finish, seconds, late="finish")
                self.rewards[-1] += _reward(environment, "finish", last)
        except _Failed as error:
            stop, failure, raised_at = "failure", str(error), error.lines
        finally:
            try:
                if environment is not None:
                    metrics = await self._closed(environment)
            finally:
                self.code.close()
        rows = self.ledger.rows if self.ledger is not None else [TrajectoryRow([0], [-1], [0.0], [-1])]
        metrics |= {
            "turns": float(len(self.rewards)),
            "tool_calls": float(self.calls),
            "parse_errors": float(self.parse_errors),
            "environment_seconds": self.seconds,
            "forks": float(self.ledger.forks) if self.ledger is not None else 0.0,
        }
        return Trajectory(
            rows=rows,
            completion=self.last.content,
            stop_reason=stop,
            messages=self.ledger.conversation if self.ledger is not None else [],
            turn_rewards=self.rewards,
            states=self.states[: len(self.rewards)],
            failure=failure,
            metrics=metrics,
            raised_at=raised_at,
        )

    async def _closed(self, environment: Environment) -> dict[str, float]:
        """Closes the environment; what it logs."""
        metrics = _numbers(environment)
        try:
            closing = self._call(environment.close)
            await self._of_environment(closing, self.settings.environment_timeout, late="close")
        except _Failed as error:  # what the attempt brought is complete
            metrics["close_errors"] = 1.0
            rank_zero_warn(f"An environment could not be closed: {error}")
        return metrics

    async def _turns(self, environment: Environment, first: list[list[Message]]) -> StopReason:
        """Plays all turns; why they ended."""
        settings = self.settings
        messages = await self._of_environment(
            self._call(environment.reset, self.row, seed=self.seed), settings.environment_timeout, late="reset"
        )
        if not _are_messages(messages) or messages[-1]["role"] == "assistant":
            raise ValueError(
                f"environment {type(environment).__name__}: `reset` must return messages, dictionaries with a role, "
                f"that end before the assistant's first turn, not {repr(messages)[:60]}."
            )
        first.append(messages)
        if messages != first[0]:
            raise ValueError(
                "environment: `reset` gave two attempts of one group different tasks, so that their rewards cannot be "
                "compared. Draw what is random from its argument `seed`."
            )
        self.seconds = 0.0  # counted from here
        parser = settings.parser(environment.tools)
        ledger = Ledger(self.bridge, environment.tools)
        prompt_ids = self._shown(ledger.begin, messages)
        self.ledger = ledger
        self.states.append(self._state(environment, messages))
        if len(prompt_ids) >= self.max_tokens:
            raise ValueError(
                f"environment: the first messages are {len(prompt_ids)} tokens, which leaves none of {self.max_tokens} "
                "(max_tokens, or what the engine holds) for a reply. Raise the limit, or leave such rows out."
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
            self.rewards[-1] += _reward(environment, "step", step.reward)
            if step.done:
                return "stop"
            if len(self.rewards) >= settings.max_turns:
                return "turns"
            if not _are_messages(step.messages) or any(message["role"] == "assistant" for message in step.messages):
                raise ValueError(
                    f"environment {type(environment).__name__}: a `step` that is not done must return messages, "
                    f"dictionaries with a role, and none of them the assistant's, not {repr(step.messages)[:60]}."
                )
            for role in {message["role"] for message in step.messages}:
                if self.bridge.drops(role, environment.tools):
                    raise ValueError(
                        f"environment {type(environment).__name__}: the chat template drops messages of the role "
                        f"{role!r}, so the model never reads them. Use another role (`result_role`, "
                        "`parse_error_role`), or set actor.chat_template to a template that writes them."
                    )
            prompt_ids = self._shown(self.ledger.answer, step.messages)
            self.states.append(self._state(environment, step.messages))

    def _shown(self, record: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message]) -> list[int]:
        try:
            return record(messages)
        except MediaError as error:
            raise _Failed(str(error)) from error
        except (TypeError, UnicodeError) as error:  # as tokenizers refuse what is no text
            if (text := _no_unicode(messages)) is None:
                raise
            raise _Failed(
                f"a message of the environment holds one half of a surrogate pair, which is no text, in {text!a}: as "
                "names of files have them. Write it otherwise, such as with text.encode(errors='replace').decode()."
            ) from error

    def _state(self, environment: Environment, messages: Sequence[Message]) -> str:
        try:
            key = environment.state_key(messages)
        except BaseException as error:  # SystemExit among it
            raise _Failed(f"state_key: {type(error).__name__}: {message_of(error)}", error) from error
        return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    async def _reply(
        self, parser: ReplyParser, prompt_ids: list[int], environment: Environment, max_new_tokens: int
    ) -> Reply:
        """Asks for a turn and records it."""
        assert self.ledger is not None
        turn, sampling = len(self.rewards), self.sampling
        if max_new_tokens != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=max_new_tokens)
        request = GenerationRequest(prompt_ids, sampling, self.turn_seed(turn), name=f"turn {turn} of {self.name}")
        group = await self.ask(self.ledger.shown(request))
        completion = group.completions[0]
        reply = parser.read(prompt_ids, completion, environment.tools, self.bridge)
        self.parse_errors += bool(reply.errors)
        trained = self.settings.train_parse_errors or not reply.errors
        self.ledger.sampled(completion, group.versions(0), reply.message(), trained=trained)
        self.rewards.append(self.settings.parse_error_reward if reply.errors else 0.0)
        self.last = reply
        return reply

    async def _step(self, environment: Environment, reply: Reply) -> Step | None:
        """What follows a reply; None where the environment took too long."""
        settings = self.settings
        if reply.errors and settings.on_parse_error == "end":
            return Step(done=True)
        if reply.errors and settings.on_parse_error == "message":
            said = settings.parse_error_message.format(error=" ".join(reply.errors))
            return Step([{"role": settings.parse_error_role, "content": said}])
        left = None if settings.max_seconds is None else max(settings.max_seconds - self.seconds, 0.0)
        step = await self._of_environment(self._call(environment.step, reply), left)
        if step is _LATE:
            return None
        if not isinstance(step, Step):
            raise ValueError(
                f"environment {type(environment).__name__}: `step` must return a Step, not {repr(step)[:60]}."
            )
        return step

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Awaitable[Outcome]:
        """Outcome of a method of the environment. LightRL's own environments never block the event loop."""
        if self.trusted or function.__module__ == base.__name__:
            return outcome_of(partial(function, *args, **kwargs))
        return self.code.call(function, *args, **kwargs)

    async def _of_environment(self, call: Awaitable[Outcome], seconds: float | None, late: str | None = None) -> Any:
        """Awaits the environment; `_LATE` where `seconds` were not enough, or a failure where `late` names the call."""
        began = time.monotonic()
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
            if not done:
                if late is not None:
                    raise _Failed(f"{late} took longer than environment_timeout, {seconds:g} seconds")
                return _LATE
            value, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
            if isinstance(error, asyncio.CancelledError):
                raise _Failed("the environment was cancelled")
            if error is not None:
                raise _Failed(f"{type(error).__name__}: {message_of(error)}", error) from error
            return value
        finally:
            self.seconds += time.monotonic() - began
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=1.0)  # one that ignores this is left behind


def _no_unicode(value: Any) -> str | None:
    """The first text in messages that cannot be written as UTF-8, cut; None where there is none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[max(error.start - 30, 0) : error.start + 30]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for each in inner if (found := _no_unicode(each)) is not None), None)


def _are_messages(messages: Any) -> bool:
    """Whether that is one message or more."""
    listed = isinstance(messages, Sequence) and len(messages) > 0
    return listed and all(isinstance(message, Mapping) and "role" in message for message in messages)


def _reward(environment: Environment, method: str, value: Any) -> float:
    """A reward as a number. What is none would be taken for an attempt that nothing scored, so it ends the run."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise ValueError(
            f"environment {type(environment).__name__}: `{method}` gave the reward {repr(value)[:60]}: give a number "
            f"of at most {MAX_REWARD:g} in size; for what the policy did not cause Step.failure."
        )
    return number


def _numbers(environment: Environment) -> dict[str, float]:
    """What the environment logs of its trajectory."""
    metrics = environment.metrics
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        name = type(environment).__name__
        raise ValueError(
            f"environment {name}: metrics={repr(metrics)[:80]}: give names and numbers: {error}."
        ) from error
