"""`ServerEngine`: rollouts from servers on other nodes.

`client` sends requests and keeps the servers, `protocols` knows the routes of each kind, `weights` brings the weights,
and `worker` runs inside vLLM's servers.
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
from lightrl.engines.base import TOLERANCE, Engine, EngineDiedError, StaleWeightsError
from lightrl.engines.server.client import (
    Connection,
    Server,
    ServerError,
    ServerLostError,
    check_length,
    check_tokenizer,
)
from lightrl.engines.server.protocols import PROTOCOLS, ServerProtocol, VLLMProtocol
from lightrl.engines.server.weights import FolderTransport, TransferTransport, Transport
from lightrl.engines.vllm.requests import check_lengths
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

log = logging.getLogger(__name__)

MAX_ABORTED = 100
"""Times that a group is repeated because servers died, were pushed to, or aborted it."""


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
        self._connection = Connection(
            "ServerEngine", urls, PROTOCOLS, kind, api_key, timeout, progress_timeout, start_timeout
        )
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


class ServerPool:
    """Sends each group to the server with the fewest outstanding ones. All of it runs in the servers' loop.

    Args:
        servers: at least one.
        protocol: their kind.
        max_groups: most outstanding groups per server.
        retries: times that a group is sampled again after an error of a living server.

    Attributes:
        token: name of the weights that a server must hold; "" before the first push.
        version: the policy version that goes with it.
        first: number of the server that is asked first among equals.
    """

    def __init__(self, servers: Sequence[Server], protocol: ServerProtocol, max_groups: int, retries: int) -> None:
        self.servers = list(servers)
        self.protocol = protocol
        self.max_groups = max_groups
        self.retries = retries
        self.token = ""
        self.version = -1
        self.first = 0
        self._pushing = False
        self._room = asyncio.Condition()

    def ready(self) -> list[Server]:
        """Servers that hold the current weights."""
        return [server for server in self.servers if server.lost is None and server.loaded == self.token]

    async def group(self, request: GenerationRequest) -> CompletionGroup:
        """One group, from whichever server finishes it with the weights that it was asked for.

        Raises:
            ValueError: a server refuses the request.
            EngineDiedError: no server is left.
            StaleWeightsError: servers are left, but none with the current weights.
        """
        refused: list[Server] = []
        for _ in range(MAX_ABORTED):
            server, token, version = await self._acquire(refused)
            try:
                completions, now = await self.protocol.sample(server, request)
            except ServerLostError:
                continue
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                said = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{server.url} answered what are no completions of {request.name} ({said[:300]}). Is it a server "
                    "of the kind that ServerEngine was told?"
                ) from error
            except ServerError as error:
                if error.status < 500:
                    raise ValueError(f"{error}. The server refuses {request.name} or the sampling settings.") from error
                refused.append(server)
                if len(refused) > self.retries:
                    raise
                log.warning("%s Sampling %s again.", error, request.name)
                continue
            finally:
                await self._release(server)
            if now != token:
                self._distrust(server, token, now)
            elif len(completions) == request.num_completions:
                for tokens in (len(c.token_ids) for c in completions if c.finish_reason == "length"):
                    if tokens < request.sampling.max_new_tokens:
                        raise ValueError(
                            f"{server.url} cut a completion of {request.name} after {tokens} tokens, before "
                            f"max_new_tokens={request.sampling.max_new_tokens}: start it with a larger --max-model-len."
                        )
                return CompletionGroup(request, completions, version)
        raise ServerError(
            server.url, "", 502, f"{MAX_ABORTED} times fewer completions of {request.name} than asked for."
        )

    async def _acquire(self, refused: list[Server]) -> tuple[Server, str, int]:
        """A server, and the weights that it must hold before and after."""
        async with self._room:
            while True:
                if not self._pushing:
                    ready = self.ready()
                    if not ready:
                        raise self.all_gone()
                    turn = self.servers[self.first :] + self.servers[: self.first]
                    free = [s for s in turn if s in ready and s.outstanding < self.max_groups]
                    if free:
                        server = min(free, key=lambda s: (s in refused, s.outstanding))
                        server.outstanding += 1
                        return server, self.token, self.version
                await self._room.wait()

    async def _release(self, server: Server) -> None:
        server.outstanding -= 1
        async with self._room:
            self._room.notify_all()

    def _distrust(self, server: Server, token: str, now: str) -> None:
        """After a group whose weights changed in the meantime, by our own push or by another run."""
        if server.loaded == token:
            server.loaded = None
            log.warning(
                "%s holds weights %r in place of %r: it was restarted, or another run uses it. It is left out "
                "until the next push.", server.url, now, token,
            )  # fmt: skip

    def all_gone(self) -> RuntimeError:
        """The error for a pool without a server to ask."""
        states = "; ".join(f"{s.url}: {s.lost or 'alive, with other weights'}" for s in self.servers)
        if all(server.lost is not None for server in self.servers):
            return EngineDiedError(f"All servers are gone. {states}. Start them again and resume the run.")
        return StaleWeightsError(f"No living server holds the policy's weights. {states}.")

    async def begin_push(self) -> None:
        """Holds new groups back, and checks which servers answer (again)."""
        self._pushing = True
        await asyncio.gather(*(server.revive() for server in self.servers))

    async def end_push(self, token: str, version: int, urls: Sequence[str]) -> None:
        """The servers at `urls` hold the weights `token` of policy `version`; waiting groups go on."""
        self.token, self.version, self._pushing = token, version, False
        for server in self.servers:
            usable = server.url in urls and (server.lost is None or await server.revive())
            server.loaded = token if usable else None
        async with self._room:
            self._room.notify_all()

    async def logprobs(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        """Every server with current weights is asked; the first one's answer.

        Raises:
            StaleWeightsError: two servers differ by more than rounding in `dtype`; it names them.
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
                f"{first_url} and {url} got the same weights, but their log-probs differ by {gap:.2e} on average "
                f"(allowed: {tolerance:g}): one of them holds stale or incomplete weights. Restart them with the same "
                "model and settings."
            )


async def look_at(
    server: Server, protocol: ServerProtocol, context: EngineContext, model: str | None, folder: str | None
) -> None:
    """Fills in a server's `facts`.

    Args:
        server: that is up.
        protocol: its kind.
        context: of the run.
        model: name of the served model; the first where None.
        folder: the shared folder for weights; None where they are transferred.

    Raises:
        ValueError: the server lacks what is needed, or serves another model.
        ServerError: it answers with an error.
    """
    server.facts = await protocol.facts(server, model)
    if folder is None and server.facts.transfer_backend is None:
        raise ValueError(
            f"{server.url} takes no weights by transfer: start it with "
            """--weight-transfer-config '{"backend": "nccl"}', or use weights: path."""
        )
    if folder is not None and isinstance(protocol, VLLMProtocol):
        await _check_worker(server, protocol, folder, context.model_path)
    await check_tokenizer(server, protocol, context.model_path)


async def _check_worker(server: Server, protocol: VLLMProtocol, folder: str, path: str) -> None:
    """Model and shared folder, as the server's workers see them."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path).get_text_config()
    probe = Path(folder).absolute() / f"probe-{uuid.uuid4().hex}"
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.touch()
    try:
        answers = await protocol.rpc(server, "lightrl_facts", str(probe))
    finally:
        probe.unlink()
    for answer in answers:
        if not answer.pop("sees"):
            raise ValueError(
                f"{server.url} does not see ServerEngine.shared_folder={folder}: mount the same folder at the same "
                "path on every machine, or use weights: transfer."
            )
        wrong = {name: (value, getattr(config, name, None)) for name, value in answer.items()}
        wrong = {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}
        if wrong:
            listed = ", ".join(f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in wrong.items())
            raise ValueError(f"{server.url} serves another model: {listed}. Start it with the policy's model.")
