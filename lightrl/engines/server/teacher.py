"""A distillation teacher on inference servers with fixed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightrl.engines.background import all_of
from lightrl.engines.server.pool import ServerPool
from lightrl.engines.server.protocols import PROTOCOLS, TokenScores


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
        """Waits for the servers and checks their models. Does nothing if called again.

        Args:
            tokenizer: Directory or ID of the policy's tokenizer.

        Raises:
            ValueError: If a server is unreachable or has a different tokenizer.
        """
        self._pool.open(tokenizer)

    def scores(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[TokenScores]:
        """Returns the teacher's log-probs of tokens 1..n-1 of each sequence.

        Args:
            rows: Token IDs.
            top: Number of top-k tokens to return at each position.

        Raises:
            ValueError: If a server rejects a sequence, for example because it is too long.
            EngineDiedError: If all servers died.
            ServerError: If live servers repeatedly return errors.
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
