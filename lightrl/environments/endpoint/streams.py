"""Conversations of a trajectory: detects continuations, and applies stop strings to replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightrl.environments.base import Message, Reply, Tools
from lightrl.environments.ledger import Ledger


@dataclass
class Stream:
    """A conversation that can be continued.

    `sampled` is the text of the last reply including its stop string, if the policy did not end its turn. Programs such
    as smolagents append text to it.
    """

    ledger: Ledger
    busy: bool = False  # a turn is being sampled
    sampled: str | None = None

    def rest(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], str] | None:
        """The messages after this conversation, and text appended to its last reply; None if it isn't continued."""
        said = self.ledger.conversation
        if self.busy or self.ledger.tools != list(tools) or len(messages) < len(said):
            return None
        *before, last = said
        if not all(same(mine, theirs) for mine, theirs in zip(before, messages, strict=False)):
            return None
        more = "" if same(last, messages[len(before)]) else self._more(last, messages[len(before)])
        if more is None:
            return None
        rest = list(messages[len(said) :])
        if len(said) == len(self.ledger.messages):  # the last request has no reply and can only be repeated
            return None if rest else ([], "")
        return (rest, more) if rest and all(message["role"] != "assistant" for message in rest) else None

    def _more(self, mine: Message, theirs: Message) -> str | None:
        """Text that a program appended to the sampled text; None if it changed the text."""
        if (
            self.sampled is None
            or mine["role"] != "assistant"
            or not same({**mine, "content": ""}, {**theirs, "content": ""})
        ):
            return None
        text, sampled = theirs["content"], self.sampled.lstrip()
        if not isinstance(text, str) or not sampled or not text.lstrip().startswith(sampled.rstrip()):
            return None
        return text.lstrip()[len(sampled.rstrip()) :].removeprefix(sampled[len(sampled.rstrip()) :])


def same(mine: Message, theirs: Message) -> bool:
    """Whether two messages are equal, ignoring reasoning that programs omit and whitespace that they strip."""
    if mine["role"] != "assistant":
        return mine == theirs
    if "reasoning_content" in mine and "reasoning_content" not in theirs:
        mine = {key: value for key, value in mine.items() if key != "reasoning_content"}
    return _stripped(mine) == _stripped(theirs)


def _stripped(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


def cut(reply: Reply, stops: Sequence[str], start: int) -> tuple[Reply, str | None]:
    """The reply up to the first stop string at or after `start` in its content, and that string."""
    for name in ("reasoning", "content"):
        text, first = getattr(reply, name) or "", start if name == "content" else 0
        found = [(place, -len(stop), stop) for stop in stops if (place := text.find(stop, first)) >= 0]
        if found:
            place, _, stop = min(found)
            if name == "content":
                return replace(reply, content=text[:place]), stop
            return replace(reply, reasoning=text[:place], content=""), stop
    return reply, None
