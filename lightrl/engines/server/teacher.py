"""`ServerTeacher`: a teacher on servers whose weights never change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from lightrl.compat.arguments import at_least
from lightrl.engines.base import EngineDiedError
from lightrl.engines.server.client import Connection, Server, ServerError, ServerLostError, check_tokenizer
from lightrl.engines.server.protocols import PROTOCOLS, TokenScores

log = logging.getLogger(__name__)

_RETRIES = 3  # times that a row is asked again after an error of a living server


class ServerTeacher:
    """Scores given tokens on vLLM or SGLang servers, as a teacher of `DistillLightningModule`.

    The servers are ordinary ones, of any model with the policy's tokenizer (vLLM's are asked); they need no development
    mode, and several runs may share them. Rows go to the living server with the fewest outstanding ones; those of a
    server that dies are repeated on the others. Log-probs are at temperature 1 over the whole vocabulary.

    Args:
        urls: of the servers, e.g. [http://10.0.0.2:8000]; all with the same model.
        kind: "vllm" or "sglang".
        model: name under which the servers serve the model. Defaults to the first that they report.
        api_key: Bearer token. Defaults to the environment variable LIGHTRL_SERVER_API_KEY, which keeps it out of saved
            configurations.
        max_requests: Maximum number of rows that one rank has outstanding at one server.
        timeout: seconds within which a living server answers that it is healthy.
        progress_timeout: seconds for which a server that reports that it is healthy may answer nothing while rows are
            outstanding; None waits forever.
        start_timeout: seconds to wait for servers that are still starting.

    Raises:
        ValueError: an argument is out of range; before any model is loaded, a server that cannot be reached or has
            another tokenizer.

    Source: vLLM's `prompt_logprobs` (at most its `--max-logprobs`, 20, likeliest words), SGLang's `top_logprobs_num`.
    """

    def __init__(
        self,
        urls: list[str],
        kind: Literal["vllm", "sglang"] = "vllm",
        model: str | None = None,
        api_key: str | None = None,
        max_requests: int = 64,
        timeout: float = 30.0,
        progress_timeout: float | None = 1800.0,
        start_timeout: float = 60.0,
    ) -> None:
        self.model = model
        self.max_requests = at_least("ServerTeacher.max_requests", max_requests, 1)
        self._connection = Connection(
            "ServerTeacher", urls, PROTOCOLS, kind, api_key, timeout, progress_timeout, start_timeout
        )

    def check(self, tokenizer: str) -> None:
        """Waits for the servers and checks what they serve; a second call does nothing.

        Args:
            tokenizer: directory or ID of the policy's.

        Raises:
            ValueError: a server that cannot be reached, or has another tokenizer.
        """
        if self._connection.loop is None:
            self._connection.open(lambda server: self._look_at(server, tokenizer))

    async def _look_at(self, server: Server, tokenizer: str) -> None:
        protocol = self._connection.protocol
        server.facts = await protocol.served(server, self.model)
        await check_tokenizer(server, protocol, tokenizer)

    def scores(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[TokenScores]:
        """The model's log-probs of tokens 1..n-1 of each row, given those before.

        Args:
            rows: token IDs.
            top: number of top-k tokens to return at each position.

        Raises:
            ValueError: a server rejects a row, such as one longer than it can hold.
            EngineDiedError: no server is left.
            ServerError: living servers answered a row with errors several times.
        """
        assert self._connection.loop is not None, "call `check` first"
        return self._connection.loop.run(self._all_scores(rows, top))

    async def _all_scores(self, rows: Sequence[Sequence[int]], top: int) -> list[TokenScores]:
        room = asyncio.Semaphore(self.max_requests * len(self._connection.servers))

        async def one(ids: Sequence[int]) -> TokenScores:
            async with room:
                return await self._score(ids, top)

        return list(await asyncio.gather(*(one(ids) for ids in rows)))

    async def _score(self, ids: Sequence[int], top: int) -> TokenScores:
        errors, servers = 0, self._connection.servers
        while living := [server for server in servers if server.lost is None]:
            server = min(living, key=lambda s: s.outstanding)
            server.outstanding += 1
            try:
                return await self._connection.protocol.scores(server, ids, top)
            except ServerLostError:
                continue
            except ServerError as error:
                errors += 1
                if error.status < 500:
                    raise ValueError(f"{error}. The teacher's server refuses a row of {len(ids)} tokens.") from error
                if errors > _RETRIES:
                    raise
                log.warning("%s Asking again.", error)
            finally:
                server.outstanding -= 1
        said = "; ".join(f"{server.url}: {server.lost}" for server in servers)
        raise EngineDiedError(f"All servers of the teacher are gone. {said}. Start them and resume the run.")

    def close(self) -> None:
        """Disconnects from the servers, which keep running."""
        self._connection.close()
