"""Trains agent programs that call the policy through the API of a model server."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import imported, require_packages
from lightrl.engines.background import in_thread
from lightrl.environments.endpoint.running import ProgramBlockedError, ProgramError, Worker, Workers, run_here
from lightrl.environments.endpoint.session import Constrained, Session
from lightrl.environments.episodes import finite_reward
from lightrl.environments.multi_turn import Attempt, MultiTurn
from lightrl.records import StopReason, Trajectory
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

    The program is a function `main(row, base_url, api_key)`, sync or async. It returns a reward, None to use the reward
    functions, or `{"reward": ..., "metrics": {...}}` with numbers to log. `row` contains the dataset's columns and
    `prompt`. `base_url` serves the policy through OpenAI's chat completions and responses APIs and Anthropic's messages
    API, with and without streaming. Sync programs run in threads and async programs on one event loop. All trajectories
    can share a client if each request uses the key of its trajectory.

    A request that continues a conversation of the trajectory verbatim extends its sequence if this is verified to be
    exact. Any other request starts a new sequence with earlier tokens as context (sub-agents, compaction). The run's
    sampling settings apply. Sampling parameters and unknown parameters in requests are ignored, counted
    (`ignored_parameters`), and reported in a warning once. Parameters that change what the model reads in ways that are
    not supported are rejected. The server runs from the first trajectory until `close`.

    Each trajectory has its own key, which is valid until its end. The run stops with an error if a program uses the key
    of another trajectory, or returns a reward without sending a request.

    A trajectory that reaches a limit ends with the limit's name as stop reason. Its reward is the value that the
    program returns, otherwise `limit_reward`. An exception in the program, a process that dies, an engine failure, and
    a program without a turn end the trajectory with "failure". It is then excluded from losses and baselines.

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
        self.workers: Workers | None = None
        self.function: Callable[..., Any] | None = None
        if process:
            if limits.get("max_environments") is None:
                # 64 interpreters that import an SDK take 13 GB, and minutes to start on two cores.
                self.max_environments = min(64, 4 * (os.cpu_count() or 4))
            self.workers = Workers(str(run), python, env)
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
        return await self._play(session, self._served(), attempt.row)

    def _served(self) -> Endpoint:
        """The endpoint. Starts it for the first trajectory."""
        with _STARTING:
            if self._endpoint is None:
                from lightrl.environments.endpoint.server import Endpoint

                self._endpoint = Endpoint(*self.address)
            return self._endpoint

    async def close(self) -> None:
        """Stops the endpoint and the processes of programs."""
        if self.workers is not None:
            await in_thread(self.workers.stop, "end of programs")
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await in_thread(endpoint.stop, "endpoint's end")

    async def _play(self, session: Session, endpoint: Endpoint, row: Mapping[str, Any]) -> Trajectory:
        """Runs the program and converts the result to a trajectory."""
        stop: StopReason | None = None
        reward: float | None = None
        metrics: dict[str, float] = {}
        worker = await self._worker(endpoint.base_url)
        began = time.monotonic()
        keys = [endpoint.open(session)]
        if isinstance(worker, Worker):  # the key of clients created during the import
            keys.append(endpoint.open(session, worker.key))
        broken = asyncio.ensure_future(session.broken.wait())
        program = asyncio.ensure_future(self._run(worker, row, endpoint.base_url, keys[0]))
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
                reward, metrics = self._reward(program, session)
        finally:
            session.end()
            for key in keys:
                endpoint.close(key)
            broken.cancel()
            program.cancel()
            await asyncio.gather(program, broken, return_exceptions=True)
            if isinstance(worker, Worker) and self.workers is not None:
                self.workers.give(worker)
        if session.error is not None:
            raise session.error
        if not program.cancelled() and isinstance(error := program.exception(), ProgramBlockedError):
            session.fail(f"run: {error}")
        if not session.turns:
            if reward is not None and session.failure is None and not session.requested:
                raise ValueError(
                    f"run: the program returned a reward but sent no request with its key. {_HINT} Return None for "
                    "examples without a turn."
                )
            refusal = f" Its last request was rejected: {session.refusal}" if session.refusal else ""
            session.fail(f"the program exited without a turn.{refusal}")
        if session.failure is None and reward is None and (stop == "time" or session.limited):
            reward = self.limit_reward
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

    async def _worker(self, base_url: str) -> Worker | ProgramError | None:
        """The process for a trajectory, or the error; None for programs in this process."""
        if self.workers is None:
            return None
        try:
            return await asyncio.wait_for(self.workers.take(base_url), self.max_seconds)
        except ProgramError as error:
            return error
        except asyncio.TimeoutError:
            return ProgramError(f"max_seconds={self.max_seconds:g}: the import took longer. Raise max_seconds.")

    async def _run(self, worker: Worker | ProgramError | None, row: Mapping[str, Any], base_url: str, key: str) -> Any:
        """Runs the program and returns its result."""
        if isinstance(worker, ProgramError):
            raise worker
        if worker is not None:
            return await worker.run(row, base_url, key)
        assert self.function is not None
        return await run_here(self.function, row, base_url, key)

    def _reward(self, program: asyncio.Future[Any], session: Session) -> tuple[float | None, dict[str, float]]:
        """The returned reward and metrics. The reward is None if the program raised after a limit was reached.

        Raises:
            ValueError: The reward is not a finite number.
        """
        metrics: Any = {}
        try:
            reward = program.result()
        except ProgramError as error:
            if not session.limited:
                hint = "" if session.requested else f"\nIt sent no request with its key. {_HINT}"
                session.fail(f"the program failed: {error}{hint}", users_lines(error))
            return None, {}
        if isinstance(reward, Mapping) and {"reward"} <= set(reward) <= {"reward", "metrics"}:
            reward, metrics = reward["reward"], reward.get("metrics", {})
        try:
            metrics = {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"run: the program returned the metrics {repr(metrics)[:60]}. Return numbers.") from error
        return None if reward is None else finite_reward(reward, "run: the program"), metrics
