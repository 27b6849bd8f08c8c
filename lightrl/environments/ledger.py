"""The token record of a trajectory: requested, sampled, and trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lightrl.environments.base import Message, Tools
from lightrl.environments.bridges import Bridge, SampledTurn, Tokens
from lightrl.records import Completion, GenerationRequest, Media, Routes, Support, TrajectoryRow

if TYPE_CHECKING:
    from lightrl.data.processor import ImageInputs


class Ledger:
    """Records one conversation of a trajectory: `begin`, then alternating `sampled` and `answer`.

    Keeps tokens, log-probs, and policy versions exactly as sampled; sampled text is never retokenized for training. The
    next request extends the last one if the bridge verifies that the chat template only appends. Otherwise, the
    conversation is rendered again and starts a new sequence. A sampled token is trained in the sequence it was sampled
    in and is context in others. Images are decoded once and passed to the engine and the sequences.

    Args:
        bridge: Bridge of the policy's chat template.
        tools: JSON schemas of the tools.
    """

    def __init__(self, bridge: Bridge, tools: Tools = ()) -> None:
        self.bridge = bridge
        self.tools = list(tools)
        self.messages: list[Message] = []
        self.turns = 0
        self._rows: list[_Row] = []
        self._turn: SampledTurn | None = None

    @property
    def request_ids(self) -> list[int]:
        """Token IDs of the next request."""
        return list(self._rows[-1].token_ids)

    @property
    def rows(self) -> list[TrajectoryRow]:
        """The training sequences: those with trained tokens, up to the last trained token."""
        rows = []
        for row in self._rows:
            trained = [i for i, turn in enumerate(row.turn_ids) if turn >= 0]
            if trained:
                rows.append(self._upto(row, trained[-1] + 1))
        # Without trained tokens (early failure, or masked malformed turns), keeps the request as a record.
        return rows or [self._upto(self._rows[0], len(self._rows[0].token_ids))]

    @property
    def forks(self) -> int:
        """Number of additional sequences."""
        return len(self._rows) - 1

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Renders the prompt. Returns the token IDs of the request."""
        assert not self._rows, "a ledger records one conversation"
        self.messages = self.bridge.opened(messages)
        self._begin_row()
        return self.request_ids

    def shown(self, request: GenerationRequest) -> GenerationRequest:
        """Adds images, and the routed experts of earlier turns, to a request with `request_ids`."""
        row = self._rows[-1]
        if row.routes is not None:
            request = replace(request, routes=row.routes)
        inputs, media = self._images(row, len(row.token_ids))
        if media is None or inputs is None:
            return request
        return replace(request, inputs=inputs, media=media)

    def _begin_row(self) -> None:
        row = _Row([], [], [], [])
        row.add(self.bridge.render(self.messages, self.tools))
        self._rows.append(row)

    def sampled(
        self,
        completion: Completion,
        policy_version: int | Sequence[int],
        reply: Message,
        *,
        trained: bool = True,
        turn: int | None = None,
    ) -> None:
        """Records a completion of `request_ids`.

        Args:
            completion: Completion of n tokens.
            policy_version: Version of the weights that sampled it, or n versions.
            reply: The completion as an assistant message.
            trained: Whether the turn is trained. Otherwise it is context.
            turn: Index of the turn in a trajectory with several conversations. Defaults to counting from 0.
        """
        token_ids, logprobs = completion.token_ids, completion.logprobs
        if len(token_ids) != len(logprobs):
            raise ValueError(f"The engine returned {len(token_ids)} tokens, but {len(logprobs)} log-probs.")
        row = self._rows[-1]
        self._turn = SampledTurn(list(row.token_ids), list(token_ids), reply)
        row.short += token_ids
        support = completion.support if trained else None
        row.support = Support.joined((len(row.token_ids), row.support), (len(token_ids), support))
        row.routes = Routes.extended(row.routes, completion.routes)
        row.token_ids.extend(token_ids)
        turn = self.turns if turn is None else turn
        row.turn_ids.extend([turn if trained else -1] * len(token_ids))
        row.logprobs.extend(logprobs if trained else [0.0] * len(token_ids))
        versions = [policy_version] * len(token_ids) if isinstance(policy_version, int) else policy_version
        row.policy_versions.extend(versions if trained else [-1] * len(token_ids))
        self.turns += 1

    def answer(self, messages: Sequence[Message], said: Message | None = None, more: Sequence[int] = ()) -> list[int]:
        """Appends the environment's messages or starts a new sequence. Returns the token IDs of the next request.

        Args:
            messages: Messages after the last reply.
            said: Last reply in the conversation, if it contains text in addition to the sampled text.
            more: Tokens of the additional text, which become context.

        Raises:
            ValueError: The template rejects the conversation.
        """
        assert self._turn is not None, "nothing was sampled since the last answer"
        turn = self._turn
        if said is not None:
            turn = replace(turn, reply=said, completion_ids=[*turn.completion_ids, *more])
        new = self.bridge.opened(messages)
        suffix = self.bridge.extend(turn, self.messages, new, self.tools)
        self.messages += [turn.reply, *new]
        self._turn = None
        if suffix is None:
            self._begin_row()
        else:
            self._rows[-1].add(Tokens(more))
            self._rows[-1].add(suffix)
        return self.request_ids

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Appends context that the next reply continues."""
        self._rows[-1].add(Tokens(token_ids))

    @property
    def conversation(self) -> list[Message]:
        """All messages, including the last reply."""
        return [*self.messages, *([self._turn.reply] if self._turn is not None else [])]

    def _upto(self, row: _Row, end: int) -> TrajectoryRow:
        """The first `end` tokens of a row with their images."""
        support = None if row.support is None else row.support.upto(end)
        routes = None if row.routes is None else row.routes.upto(end)
        versions = row.policy_versions[:end]
        inputs, media = self._images(row, end)
        return TrajectoryRow(
            row.token_ids[:end], row.turn_ids[:end], row.logprobs[:end], versions, support, routes, inputs, media
        )

    def _images(self, row: _Row, end: int) -> tuple[dict[str, Any] | None, Media | None]:
        """Model inputs and media of the first `end` tokens of a row; None without images."""
        parts = [(start, tokens) for start, tokens in row.contexts if start < end]
        images = [image for _, tokens in parts for image in tokens.images]
        if not images:
            return None, None
        if row.processed is None or len(row.processed.images) != len(images):
            assert self.bridge.processor is not None, "images were decoded"
            row.processed = self.bridge.processor.images(images)
        inputs: dict[str, Any] = dict(row.processed.inputs)
        for name, entries in row.processed.token_inputs.items():
            inputs[name] = torch.zeros(1, end, dtype=torch.long)  # sampled tokens are text
            for start, tokens in parts:
                values = torch.tensor([entries.get(token, 0) for token in tokens])
                inputs[name][0, start : start + len(tokens)] = values[: end - start]
        # A row ends after a sampled token, so no image placeholders are truncated.
        short = end + sum(len(tokens.short) - len(tokens) for _, tokens in parts)
        return inputs, Media(images=images, token_ids=row.short[:short], key=row.key)


@dataclass
class _Row(TrajectoryRow):
    """A row under construction."""

    contexts: list[tuple[int, Tokens]] = field(default_factory=list)  # with their positions
    short: list[int] = field(default_factory=list)  # token IDs with one placeholder per image
    processed: ImageInputs | None = None  # computed on first use
    key: str = field(default_factory=lambda: Media().key)

    def add(self, tokens: Tokens) -> None:
        n = len(tokens)
        self.contexts.append((len(self.token_ids), tokens))
        self.short += tokens.short
        self.support = Support.joined((len(self.token_ids), self.support), (n, None))
        self.token_ids += tokens
        self.turn_ids += [-1] * n
        self.logprobs += [0.0] * n
        self.policy_versions += [-1] * n
