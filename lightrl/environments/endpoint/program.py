"""Training of agents that were written against a model server's interface."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import MAX_REWARD, imported, require_packages
from lightrl.engines.background import in_background, in_thread
from lightrl.environments import calling
from lightrl.environments.endpoint import running
from lightrl.environments.endpoint.running import ProgramBlockedError, ProgramError, Worker, Workers, run_here
from lightrl.environments.endpoint.session import Constrained, Session
from lightrl.environments.multi_turn import Attempt, MultiTurn
from lightrl.records import StopReason, Trajectory
from lightrl.rewards.base import users_lines

if TYPE_CHECKING:
    from lightrl.environments.endpoint.server import Endpoint

_STARTING = threading.Lock()  # evaluation may run next to training
_HINT = (
    "Create the client inside the program from its `base_url` and `api_key`: a client of the whole process belongs to "
    "the attempt that set it last."
)


class AgentProgram(MultiTurn):
    """Has each attempt made by a program that uses the policy as a model server.

    The program is a function `main(row, base_url, api_key)`, sync or async, that returns a reward, or None to leave it
    to the reward functions, or `{"reward": ..., "metrics": {...}}` with numbers to log. `row` has the dataset's columns
    and `prompt`. At `base_url` the policy answers OpenAI's chat completions and responses and Anthropic's messages,
    plain or streaming, with any client. Sync programs run in threads, async ones on one event loop, so that one client
    can serve all attempts if each request has its attempt's key.

    A request that continues one of the attempt's conversations word for word extends its row if that is proven to be
    exact. Any other begins a new row, with what was sampled before as context (sub-agents, compactions). The run's
    sampling settings apply: sampling parameters in a request have no effect, are counted (`ignored_parameters`), and
    named once in a warning. Unknown members are rejected as the provider rejects them. A server answers, from the first
    attempt until `close`.

    Each attempt has its own key, which is void after its end. A request with the key of another attempt ends the run,
    and so does a reward from a program that sent no request.

    A limit ends an attempt with its name as stop reason. The attempt is scored, because the policy caused it, with
    what the program returns, else with `limit_reward`. An exception in the program, a process that dies, an engine that
    fails, and a program that never asks for a turn end it with "failure": it is in no loss and no baseline.

    Args:
        run: "file.py:main" or "package.module:main", or the function itself.
        process: Runs each attempt in a separate process, which is killed with its children at the end. Processes that
            have imported the program stay and fork one for each attempt, so that the import happens once, and no
            attempt changes the variables, environment, or working folder of another. The program also finds the
            endpoint in `OPENAI_BASE_URL` and the like.
        python: Interpreter of such processes; None for this one.
        env: Additional environment variables of such processes.
        max_turns: Maximum number of turns. A request beyond is rejected with status 403.
        max_seconds: Seconds that the program may take, without those of the engine; None for no limit.
        limit_reward: Reward of an attempt that a limit ended before the program returned one; None leaves it to the
            reward functions.
        constrained: What becomes of replies that a request constrains (a forced tool, `response_format`). "engine" uses
            the engine's structured outputs. Such turns are counted (`constrained_turns`), and left out of the loss
            (`masked_turns`) unless the engine records which tokens were left. "free" samples and trains them like all
            others, as if the request did not ask. "reject" rejects the request.
        bind: Address that the server listens on. The default is reachable from this machine only; "0.0.0.0" also from
            containers and other machines. Keys protect the policy, but traffic is not encrypted.
        port: Port of the server; 0 for a free one.
        url: Base URL by which programs reach the server, with `{port}` for the port, such as
            "http://host.docker.internal:{port}/v1". Defaults to the address.
        limits: Other arguments of `MultiTurn`. A conversation longer than `max_tokens` is rejected as too long for the
            context; the program may shorten it and continue.

    Raises:
        ValueError: A value is out of its range, the program can't be loaded, or the server's packages are missing.
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
        if limit_reward is not None and not math.isfinite(limit_reward):
            raise ValueError(f"limit_reward={limit_reward}: must be a finite number or None.")
        if constrained not in get_args(Constrained):
            raise ValueError(f"constrained={constrained!r}: unknown. Use one of {', '.join(get_args(Constrained))}.")
        require_packages("AgentProgram", "agents", "fastapi", "uvicorn")
        self.workers: Workers | None = None
        self.function: Callable[..., Any] | None = None
        if process:
            place = run.rpartition(":")[0] if isinstance(run, str) else ""
            if not place or (place.endswith(".py") and not Path(place).exists()):
                raise ValueError(
                    f'run={run!r}: process=True needs an existing program. Pass "file.py:main" or '
                    '"package.module:main".'
                )
            self.workers = Workers(str(run), python, env)
        elif python is not None or env:
            raise ValueError(
                f"python={python!r}, env={env!r}: belong to processes. Set process=True, or leave them out."
            )
        else:
            self.function = _imported(run) if isinstance(run, str) else run
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
            constrained=self.constrained,
        )
        return await self._play(session, self._served(), attempt.row)

    def _served(self) -> Endpoint:
        """The endpoint. The first attempt starts it, and so does one that finds that it has died."""
        with _STARTING:
            if self._endpoint is None or self._endpoint.ended:
                from lightrl.environments.endpoint.server import Endpoint

                if self._endpoint is not None:
                    in_background(self._endpoint.stop, "endpoint's end")
                self._endpoint = Endpoint(*self.address)
            return self._endpoint

    async def close(self) -> None:
        """Ends the endpoint and the processes of programs."""
        if self.workers is not None:
            await in_thread(self.workers.stop, "end of programs")
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await in_thread(endpoint.stop, "endpoint's end")

    async def _play(self, session: Session, endpoint: Endpoint, row: Mapping[str, Any]) -> Trajectory:
        """Runs the program and makes a trajectory of its outcome."""
        stop: StopReason | None = None
        reward: float | None = None
        metrics: dict[str, float] = {}
        worker = await self._worker(endpoint.base_url)
        began = time.monotonic()
        keys = [endpoint.open(session)]
        if isinstance(worker, Worker):  # clients that the import made have its key
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
                    f"run: the program returned a reward but sent no request with its key. {_HINT} Return None if a "
                    "row needs no turn."
                )
            refusal = f" Its last request was rejected: {session.refusal}" if session.refusal else ""
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
            metrics={**metrics, **session.metrics(time.monotonic() - began)},
            raised_at=session.raised_at,
        )

    async def _worker(self, base_url: str) -> Worker | ProgramError | None:
        """A process for an attempt, or why there is none; None for programs of this process."""
        if self.workers is None:
            return None
        try:
            return await asyncio.wait_for(self.workers.take(base_url), self.max_seconds)
        except ProgramError as error:
            return error
        except asyncio.TimeoutError:
            return ProgramError(f"max_seconds={self.max_seconds:g}: importing it took longer. Raise max_seconds.")

    async def _run(self, worker: Worker | ProgramError | None, row: Mapping[str, Any], base_url: str, key: str) -> Any:
        """What the program returns."""
        if isinstance(worker, ProgramError):
            raise worker
        if worker is not None:
            return await worker.run(row, base_url, key)
        assert self.function is not None
        return await run_here(self.function, row, base_url, key)

    def _reward(self, program: asyncio.Future[Any], session: Session) -> tuple[float | None, dict[str, float]]:
        """The reward and metrics that the program returned; without a reward if a limit made it raise.

        Raises:
            ValueError: It is not a reward, or a metric is not a number.
        """
        metrics: Any = {}
        try:
            reward = program.result()
        except ProgramError as error:
            if not session.limited:
                hint = "" if session.requested else f"\nIt sent no request with its key. {_HINT}"
                lines = users_lines(error, __file__, running.__file__, calling.__file__)
                session.fail(f"the program failed: {error}{hint}", lines)
            return None, {}
        if isinstance(reward, Mapping) and set(reward) == {"reward", "metrics"}:
            reward, metrics = reward["reward"], reward["metrics"]
            if not isinstance(metrics, Mapping) or not all(isinstance(one, int | float) for one in metrics.values()):
                raise ValueError(f"run: the program returned metrics={repr(metrics)[:60]}. Return numbers by name.")
        metrics = {str(name): float(value) for name, value in metrics.items()}
        if reward is None:
            return None, metrics
        if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
            raise ValueError(
                f"run: the program returned {repr(reward)[:60]}. Return a finite number of at most {MAX_REWARD:g} in "
                "size, or None."
            )
        return float(reward), metrics


def _imported(run: str) -> Any:
    try:
        return imported("run:", run)
    except ValueError as error:
        if "api_key" not in str(error):
            raise
        raise ValueError(f"{error} {_HINT} Or set process=True, where the import finds a key.") from error
