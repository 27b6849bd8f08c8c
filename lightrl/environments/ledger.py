"""The token record of a trajectory: what was asked, what was sampled, and which of it is trained where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.bridges import Bridge
from lightrl.types import Support, TrajectoryRow

__all__ = ["Ledger"]


class Ledger:
    """Records one conversation of a trajectory. `begin`, then by turns `sampled` and `answer`.

    Sampled tokens, log-probs and versions are kept as the engine gave them; no text of theirs is tokenised again to
    train on. The next request extends the last one where the bridge proves that the chat template does; otherwise a new
    row begins with the conversation rendered anew. A sampled token is trained in the row it was sampled in, and only
    there; elsewhere it is context.

    Args:
        bridge: of the policy's chat template.
        tools: JSON schemas of the tools.
    """

    def __init__(self, bridge: Bridge, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.bridge = bridge
        self.tools = list(tools)
        self.messages: list[Message] = []
        self.turns = 0
        self._rows: list[TrajectoryRow] = []
        self._turn: tuple[list[int], list[int], Message] | None = None

    @property
    def request_ids(self) -> list[int]:
        """What the engine is to be asked next."""
        return list(self._rows[-1].token_ids)

    @property
    def rows(self) -> list[TrajectoryRow]:
        """The training rows: those with a trained token, each up to its last."""
        rows = []
        for row in self._rows:
            trained = [i for i, turn in enumerate(row.turn_ids) if turn >= 0]
            if trained:
                rows.append(_upto(row, trained[-1] + 1))
        # Nothing is trained (it failed early, or malformed turns are masked): a record of what was asked stays.
        return rows or [_upto(self._rows[0], len(self._rows[0].token_ids))]

    @property
    def forks(self) -> int:
        """How often a new row had to begin."""
        return len(self._rows) - 1

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Renders the prompt; returns what to ask."""
        assert not self._rows, "a ledger records one conversation"
        self.messages = [dict(message) for message in messages]
        self._rows.append(_context(self.bridge.render(self.messages, self.tools)))
        return self.request_ids

    def sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int,
        reply: Message,
        *,
        trained: bool = True,
        support: Support | None = None,
        turn: int | None = None,
    ) -> None:
        """Records what the engine sampled after `request_ids`.

        Args:
            token_ids: n ids. logprobs: n floats.
            policy_version: of the weights that sampled them.
            reply: the same as an assistant's message, as it enters the conversation.
            trained: False makes the turn context.
            support: what the tokens were drawn from; None where nothing was cut, or it was not recorded.
            turn: its number in the trajectory, where that has other conversations; None counts from 0.
        """
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} sampled tokens came with {len(logprobs)} log-probs.")
        row = self._rows[-1]
        self._turn = (list(row.token_ids), list(token_ids), reply)
        row.support = Support.joined((len(row.token_ids), row.support), (len(token_ids), support if trained else None))
        row.token_ids.extend(token_ids)
        turn = self.turns if turn is None else turn
        row.turn_ids.extend([turn if trained else -1] * len(token_ids))
        row.logprobs.extend(logprobs if trained else [0.0] * len(token_ids))
        row.policy_versions.extend([policy_version if trained else -1] * len(token_ids))
        self.turns += 1

    def answer(self, messages: Sequence[Message]) -> list[int]:
        """Appends what the environment said, or begins a new row; returns what to ask.

        Raises:
            ValueError: the template refuses the conversation.
        """
        assert self._turn is not None, "nothing was sampled since the last answer"
        prompt_ids, completion_ids, reply = self._turn
        suffix = self.bridge.extend(prompt_ids, completion_ids, self.messages, reply, messages, self.tools)
        self.messages += [reply, *(dict(message) for message in messages)]
        self._turn = None
        if suffix is None:
            self._rows.append(_context(self.bridge.render(self.messages, self.tools)))
        else:
            row, more = self._rows[-1], _context(suffix)
            row.support = Support.joined((len(row.token_ids), row.support), (len(suffix), None))
            row.token_ids += more.token_ids
            row.turn_ids += more.turn_ids
            row.logprobs += more.logprobs
            row.policy_versions += more.policy_versions
        return self.request_ids

    @property
    def conversation(self) -> list[Message]:
        """All messages, the last reply included."""
        return [*self.messages, *([self._turn[2]] if self._turn is not None else [])]


def _context(token_ids: Sequence[int]) -> TrajectoryRow:
    n = len(token_ids)
    return TrajectoryRow(list(token_ids), [-1] * n, [0.0] * n, [-1] * n)


def _upto(row: TrajectoryRow, end: int) -> TrajectoryRow:
    support = None if row.support is None else row.support.upto(end)
    versions = row.policy_versions[:end]
    return TrajectoryRow(row.token_ids[:end], row.turn_ids[:end], row.logprobs[:end], versions, support)
