"""The server engine, which samples on separate inference servers, and a distillation teacher on such servers.

`client` sends requests to a server and monitors it, `pool` chooses among several, `protocols` implements each server
kind, `weights` pushes the weights, and `worker` runs inside vLLM servers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.engines.background import all_of
from lightrl.engines.base import TOLERANCE, Engine, EngineDiedError, StaleWeightsError
from lightrl.engines.server.client import Server, ServerLostError
from lightrl.engines.server.pool import ServerPool
from lightrl.engines.server.protocols import PROTOCOLS, TokenScores
from lightrl.engines.server.weights import FolderTransport, TransferTransport, Transport
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

log = logging.getLogger(__name__)


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
        self._pool = ServerPool(
            *("ServerEngine", urls, PROTOCOLS[kind](), model, api_key, timeout, progress_timeout, start_timeout),
            pushes=True,
        )
        self.weights = weights
        self.shared_folder = shared_folder
        self.requested_dtype = dtype
        self.harmless_extra = self._pool.protocol.harmless_extra
        self._transport: Transport | None = None
        self._version = -1  # of the weights that the servers hold
        self._rank = 0
        self._world_size = 1

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        self._pool.open(context.model_path)
        self.dtype = self.requested_dtype or self._pool.servers[0].dtype or context.dtype

    def start(self, context: EngineContext) -> None:
        if self.started:
            return
        self.check(context)
        self._rank, self._world_size = context.rank, context.world_size
        servers, first = self._pool.servers, context.rank % len(self._pool.servers)
        self._pool.servers = servers[first:] + servers[:first]  # ranks start with different servers
        self._transport = self._make_transport(context)
        self.policy_version = -1

    def _make_transport(self, context: EngineContext) -> Transport:
        assert self.dtype is not None
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.weights == "transfer":
            return TransferTransport(self._pool, dtype)
        from transformers import AutoConfig

        assert self.shared_folder is not None
        config = AutoConfig.from_pretrained(context.model_path)
        return FolderTransport(self._pool, dtype, Path(self.shared_folder).absolute(), config)

    @property
    def started(self) -> bool:
        return self._transport is not None

    @property
    def max_model_len(self) -> int:
        lengths = [server.max_model_len for server in self._running().servers]
        return min((length for length in lengths if length), default=1 << 30)

    def close(self) -> None:
        """Disconnects from the servers, which keep running, and deletes the weights in the shared directory."""
        transport, self._transport = self._transport, None
        self.policy_version, self.dtype = -1, None
        if transport is not None:
            transport.close()
        self._pool.close()

    def _running(self) -> ServerPool:
        if self._transport is None:
            raise RuntimeError("ServerEngine is not started. Call start(context) first.")
        return self._pool

    # -- sampling --------------------------------------------------------------------------------------------------

    def check_overlap(self, *, in_flight: bool) -> None:
        if in_flight:
            raise ValueError(
                "engine=ServerEngine: servers can't resume completions after a weight change. Use "
                "VLLMEngine(in_process=False), or schedule=Ahead."
            )

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        pool = self._running()
        self.check_request(request)
        sampled = pool.ask(request.name, lambda server: self._sample(server, request))
        return await asyncio.wrap_future(pool.loop.submit(sampled))

    async def _sample(self, server: Server, request: GenerationRequest) -> CompletionGroup | None:
        """Returns a group, or None if completions were aborted or the server's weights changed."""
        token, version = self._pool.token, self._version
        completions, now = await self._pool.protocol.sample(server, request)
        if now == token:
            whole = len(completions) == request.num_completions
            return CompletionGroup(request, completions, version) if whole else None
        if server.loaded == token:  # we didn't push other weights
            server.loaded = None
            log.warning(
                "%s holds weights %r instead of %r: it was restarted, or another run uses it. Skipping it until the "
                "next push.", server.url, now, token,
            )  # fmt: skip
        return None

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
        """See `Engine.logprobs`. Raises a StaleWeightsError if two servers differ by more than rounding."""
        pool = self._running()

        async def of(server: Server) -> list[list[float]] | None:
            try:
                scores = await all_of(pool.protocol.scores(server, ids, 0) for ids in sequences)
            except ServerLostError:
                return None
            return [each.logprobs for each in scores]

        async def of_all() -> list[tuple[str, list[list[float]]]]:
            ready = pool.ready()
            answers = await all_of(of(server) for server in ready)
            pool.ready()  # raises if all were lost
            return [(s.url, answer) for s, answer in zip(ready, answers, strict=True) if answer is not None]

        (first_url, first), *others = pool.loop.run(of_all())
        tolerance = TOLERANCE.get(str(self.dtype), TOLERANCE["bfloat16"])
        for url, answer in others:
            gaps = [abs(a - b) for one, two in zip(first, answer, strict=True) for a, b in zip(one, two, strict=True)]
            gap = sum(gaps) / max(len(gaps), 1)
            if not gap <= tolerance:
                self.policy_version = -1
                raise StaleWeightsError(
                    f"{first_url} and {url} received the same weights, but their log-probs differ by {gap:.2e} on "
                    f"average (allowed: {tolerance:g}). One of them holds stale or incomplete weights. Restart them "
                    "with the same model and settings."
                )
        return first

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """See `Engine.load_weights`. Includes recovered servers. Raises an EngineDiedError if none loads them."""
        pool, transport = self._running(), self._transport
        assert transport is not None
        self.policy_version = -1
        stream = iter(named_tensors)
        told: list[Any] = [f"{uuid.uuid4().hex[:12]}-{policy_version}", [], None]  # token, URLs, error of rank 0
        failure: Exception | None = None
        pool.loop.run(pool.begin_push())
        try:
            if self._rank == 0:
                try:
                    transport.push(stream, told[0])
                    told[1] = [server.url for server in pool.servers if server.loaded == told[0]]
                except Exception as error:
                    failure, told[2] = error, f"{type(error).__name__}: {error}"
            for _ in stream:  # gathering is collective, so all ranks must finish it
                pass
            if self._world_size > 1:
                torch.distributed.broadcast_object_list(told, src=0)
            if told[2] is not None:
                raise failure or EngineDiedError(f"Rank 0 failed to push the weights. {told[2]}")
        except BaseException:
            pool.loop.run(pool.end_push("", []))
            raise
        self._version = policy_version
        pool.loop.run(pool.end_push(*told[:2]))
        pool.ready()  # raises if no server has loaded the weights
        self.policy_version = policy_version


class ServerTeacher:
    """Scores tokens on vLLM or SGLang servers, as a teacher of `DistillLightningModule`.

    The servers may serve any model with the policy's tokenizer, which is verified for vLLM. They don't need development
    mode, and several runs can share them. Each sequence is sent to the live server with the fewest pending ones. If a
    server dies, its sequences are retried on the others. Log-probs are at temperature 1 over the full vocabulary.

    Args:
        urls: URLs of servers with the same model, such as [http://10.0.0.2:8000].
        kind: "vllm" or "sglang".
        model: Name of the served model. Defaults to the first that the servers report.
        api_key: Bearer token. Defaults to the environment variable LIGHTRL_SERVER_API_KEY, which keeps it out of saved
            configs.
        timeout: Seconds within which a healthy server must answer a health check.
        progress_timeout: Seconds without a response while sequences are pending after which a server counts as lost.
            None waits forever.
        start_timeout: Seconds to wait for servers that are still starting.

    Raises:
        ValueError: If a server is unreachable or has a different tokenizer.

    Source: vLLM's `prompt_logprobs` (limited to 20 tokens by `--max-logprobs`), SGLang's `top_logprobs_num`.
    """

    def __init__(
        self,
        urls: list[str],
        kind: Literal["vllm", "sglang"] = "vllm",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
        progress_timeout: float | None = 1800.0,
        start_timeout: float = 60.0,
    ) -> None:
        self._pool = ServerPool(
            *("ServerTeacher", urls, PROTOCOLS[kind](), model, api_key, timeout, progress_timeout, start_timeout),
            pushes=False,
        )

    def check(self, tokenizer: str) -> None:
        """Waits for the servers and compares their tokenizers with the policy's, a directory or ID, once."""
        self._pool.open(tokenizer)

    def scores(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[TokenScores]:
        """Returns the teacher's log-probs of tokens 1..n-1 of each sequence.

        Args:
            rows: Token IDs.
            top: Number of top-k tokens to return at each position.
        """
        pool = self._pool

        async def score(ids: Sequence[int]) -> TokenScores:
            return await pool.ask(
                f"a sequence of {len(ids)} tokens", lambda server: pool.protocol.scores(server, ids, top)
            )

        return pool.loop.run(all_of(map(score, rows)))

    def close(self) -> None:
        """Disconnects from the servers, which keep running."""
        self._pool.close()
