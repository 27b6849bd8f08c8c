"""Trains agent programs that call the policy through the API of a model server."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import imported, require_packages
from lightrl.engines.background import in_background, in_thread
from lightrl.environments.endpoint.running import ProgramBlockedError, ProgramError, Worker, run_here
from lightrl.environments.endpoint.session import Constrained, Session
from lightrl.environments.episodes import finite_reward
from lightrl.environments.multi_turn import Attempt, MultiTurn
from lightrl.records import Trajectory
from lightrl.rewards.base import users_lines

if TYPE_CHECKING:
    from lightrl.environments.endpoint.server import Endpoint

_STARTING = threading.Lock()  # evaluation may run next to training
_HINT = (
    "Create the client inside the program from its `base_url` and `api_key`. A process-wide client uses the key of the "
    "trajectory that set it last."
)


class AgentProgram(MultiTurn):
    """Runs a program for each trajectory that calls the policy through the API of a model server.

    The program is a function `main(row, base_url, api_key)`, sync (runs in a thread) or async (they share a loop).
    It returns a reward, None to use the reward functions, or `{"reward": ..., "metrics": {...}}` with numbers to log.
    `row` has the dataset's columns and `prompt`. `base_url` serves OpenAI's chat completions and responses APIs and
    Anthropic's messages API, with and without streaming, from the first trajectory until `close`.

    A request that continues a conversation of the trajectory verbatim extends its sequence if this is verified to be
    exact. Any other request starts a new sequence with earlier tokens as context (sub-agents, compaction). The run's
    sampling settings apply: sampling parameters and unknown parameters in requests have no effect, are counted
    (`ignored_parameters`), and are named in a warning. Parameters that change what the model reads in ways that are not
    supported are rejected.

    Each trajectory has its own key until it ends. The run stops with an error if a program uses the key of another
    trajectory, or returns a reward without sending a request. A trajectory that reaches a limit has the limit's name as
    stop reason; its reward is what the program returns, otherwise `limit_reward`. An exception in the program, a dead
    process, an engine failure, and a program without a turn exclude it from losses and baselines ("failure").

    Args:
        run: "file.py:main", "package.module:main", or the function itself.
        process: Whether to run each trajectory in a separate process, which is killed with its children at the end.
            Worker processes import the program once and fork for each trajectory, so trajectories don't share
            variables, environment variables, or the working directory. Clients can also read `OPENAI_BASE_URL`,
            `OPENAI_API_KEY`, and the variables of Anthropic.
        python: Python interpreter of the processes. Defaults to the current one. Requires `process`.
        env: Additional environment variables of the processes. Requires `process`.
        max_turns: Maximum number of turns. Further requests are rejected with status 403.
        max_seconds: Time limit of the program in seconds, excluding generation. None means no limit.
        limit_reward: Reward of a trajectory that reached a limit before the program returned a reward. None uses the
            reward functions.
        constrained: Handling of requests that constrain the reply (a forced tool, `response_format`). "engine" uses the
            engine's structured outputs. Such turns are counted (`constrained_turns`) and excluded from the loss
            (`masked_turns`) unless the engine records the allowed tokens. "free" ignores the constraint and trains the
            turns like all others.
        bind: Address that the server listens on. The default is reachable only from this computer, "0.0.0.0" also from
            containers and other computers. Keys protect the policy, but traffic is not encrypted.
        port: Port of the server. 0 picks a free port.
        url: Base URL of the server for programs, such as "http://host.docker.internal:{port}/v1". `{port}` is replaced
            with the port. Defaults to the address.
        limits: Other arguments of `MultiTurn`. With `process`, `max_environments` is the number of worker processes and
            defaults to 4 per core, at most 64. Conversations longer than `max_tokens` are rejected as exceeding the
            context length; the program can shorten them and continue.

    Raises:
        ValueError: The program can't be loaded, or the server's packages are not installed.
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
        constrained: Constrained = "engine",
        bind: str = "127.0.0.1",
        port: int = 0,
        url: str | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, max_seconds=max_seconds, **limits)
        require_packages("AgentProgram", "agents", "fastapi", "uvicorn")
        self.function: Any = None
        self._make: Callable[[str], Worker] | None = None  # from the endpoint's base URL
        self._idle: list[Worker] = []
        if process:
            if limits.get("max_environments") is None:
                # 64 interpreters that import an SDK take 13 GB, and minutes to start on two cores.
                self.max_environments = min(64, 4 * (os.cpu_count() or 4))
            self._make = partial(Worker, str(run), python, env)
        else:
            self.function = imported("run:", run) if isinstance(run, str) else run
        self.limit_reward = limit_reward
        self.constrained = constrained
        self.address = (bind, port, url)
        self._endpoint: Endpoint | None = None
        self._notified: set[str] = set()

    def _notify(self, message: str) -> None:
        if message not in self._notified:
            self._notified.add(message)
            rank_zero_warn(message)

    async def play(self, attempt: Attempt) -> Trajectory:
        most = attempt.sampling.max_new_tokens
        sampling = replace(attempt.sampling, max_new_tokens=min(most, self.max_tokens_per_turn or most))
        session = Session(
            attempt=replace(attempt, sampling=sampling),
            bridge=self.bridge_of(attempt.row),
            parser=self.parser,
            max_turns=self.max_turns,
            template_kwargs=self.variables(attempt.row),
            notify=self._notify,
            constrained=self.constrained,
        )
        endpoint, in_time = self._served(), True
        worker: Worker | None = None
        program: asyncio.Future[Any] | None = None
        reward: float | None = None
        metrics: dict[str, float] = {}
        keys, began = [endpoint.open(session)], time.monotonic()
        try:
            if self._make is not None:
                worker = await self._worker(self._make, endpoint.base_url)
                keys.append(endpoint.open(session, worker.key))  # of clients created during the import
            began = time.monotonic()
            run = partial(run_here, self.function) if worker is None else worker.run
            program = asyncio.ensure_future(run(attempt.row, endpoint.base_url, keys[0]))
            in_time = await self._ends(program, session)
            if in_time and not session.broken.is_set():
                reward, metrics = _reward(program.result())
        except ProgramError as error:
            if session.limit is None:
                hint = f"\nIt sent no request with its key. {_HINT}" if program and not session.requested else ""
                session.fail(f"the program failed: {error}{hint}", users_lines(error))
        finally:
            session.end()
            for key in keys:
                endpoint.close(key)
            if program is not None:
                program.cancel()
                await asyncio.gather(program, return_exceptions=True)
            if worker is not None and worker.reusable:
                self._idle.append(worker)
        if session.error is not None:
            raise session.error
        if program and not program.cancelled() and isinstance(blocked := program.exception(), ProgramBlockedError):
            session.fail(f"run: {blocked}")
        if not session.turns:
            if reward is not None and session.failure is None and not session.requested:
                raise ValueError(
                    f"run: the program returned a reward but sent no request with its key. {_HINT} Return None for "
                    "examples without a turn."
                )
            refusal = f" Its last request was rejected: {session.refusal}" if session.refusal else ""
            session.fail(f"the program exited without a turn.{refusal}")
        if session.failure is None and reward is None and (session.limit or not in_time):
            reward = self.limit_reward
        stop = session.stop_reason if in_time else "time"
        return Trajectory(
            rows=session.rows,
            completion=session.completion,
            stop_reason=stop if session.failure is None else "failure",
            messages=session.conversation,
            turn_rewards=[] if reward is None else [0.0] * (session.turns - 1) + [reward],
            failure=session.failure,
            metrics={**metrics, **session.metrics(time.monotonic() - began)},
            raised_at=session.raised_at,
        )

    def _served(self) -> Endpoint:
        """The endpoint. Starts it for the first trajectory."""
        with _STARTING:
            if self._endpoint is None:
                from lightrl.environments.endpoint.server import Endpoint

                self._endpoint = Endpoint(*self.address)
            return self._endpoint

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(in_thread(worker.stop, "program's process") for worker in idle))
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await in_thread(endpoint.stop, "endpoint's end")

    async def _worker(self, make: Callable[[str], Worker], base_url: str) -> Worker:
        """A process for one trajectory.

        Raises:
            ProgramError: The program can't be imported.
        """
        while self._idle:
            worker = self._idle.pop()
            if not worker.exited:
                return worker
            in_background(worker.stop, "program's process")
        worker = make(base_url)
        failed: BaseException | None = ProgramError("its import was canceled")
        try:
            _, failed = await asyncio.wait_for(in_thread(worker.start, "program's process"), self.max_seconds)
        except asyncio.TimeoutError:
            failed = ProgramError(f"max_seconds={self.max_seconds:g}: the import took longer. Raise max_seconds.")
        finally:
            if failed is not None:
                in_background(worker.stop, "program's process")
        if failed is not None:
            raise failed
        return worker

    async def _ends(self, program: asyncio.Future[Any], session: Session) -> bool:
        """Waits until the program ends or the trajectory fails. Returns False if that takes longer than its limit."""
        broken, began = asyncio.ensure_future(session.broken.wait()), time.monotonic()
        try:
            while not program.done() and not broken.done():
                left = None
                if self.max_seconds is not None:
                    left = self.max_seconds - (time.monotonic() - began - session.engine_seconds)
                    if left <= 0:
                        return False
                await asyncio.wait({program, broken}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            return True
        finally:
            broken.cancel()


def _reward(returned: Any) -> tuple[float | None, dict[str, float]]:
    """The reward and metrics that a program returned. Raises a ValueError if they are not finite numbers."""
    metrics: Any = {}
    if isinstance(returned, Mapping) and {"reward"} <= set(returned) <= {"reward", "metrics"}:
        returned, metrics = returned["reward"], returned.get("metrics", {})
    try:
        metrics = {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"run: the program returned the metrics {repr(metrics)[:60]}. Return numbers.") from error
    return None if returned is None else finite_reward(returned, "run: the program"), metrics
