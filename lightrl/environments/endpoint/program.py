"""Training of agents that were written against a model server's interface."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import MAX_REWARD, imported, require_packages
from lightrl.engines.background import in_thread
from lightrl.environments.endpoint import running
from lightrl.environments.endpoint.running import InProcess, InSubprocess, LoopBlockedError, ProgramError, Runner
from lightrl.environments.endpoint.session import Session
from lightrl.environments.multi_turn import Attempt, MultiTurn
from lightrl.records import StopReason, Trajectory
from lightrl.rewards.calls import users_lines

if TYPE_CHECKING:
    from lightrl.environments.endpoint.server import Endpoint

_STARTING = threading.Lock()  # evaluation may run next to training
_HINT = (
    "Create the client inside the program from its `base_url` and `api_key`: a client of the whole process belongs to "
    "the attempt that set it last."
)


class AgentProgram(MultiTurn):
    """Has each attempt made by a program that uses the policy as a model server.

    The program is a function `main(row, base_url, api_key)`, sync or async, that returns a reward or None (the reward
    functions then score the trajectory). `row` has the data set's columns and the column `prompt`. It asks `base_url`
    for replies by OpenAI's chat completions or responses or by Anthropic's messages, plain or streaming, with any
    client. What it gets are turns of the policy. Sync programs run in threads, async ones on one event loop, so that
    one client can serve all attempts if each request has its attempt's key.

    Each attempt has a key of its own, void after its end. A request that continues one of the attempt's conversations
    word for word extends its row where that is proven; any other begins a new row, with what was sampled before as
    context (sub-agents, compactions). The run's sampling settings apply: sampling parameters in a request have no
    effect, are counted (`ignored_parameters`), and named once in a warning. Members that would change the completion
    (several choices, stop strings, a forced tool, JSON of a schema) and unknown ones are rejected as the provider
    rejects them. A server on 127.0.0.1 answers, from the first attempt until `close`.

    A request with the key of another attempt, which a client of the whole process makes, ends the run, and so does a
    reward from a program that sent no request.

    A limit ends an attempt with its name as its stop reason; it is scored, because the policy caused it, with what the
    program returns, or with `limit_reward` where that is nothing. An exception in the program, a process that dies, an
    engine that fails, and a program that never asks for a turn end it with "failure": it is in no loss and no baseline.

    Args:
        run: "file.py:main" or "package.module:main", or the function itself.
        process: runs each attempt in a process of its own, which is killed with its children at the end, instead of in
            a thread of this one. It finds the endpoint in `OPENAI_BASE_URL` and the like, too.
        python: the interpreter of such processes; None takes this one.
        env: environment variables of such processes, beside this one's.
        max_turns: most turns of an attempt; a request beyond is refused with status 403.
        max_seconds: most seconds that the program may take for an attempt; None is no limit. Waiting for the engine
            does not count.
        limit_reward: reward of an attempt that a limit ended before the program returned one; None leaves it to the
            reward functions.
        limits: retries, renderer and parsers too: the other arguments of `MultiTurn`. A conversation longer than
            `max_tokens` is refused as too long for the model's context; the program may shorten it and go on.

    Raises:
        ValueError: a value is out of its range, the program cannot be loaded, or the server's packages are missing.
    """

    def __init__(
        self,
        run: str | Callable[..., Any],
        *,
        process: bool = False,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_turns: int = 32,
        max_seconds: float | None = 600.0,
        limit_reward: float | None = 0.0,
        **limits: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, max_seconds=max_seconds, **limits)
        if limit_reward is not None and not math.isfinite(limit_reward):
            raise ValueError(f"limit_reward must be a finite number or None, got {limit_reward}.")
        require_packages("AgentProgram", "agents", "fastapi", "uvicorn")
        if process and not isinstance(run, str):
            raise ValueError('process=True needs a program by name, run="file.py:main", not a function.')
        if not process and (python is not None or env):
            raise ValueError("python and env belong to processes: set process=True, or leave them out.")
        if process:
            self.runner: Runner = InSubprocess(str(run), python, env)
        else:
            self.runner = InProcess(imported("run:", run) if isinstance(run, str) else run)
        self.limit_reward = limit_reward
        self._endpoint: Endpoint | None = None
        self._notified: set[str] = set()

    def _notify(self, message: str) -> None:
        if message not in self._notified:
            self._notified.add(message)
            rank_zero_warn(message)

    @contextlib.asynccontextmanager
    async def player(self) -> AsyncIterator[Callable[[Attempt], Awaitable[Trajectory]]]:

        async def play(attempt: Attempt) -> Trajectory:
            most = attempt.sampling.max_new_tokens
            session = Session(
                bridge=self.bridge_of(attempt.row),
                parser=self.parser,
                ask=attempt.ask,
                turn_seed=attempt.turn_seed,
                sampling=replace(attempt.sampling, max_new_tokens=min(most, self.max_tokens_per_turn or most)),
                max_turns=self.max_turns,
                max_tokens=attempt.max_tokens,
                name=attempt.name,
                template_kwargs=self.variables(attempt.row),
                notify=self._notify,
            )
            return await self._play(session, self._served(), attempt.row)

        yield play

    def _served(self) -> Endpoint:
        """The endpoint, which the first attempt starts, and one that finds that it has died."""
        with _STARTING:
            if self._endpoint is None or not self._endpoint.answers:
                from lightrl.environments.endpoint.server import Endpoint

                self._endpoint = Endpoint()
                self._endpoint.start()
            return self._endpoint

    async def close(self) -> None:
        """Ends what attempts share: the endpoint and the event loop of async programs."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await in_thread(endpoint.stop, "endpoint's end")
        await self.runner.close()

    async def _play(self, session: Session, endpoint: Endpoint, row: Mapping[str, Any]) -> Trajectory:
        """Runs the program and makes a trajectory of its outcome."""
        began = time.monotonic()
        stop: StopReason | None = None
        reward: float | None = None
        key = endpoint.open(session)
        broken = asyncio.ensure_future(session.broken.wait())
        program = asyncio.ensure_future(self.runner.run(row, endpoint.base_url, key))
        try:
            while not program.done() and not broken.done():
                left = None
                if self.max_seconds is not None:
                    left = self.max_seconds - (time.monotonic() - began - session.engine_seconds)
                    if left <= 0:
                        stop = "time"
                        break
                await asyncio.wait({program, broken}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            stop = stop or session.stop_reason
            if program.done() and not broken.done():
                reward = self._reward(program, session)
        finally:
            session.end()
            endpoint.close(key)
            broken.cancel()
            program.cancel()
            await asyncio.gather(program, broken, return_exceptions=True)
        if session.error is not None:
            raise session.error
        if not program.cancelled() and isinstance(program.exception(), LoopBlockedError):
            session.fail(f"run: {program.exception()}.")
        if not session.turns:
            if reward is not None and session.failure is None and not session.requested:
                raise ValueError(
                    f"run: the program returned a reward but sent no request with its key. {_HINT} Return None if a "
                    "row needs no turn."
                )
            refusal = f" Its last request was refused: {session.refusal}" if session.refusal else ""
            session.fail(f"the program ended without a turn.{refusal}")
        if session.failure is None and reward is None and (stop == "time" or session.limited):
            reward = self.limit_reward
        return Trajectory(
            rows=session.rows,
            completion=session.completion,
            stop_reason=stop if session.failure is None else "failure",
            messages=session.conversation,
            turn_rewards=[] if reward is None else [0.0] * (session.turns - 1) + [reward],
            failure=session.failure,
            metrics=session.metrics(time.monotonic() - began),
            raised_at=session.raised_at,
        )

    def _reward(self, program: asyncio.Future[Any], session: Session) -> float | None:
        """What the program returned; None where a limit made it raise.

        Raises:
            ValueError: it is no reward.
        """
        try:
            reward = program.result()
        except ProgramError as error:
            if not session.limited:
                hint = "" if session.requested else f"\nIt sent no request with its key. {_HINT}"
                session.fail(f"the program failed: {error}{hint}", users_lines(error, __file__, running.__file__))
            return None
        if reward is None:
            return None
        if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
            raise ValueError(
                f"run: the program must return a finite number or None, not {repr(reward)[:60]}; numbers of at most "
                f"{MAX_REWARD:g} in size."
            )
        return float(reward)
