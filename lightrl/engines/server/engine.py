"""`ServerEngine`: rollouts from servers on other machines.

`http` sends requests, `protocols` knows the routes of each kind of server, `connection` keeps the servers, `pool`
assigns groups to them, `weights` brings the weights, `checks` looks at servers beforehand.
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

from lightrl.compat.arguments import at_least
from lightrl.engines.background import BackgroundLoop
from lightrl.engines.base import Engine, EngineDiedError, StaleWeightsError
from lightrl.engines.server.checks import check_length, look_at
from lightrl.engines.server.connection import Connection
from lightrl.engines.server.pool import ServerPool
from lightrl.engines.server.weights import FolderTransport, TransferTransport, Transport
from lightrl.engines.vllm.requests import check_lengths
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

log = logging.getLogger(__name__)


class ServerEngine(Engine):
    """Samples on vLLM or SGLang servers, which may run on other machines and come and go.

    Each group goes to the server with the fewest outstanding ones. A server that dies is left out, its groups are
    sampled again by the others, and it is used again after the first push of weights that finds it back. With the
    same weights a group does not depend on the server that samples it, beyond rounding.

    Every push gives the weights a version of their own on every server, and the version is asked for again after each
    group: a group whose server changed its weights in between is sampled again, never used. With several ranks, rank 0
    pushes, and each rank samples its own prompts on all servers.

    How servers are started, and why only in a private network: docs/scaling.md.

    Args:
        urls: of the servers, e.g. [http://10.0.0.2:8000].
        kind: "vllm" or "sglang".
        weights: how weights are pushed: "path", as files in `shared_folder`; or "transfer", vLLM's weight transfer
            over NCCL from the trainer's GPU, which needs vLLM installed beside the trainer.
        shared_folder: a folder that trainer and servers see under the same path; for `weights: path`.
        transfer_address: address under which the servers reach the trainer, for `weights: transfer`; None takes that
            of the interface through which the trainer reaches them.
        model: name under which the servers serve the model; the first they name where None.
        dtype: "float32", "bfloat16" or "float16" of the servers' weights; None asks them (SGLang: the trainer's).
        api_key: sent as bearer token; the environment variable LIGHTRL_SERVER_API_KEY where None, which keeps it out
            of saved configurations.
        max_groups: most groups that one rank has outstanding at one server; more wait here.
        retries: times a group is sampled again after a server that lives answered with an error.
        timeout: seconds within which a living server answers that it is healthy.
        progress_timeout: seconds for which a server that says it is healthy may answer none of this rank's requests
            (groups, log-probs, weights) while some are outstanding; then it counts as lost. A group is one answer, so
            this must be longer than the longest takes. None waits for ever.
        start_timeout: seconds to wait for servers that are still starting.

    Raises:
        ValueError: arguments that contradict each other, and, before any model is loaded, a server that cannot be
            reached, lacks what is needed, or serves another model.

    Source: https://docs.vllm.ai (0.32), https://docs.sglang.io (0.5).
    """

    pushes = "checkpoint"

    def __init__(
        self,
        urls: list[str],
        kind: Literal["vllm", "sglang"] = "vllm",
        weights: Literal["path", "transfer"] = "path",
        shared_folder: str | None = None,
        transfer_address: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        api_key: str | None = None,
        max_groups: int = 64,
        retries: int = 3,
        timeout: float = 30.0,
        progress_timeout: float | None = 1800.0,
        start_timeout: float = 60.0,
    ) -> None:
        if weights == "path" and shared_folder is None:
            raise ValueError("ServerEngine.shared_folder=None: weights: path needs a folder that all machines share.")
        if weights == "transfer" and kind != "vllm":
            raise ValueError(f"ServerEngine.weights='transfer' with kind={kind!r}: vLLM only; use weights: path.")
        self._connection = Connection("ServerEngine", urls, kind, api_key, timeout, progress_timeout, start_timeout)
        self.weights = weights
        self.shared_folder = shared_folder
        self.transfer_address = transfer_address
        self.model = model
        self.requested_dtype = dtype
        self.max_groups = at_least("ServerEngine.max_groups", max_groups, 1)
        self.retries = at_least("ServerEngine.retries", retries, 0)
        protocol = self._connection.protocol
        self.extra = protocol.extra
        self._transport: Transport | None = None
        self._rank = 0
        self._world_size = 1

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        connection, folder = self._connection, self.shared_folder if self.weights == "path" else None
        if connection.loop is not None:
            return
        connection.open(lambda server: look_at(server, connection.protocol, context, self.model, folder))
        self._pool = ServerPool(connection.servers, connection.protocol, self.max_groups, self.retries)
        try:
            check_length(connection.servers, context)
            self._find_dtype(context)
        except BaseException:
            self.close()
            raise

    def _find_dtype(self, context: EngineContext) -> None:
        dtypes = {server.url: server.facts.dtype for server in self._pool.servers}
        if self.requested_dtype is None and len(set(dtypes.values())) > 1:
            raise ValueError(f"The servers' dtypes differ: {dtypes}. Start all with the same --dtype.")
        self.dtype = self.requested_dtype or next(iter(dtypes.values())) or context.dtype

    def start(self, context: EngineContext) -> None:
        if self.started:
            return
        self.check(context)
        self._rank, self._world_size = context.rank, context.world_size
        self._pool.first = context.rank % len(self._pool.servers)  # ranks do not all begin with the same server
        self._transport = self._make_transport(context)
        self.policy_version = -1

    def _make_transport(self, context: EngineContext) -> Transport:
        connection = self._connection
        assert connection.loop is not None and self.dtype is not None
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.weights == "transfer":
            return TransferTransport(
                connection.loop, connection.protocol, dtype, self.transfer_address, connection.timeout
            )
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
        """Disconnects from the servers, which go on running, and deletes the weights in the shared folder."""
        transport, self._transport = self._transport, None
        self.policy_version, self.dtype = -1, None
        if transport is not None:
            transport.close()
        self._connection.close()

    def _running(self) -> BackgroundLoop:
        loop = self._connection.loop
        if loop is None or self._transport is None:
            raise RuntimeError("ServerEngine is not started: call start(context) first.")
        return loop

    # -- sampling --------------------------------------------------------------------------------------------------

    def check_overlap(self, *, in_flight: bool) -> None:
        if in_flight:
            raise ValueError(
                "engine=ServerEngine: servers cannot continue with what other weights sampled. Use "
                "VLLMEngine(in_process=False), or change weights between rollouts."
            )

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        loop = self._running()
        self.check_request(request)
        return await asyncio.wrap_future(loop.submit(self._pool.group(request)))

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        super().check_sampling(sampling, name, trained=trained)
        if sampling.fire_temperature is not None:
            raise ValueError(
                f"{name}.fire_temperature={sampling.fire_temperature}: servers cannot heat the first token alone. "
                "Leave it out, or use VLLMEngine."
            )

    def check_request(self, request: GenerationRequest) -> None:
        if request.inputs or request.media:
            raise ValueError("ServerEngine serves text only: use VLLMEngine for prompts with images.")
        self.check_sampling(request.sampling, "SamplingParams", trained=False)
        check_lengths(
            request, limit=("servers'", self.max_model_len), way_out="start them with a larger --max-model-len"
        )

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        """See `Engine.logprobs`. Every server with current weights is asked.

        Raises:
            StaleWeightsError: two servers differ; it names them.
        """
        assert self.dtype is not None
        try:
            return self._running().run(self._pool.logprobs(sequences, self.dtype))
        except StaleWeightsError:
            self.policy_version = -1
            raise

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """See `Engine.load_weights`. Servers that came back get the weights too; those that do not answer are left out.

        Raises:
            ValueError: the weights do not fit a server's model, or `partial`: servers take all of them.
            EngineDiedError: no server took them.
        """
        if partial:
            raise ValueError("partial=True: ServerEngine takes all weights (takes_parts is False).")
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
            for _ in stream:  # gathering is collective: all ranks go through to the end, whatever became of the push
                pass
            news = self._agree(news, failure)
        except BaseException:
            loop.run(self._pool.end_push("", -1, []))
            raise
        loop.run(self._pool.end_push(*news))
        self.policy_version = policy_version

    def _push(self, stream: Iterator[tuple[str, Tensor]], token: str) -> list[str]:
        """Pushes to the servers that live; addresses of those that took the weights."""
        assert self._transport is not None
        self._transport.push([server for server in self._pool.servers if server.lost is None], stream, token)
        loaded = [server.url for server in self._pool.servers if server.loaded == token]
        if not loaded:
            raise self._pool.all_gone()
        return loaded

    def _agree(self, news: tuple[str, int, list[str]], failure: Exception | None) -> tuple[str, int, list[str]]:
        """What rank 0 pushed, on every rank; raises everywhere where it failed."""
        if self._world_size > 1:
            told: list[Any] = [(news, None if failure is None else f"{type(failure).__name__}: {failure}")]
            torch.distributed.broadcast_object_list(told, src=0)
            if failure is None and told[0][1] is not None:
                raise EngineDiedError(f"Rank 0 could not push the weights. {told[0][1]}")
            news = told[0][0]
        if failure is not None:
            raise failure
        return news
