"""The server engine, which samples on separate inference servers.

`client` sends requests and monitors the servers, `protocols` implements each server kind, `weights` pushes the weights,
and `worker` runs inside vLLM servers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.engines.background import BackgroundLoop
from lightrl.engines.base import TOLERANCE, Engine, EngineDiedError, StaleWeightsError
from lightrl.engines.server.client import Connection, Server, ServerError, ServerLostError, check_tokenizer
from lightrl.engines.server.protocols import PROTOCOLS, ServerProtocol
from lightrl.engines.server.weights import FolderTransport, TransferTransport, Transport
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

log = logging.getLogger(__name__)

RETRIES = 3
"""Maximum number of times a group is retried after an error from a healthy server."""

MAX_ABORTED = 100
"""Maximum number of times a group is retried because a server died, received new weights, or aborted it."""


class ServerEngine(Engine):
    """Samples on separate vLLM or SGLang inference servers.

    Each group is sent to the server with the fewest pending groups. If a server dies, its groups are retried on the
    other servers. Once it is back online, it is used again after the next weight push. Except for rounding, results
    don't depend on the server.

    Each push assigns a unique weight version, which is checked again after each group. A group is retried if the
    server's weights changed in the meantime. With several ranks, rank 0 pushes the weights, and each rank samples its
    prompts on all servers.

    See docs/generation.md for how to start servers. Use them only in a private network.

    Args:
        urls: Server URLs, such as [http://10.0.0.2:8000].
        kind: "vllm" or "sglang".
        weights: How to push weights. "path" writes files to `shared_folder`. "transfer" uses vLLM's weight transfer
            over NCCL from the trainer's GPU and requires vLLM in the trainer's environment.
        shared_folder: Directory that trainer and servers share under the same path, for `weights: path`.
        model: Name of the served model. Defaults to the first that the servers report.
        dtype: Dtype of the servers' weights: "float32", "bfloat16", or "float16". Defaults to the one that they report
            (SGLang: the trainer's).
        api_key: Bearer token. Defaults to the environment variable LIGHTRL_SERVER_API_KEY, which keeps it out of saved
            configs.
        timeout: Seconds within which a healthy server must answer a health check.
        progress_timeout: Seconds without a response to any of this rank's requests (groups, log-probs, weights) after
            which a server counts as lost. Must exceed the time of the longest group. None waits forever.
        start_timeout: Seconds to wait for servers that are still starting.

    Raises:
        ValueError: If arguments are incompatible, or a server is unreachable, misconfigured, or serves a different
            model.

    Source: https://docs.vllm.ai (0.32), https://docs.sglang.io (0.5).
    """

    pushes = "checkpoint"

    def __init__(
        self,
        urls: list[str],
        kind: Literal["vllm", "sglang"] = "vllm",
        weights: Literal["path", "transfer"] = "path",
        shared_folder: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
        progress_timeout: float | None = 1800.0,
        start_timeout: float = 60.0,
    ) -> None:
        if weights == "path" and shared_folder is None:
            raise ValueError("ServerEngine.shared_folder=None: required for weights: path. Set a shared directory.")
        if weights == "transfer" and kind != "vllm":
            raise ValueError(f"ServerEngine.weights='transfer' with kind={kind!r}: requires vLLM. Use weights: path.")
        self._connection = Connection(
            "ServerEngine", urls, PROTOCOLS[kind](), api_key, timeout, progress_timeout, start_timeout
        )
        self.weights = weights
        self.shared_folder = shared_folder
        self.model = model
        self.requested_dtype = dtype
        self.harmless_extra = self._connection.protocol.harmless_extra
        self._transport: Transport | None = None
        self._rank = 0
        self._world_size = 1

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        connection = self._connection
        if connection.loop is not None:
            return

        async def look_at(server: Server) -> None:
            server.facts = await connection.protocol.facts(server, self.model)
            await check_tokenizer(server, connection.protocol, context.model_path)

        connection.open(look_at)
        self._pool = ServerPool(connection.servers, connection.protocol)
        self.dtype = self.requested_dtype or connection.servers[0].facts.dtype or context.dtype

    def start(self, context: EngineContext) -> None:
        if self.started:
            return
        self.check(context)
        self._rank, self._world_size = context.rank, context.world_size
        self._pool.first = context.rank % len(self._pool.servers)  # ranks start with different servers
        self._transport = self._make_transport(context)
        self.policy_version = -1

    def _make_transport(self, context: EngineContext) -> Transport:
        connection = self._connection
        assert connection.loop is not None and self.dtype is not None
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.weights == "transfer":
            return TransferTransport(connection.loop, connection.protocol, dtype, connection.timeout)
        from transformers import AutoConfig

        assert self.shared_folder is not None
        config = AutoConfig.from_pretrained(context.model_path)
        folder = Path(self.shared_folder).absolute()
        return FolderTransport(connection.loop, connection.protocol, dtype, folder, config)

    @property
    def started(self) -> bool:
        return self._transport is not None

    @property
    def max_model_len(self) -> int:
        self._running()
        lengths = [server.facts.max_model_len for server in self._pool.servers]
        return min((length for length in lengths if length), default=1 << 30)

    def close(self) -> None:
        """Disconnects from the servers, which keep running, and deletes the weights in the shared directory."""
        transport, self._transport = self._transport, None
        self.policy_version, self.dtype = -1, None
        if transport is not None:
            transport.close()
        self._connection.close()

    def _running(self) -> BackgroundLoop:
        loop = self._connection.loop
        if loop is None or self._transport is None:
            raise RuntimeError("ServerEngine is not started. Call start(context) first.")
        return loop

    # -- sampling --------------------------------------------------------------------------------------------------

    def check_overlap(self, *, in_flight: bool) -> None:
        if in_flight:
            raise ValueError(
                "engine=ServerEngine: servers can't resume completions after a weight change. Use "
                "VLLMEngine(in_process=False), or schedule=Ahead."
            )

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        loop = self._running()
        self.check_request(request)
        return await asyncio.wrap_future(loop.submit(self._pool.group(request)))

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        super().check_sampling(sampling, name, trained=trained)
        if sampling.fire_temperature is not None:
            raise ValueError(
                f"{name}.fire_temperature={sampling.fire_temperature}: not supported by servers. Remove it, or use "
                "VLLMEngine."
            )

    def check_request(self, request: GenerationRequest) -> None:
        if request.inputs or request.media:
            raise ValueError("engine=ServerEngine: supports only text. Use VLLMEngine for prompts with media.")
        self.check_sampling(request.sampling, "SamplingParams", trained=False)
        self.check_length(request)

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        """See `Engine.logprobs`. Queries all servers with current weights.

        Raises:
            StaleWeightsError: If two servers differ.
        """
        assert self.dtype is not None
        try:
            return self._running().run(self._pool.logprobs(sequences, self.dtype))
        except StaleWeightsError:
            self.policy_version = -1
            raise

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """See `Engine.load_weights`. Includes recovered servers and skips unresponsive ones.

        Raises:
            ValueError: If the weights don't match a server's model.
            EngineDiedError: If no server loaded the weights.
        """
        loop, self.policy_version = self._running(), -1
        stream = iter(named_tensors)
        failure: Exception | None = None
        news = f"{uuid.uuid4().hex[:12]}-{policy_version}", policy_version, list[str]()
        loop.run(self._pool.begin_push())
        try:
            if self._rank == 0:
                try:
                    news = *news[:2], self._push(stream, news[0])
                except Exception as error:
                    failure = error
            for _ in stream:  # gathering is collective, so all ranks must finish it
                pass
            news = self._agree(news, failure)
        except BaseException:
            loop.run(self._pool.end_push("", -1, []))
            raise
        loop.run(self._pool.end_push(*news))
        self.policy_version = policy_version

    def _push(self, stream: Iterator[tuple[str, Tensor]], token: str) -> list[str]:
        """Pushes to the live servers and returns the URLs of those that loaded the weights."""
        assert self._transport is not None
        self._transport.push([server for server in self._pool.servers if server.lost is None], stream, token)
        loaded = [server.url for server in self._pool.servers if server.loaded == token]
        if not loaded:
            raise self._pool.all_gone()
        return loaded

    def _agree(self, news: tuple[str, int, list[str]], failure: Exception | None) -> tuple[str, int, list[str]]:
        """Broadcasts rank 0's result. Raises its error on all ranks."""
        if self._world_size > 1:
            told: list[Any] = [(news, None if failure is None else f"{type(failure).__name__}: {failure}")]
            torch.distributed.broadcast_object_list(told, src=0)
            if failure is None and told[0][1] is not None:
                raise EngineDiedError(f"Rank 0 failed to push the weights. {told[0][1]}")
            news = told[0][0]
        if failure is not None:
            raise failure
        return news


class ServerPool:
    """Sends each group to the server with the fewest pending groups. Runs in the servers' event loop.

    Args:
        servers: At least one server.
        protocol: Protocol of the servers.

    Attributes:
        token: Name of the current weights; "" before the first push.
        version: Policy version of the current weights.
        first: Index of the server that is preferred among equals.
    """

    def __init__(self, servers: Sequence[Server], protocol: ServerProtocol) -> None:
        self.servers = list(servers)
        self.protocol = protocol
        self.token = ""
        self.version = -1
        self.first = 0
        self._pushed = asyncio.Event()
        self._pushed.set()

    def ready(self) -> list[Server]:
        """Returns the servers that hold the current weights."""
        return [server for server in self.servers if server.lost is None and server.loaded == self.token]

    async def group(self, request: GenerationRequest) -> CompletionGroup:
        """Samples a group with the current weights on any server.

        Raises:
            ValueError: If a server rejects the request.
            EngineDiedError: If all servers died.
            StaleWeightsError: If no live server has the current weights.
        """
        refused: list[Server] = []
        for _ in range(MAX_ABORTED):
            server, token, version = await self._acquire(refused)
            try:
                completions, now = await self.protocol.sample(server, request)
            except ServerLostError:
                continue
            except ServerError as error:
                if error.status < 500:
                    raise ValueError(f"{error}. The server rejects {request.name} or the sampling settings.") from error
                refused.append(server)
                if len(refused) > RETRIES:
                    raise
                log.warning("%s Retrying %s.", error, request.name)
                continue
            finally:
                server.outstanding -= 1
            if now != token:
                self._distrust(server, token, now)
            elif len(completions) == request.num_completions:
                return CompletionGroup(request, completions, version)
        raise ServerError(
            server.url, "", 502, f"{MAX_ABORTED} times fewer completions of {request.name} than requested."
        )

    async def _acquire(self, refused: list[Server]) -> tuple[Server, str, int]:
        """Returns a server, its weight token, and its policy version."""
        await self._pushed.wait()
        turn = self.servers[self.first :] + self.servers[: self.first]
        ready = [server for server in turn if server in self.ready()]
        if not ready:
            raise self.all_gone()
        server = min(ready, key=lambda s: (s in refused, s.outstanding))
        server.outstanding += 1
        return server, self.token, self.version

    def _distrust(self, server: Server, token: str, now: str) -> None:
        """Excludes a server whose weights changed during a group, unless we pushed them."""
        if server.loaded == token:
            server.loaded = None
            log.warning(
                "%s holds weights %r instead of %r: it was restarted, or another run uses it. Skipping it until the "
                "next push.", server.url, now, token,
            )  # fmt: skip

    def all_gone(self) -> RuntimeError:
        """Returns the error for a pool without usable servers."""
        states = "; ".join(f"{s.url}: {s.lost or 'alive, with different weights'}" for s in self.servers)
        if all(server.lost is not None for server in self.servers):
            return EngineDiedError(f"All servers are down. {states}. Restart them and resume the run.")
        return StaleWeightsError(f"No live server has the policy's weights. {states}.")

    async def begin_push(self) -> None:
        """Holds back new groups and checks which servers are healthy."""
        self._pushed.clear()
        await asyncio.gather(*(server.revive() for server in self.servers))

    async def end_push(self, token: str, version: int, urls: Sequence[str]) -> None:
        """Marks the servers at `urls` as loaded with the weights `token` and resumes waiting groups."""
        self.token, self.version = token, version
        for server in self.servers:
            usable = server.url in urls and (server.lost is None or await server.revive())
            server.loaded = token if usable else None
        self._pushed.set()

    async def logprobs(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        """Queries all servers with current weights and returns the first result.

        Raises:
            StaleWeightsError: If two servers differ by more than rounding in `dtype`.
        """

        async def ask(server: Server) -> list[list[float]]:
            scores = await asyncio.gather(*(self.protocol.scores(server, ids, 0) for ids in sequences))
            return [one.logprobs for one in scores]

        ready = self.ready()
        results = await asyncio.gather(*(ask(server) for server in ready), return_exceptions=True)
        answers: list[tuple[str, list[list[float]]]] = []
        for server, result in zip(ready, results, strict=True):
            if not isinstance(result, BaseException):
                answers.append((server.url, result))
            elif not isinstance(result, ServerLostError):
                raise result
        if not answers:
            raise self.all_gone()
        _compare(answers, TOLERANCE.get(dtype, TOLERANCE["bfloat16"]))
        return answers[0][1]


def _compare(answers: list[tuple[str, list[list[float]]]], tolerance: float) -> None:
    first_url, first = answers[0]
    for url, answer in answers[1:]:
        gaps = [abs(a - b) for one, two in zip(first, answer, strict=True) for a, b in zip(one, two, strict=True)]
        gap = sum(gaps) / max(len(gaps), 1)
        if not gap <= tolerance:
            raise StaleWeightsError(
                f"{first_url} and {url} received the same weights, but their log-probs differ by {gap:.2e} on average "
                f"(allowed: {tolerance:g}). One of them holds stale or incomplete weights. Restart them with the same "
                "model and settings."
            )
