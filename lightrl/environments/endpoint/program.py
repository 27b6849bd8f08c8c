"""Training of agents that were written against a model server's interface."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightrl.environments.bridges import Bridge, RendererBridge, TemplateBridge, make_renderer
from lightrl.environments.endpoint.running import InProcess, InSubprocess, ProgramError, Runner, load
from lightrl.environments.endpoint.session import Session
from lightrl.environments.episode import Ask
from lightrl.environments.parsing import ReplyParser, choose_parser
from lightrl.types import SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from lightrl.environments.endpoint.server import Endpoint

__all__ = ["AgentProgram"]

_STARTING = threading.Lock()  # one endpoint at a time starts or stops


class AgentProgram:
    """Plays attempts of a program that talks to a model server, many at once.

    The program is a function `main(row, base_url, api_key)`, sync or async, that returns a reward or None (the reward
    functions then score the trajectory). It asks `base_url` for replies by OpenAI's chat completions or responses or
    by Anthropic's messages, plain or streaming, with any client. What it gets are turns of the policy.

    Each attempt has a key of its own, void after its end. A request that continues one of the attempt's conversations
    word for word extends its row where that is proven; any other begins a new row, with what was sampled before as
    context (sub-agents, compactions). The run's sampling settings hold: what a program asks about sampling has no
    effect and is counted (`ignored_parameters`), what would change the shape of the answer (several choices, stop
    strings, a forced tool, JSON of a schema) is refused. A server on 127.0.0.1 lives for as long as attempts do.

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
        max_tokens_per_turn: most tokens of a reply; None takes the sampling's `max_new_tokens`.
        max_tokens: most tokens of a row, context included; None leaves only the engine's limit. A longer conversation
            is refused as one that is too long for the model's context; the program may shorten it and go on.
        max_seconds: most seconds that the program may take for an attempt; None is no limit. Waiting for the engine
            does not count.
        limit_reward: reward of an attempt that a limit ended before the program returned one; None leaves it to the
            reward functions.
        max_environments: most attempts at once in this process.
        max_requests: most requests of one attempt in flight; more are refused with status 429.
        max_body_bytes: largest body of a request.
        renderer: as of `Attempts`.
        tool_parser: as of `Attempts`.
        reasoning_parser: as of `Attempts`.
        template_kwargs: as of `Attempts`.

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
        max_tokens_per_turn: int | None = None,
        max_tokens: int | None = None,
        max_seconds: float | None = 600.0,
        limit_reward: float | None = 0.0,
        max_environments: int = 64,
        max_requests: int = 16,
        max_body_bytes: int = 32 * 2**20,
        renderer: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        limits = {
            "max_turns": max_turns,
            "max_tokens_per_turn": max_tokens_per_turn,
            "max_tokens": max_tokens,
            "max_environments": max_environments,
            "max_requests": max_requests,
            "max_body_bytes": max_body_bytes,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if max_seconds is not None and max_seconds <= 0:
            raise ValueError(f"max_seconds must be more than 0 seconds, got {max_seconds}; None is no limit.")
        if limit_reward is not None and not math.isfinite(limit_reward):
            raise ValueError(f"limit_reward must be a finite number or None, got {limit_reward}.")
        missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"AgentProgram needs {' and '.join(missing)}: pip install 'lightrl[agents]'.")
        if process and not isinstance(run, str):
            raise ValueError('process=True needs a program by name, run="file.py:main", not a function.')
        if not process and (python is not None or env):
            raise ValueError("python and env belong to processes: set process=True, or leave them out.")
        if process:
            self.runner: Runner = InSubprocess(str(run), python, env)
        else:
            self.runner = InProcess(load(run) if isinstance(run, str) else run)
        self.max_turns = max_turns
        self.max_tokens_per_turn = max_tokens_per_turn
        self.max_tokens = max_tokens
        self.max_seconds = max_seconds
        self.limit_reward = limit_reward
        self.max_environments = max_environments
        self.max_requests = max_requests
        self.max_body_bytes = max_body_bytes
        self.renderer = renderer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.template_kwargs = dict(template_kwargs or {})
        self.playing = 0
        """Attempts under way."""
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._tokenizer: Any = None
        self._renderer: Any = None
        self._bridge: Bridge | None = None
        self._endpoint: Endpoint | None = None
        self._users = 0

    def setup(self, tokenizer: Any) -> None:
        """Takes the policy's tokenizer. Once, before the first attempt.

        Raises:
            ValueError: it has no chat template, or `renderer` names none.
        """
        self._tokenizer = tokenizer
        self._renderer = make_renderer(tokenizer, self.renderer, self.template_kwargs)
        if self._renderer is not None:
            self._bridge = RendererBridge(self._renderer, tokenizer)
        else:
            self._bridge = TemplateBridge(tokenizer, self.template_kwargs)

    async def group(
        self,
        row: Mapping[str, Any],
        ask: Ask,
        *,
        attempts: Sequence[int],
        seed: int,
        turn_seed: Callable[[int, int], int],
        sampling: SamplingParams,
        max_model_len: int | None = None,
    ) -> list[Trajectory]:
        """Plays attempts of one group at once.

        Args:
            row: a row of the data set, a copy of which the program gets.
            ask: has the engine complete a request.
            attempts: numbers of the attempts within the group.
            seed: of the group; not used: what is random in the task is the program's.
            turn_seed: from the numbers of attempt and turn to the seed of the request.
            sampling: the distribution; its `max_new_tokens` is the most that one turn may bring.
            max_model_len: most tokens that the engine holds.

        Returns:
            a trajectory per attempt, in their order.

        Raises:
            ValueError: the program returns what is no reward.
        """
        assert self._bridge is not None, "setup comes first"
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_environments))
        bridge = self._bridge
        room = [limit for limit in (self.max_tokens, max_model_len) if limit is not None]
        wanted = min(sampling.max_new_tokens, self.max_tokens_per_turn or sampling.max_new_tokens)

        async def one(number: int, endpoint: Endpoint) -> Trajectory:
            async with places:
                session = Session(
                    bridge=bridge,
                    parser=self.parser,
                    ask=ask,
                    turn_seed=lambda turn: turn_seed(number, turn),
                    sampling=replace(sampling, max_new_tokens=wanted),
                    max_turns=self.max_turns,
                    max_tokens=min(room) if room else None,
                    max_requests=self.max_requests,
                    name=f"attempt {number}",
                )
                self.playing += 1
                try:
                    return await self._play(session, endpoint, row)
                finally:
                    self.playing -= 1

        async with self._served() as endpoint:
            tasks = [asyncio.ensure_future(one(number, endpoint)) for number in attempts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # programs have ended before this returns

    def parser(self, tools: Sequence[dict[str, Any]]) -> ReplyParser:
        """The parser of replies to requests with these tools."""
        return choose_parser(
            self._tokenizer,
            renderer=self._renderer,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=bool(tools),
        )

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[Endpoint]:
        """The endpoint, which the first user starts and the last one stops."""
        entering = asyncio.ensure_future(asyncio.to_thread(self._enter))
        try:
            endpoint = await asyncio.shield(entering)
            yield endpoint
        finally:
            await asyncio.wait([entering])
            if entering.exception() is None:
                await asyncio.shield(asyncio.to_thread(self._leave))

    def _enter(self) -> Endpoint:
        with _STARTING:
            if self._endpoint is None:
                from lightrl.environments.endpoint.server import Endpoint

                endpoint = Endpoint(self.max_body_bytes, 4 * self.max_environments * self.max_requests)
                endpoint.start()
                self._endpoint = endpoint
            self._users += 1
            return self._endpoint

    def _leave(self) -> None:
        with _STARTING:
            self._users -= 1
            if self._users == 0 and self._endpoint is not None:
                self._endpoint.stop()
                self._endpoint = None

    async def _play(self, session: Session, endpoint: Endpoint, row: Mapping[str, Any]) -> Trajectory:
        """Runs the program and makes a trajectory of what came of it."""
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
        if not session.turns:
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
                session.fail(f"the program failed: {error}")
            return None
        if reward is None:
            return None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"run: the program must return a finite number or None, not {reward!r}.")
        return float(reward)
