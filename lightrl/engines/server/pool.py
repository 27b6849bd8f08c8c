"""Assigns groups to servers and validates their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lightrl.engines.base import TOLERANCE, EngineDiedError, StaleWeightsError
from lightrl.engines.server.http import Server, ServerError, ServerLostError
from lightrl.engines.server.protocols import ServerProtocol
from lightrl.records import Completion, CompletionGroup, GenerationRequest

log = logging.getLogger(__name__)

MAX_ABORTED = 100
"""Times that a group is asked for again where servers died, were pushed to, or aborted it."""


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
                _check_complete(completions, request, server.url)
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
            return list(await asyncio.gather(*(self.protocol.logprobs(server, ids) for ids in sequences)))

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


def _check_complete(completions: list[Completion], request: GenerationRequest, url: str) -> None:
    limit = request.sampling.max_new_tokens
    for completion in completions:
        tokens = len(completion.token_ids)
        if completion.finish_reason == "length" and tokens < limit:
            raise ValueError(
                f"{url} cut a completion of {request.name} after {tokens} tokens, before max_new_tokens={limit}: start "
                "that server with a larger --max-model-len."
            )


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
