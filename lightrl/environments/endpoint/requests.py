"""A program's request and its answer, whichever interface they came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrl.environments.base import Message, Reply


class RefusedError(Exception):
    """A request that is rejected.

    Args:
        status: HTTP status.
        message: What is wrong, and the fix.
        parameter: Member of the body that is wrong.
        code: Word for programs, such as "context_length_exceeded".
    """

    def __init__(self, status: int, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code


@dataclass
class Asked:
    """A request of a program, whichever interface it came by.

    Attributes:
        messages: Conversation; IDs of tool calls are those that the program was given.
        tools: JSON schemas, as chat templates take them.
        max_new_tokens: Maximum number of tokens of the reply; None for the run's limit.
        model: Name that the program asked for. It is given back and has no effect.
        stream: Whether the answer comes as server-sent events.
        usage: Whether a stream of chat completions ends with the counts of tokens.
        ignored: Names of sampling parameters, which have no effect.
        template_kwargs: Variables of the chat template that the program asked for.
        instructions: Number of first messages that are not part of the conversation that a response continues.
        stop: Strings that end the reply.
        forced: Tools of which the reply must call one, all if empty; None if it need not.
        single: Whether the reply has at most one tool call.
        structured: What the reply must match, under the names of vLLM's `structured_outputs`.
        n: Number of replies.
        top_logprobs: Number of likeliest tokens to tell with each token's log-prob; None for no log-probs.
        prefill: Whether the last message is the beginning of the reply.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_new_tokens: int | None = None
    model: str = ""
    stream: bool = False
    usage: bool = False
    ignored: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    instructions: int = 0
    stop: tuple[str, ...] = ()
    forced: tuple[str, ...] | None = None
    single: bool = False
    structured: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    top_logprobs: int | None = None
    prefill: bool = False


@dataclass
class Answered:
    """A turn as the program gets it.

    Attributes:
        number: Number of the turn.
        reply: The reply up to the stop string. IDs of its tool calls are unique in the attempt.
        prompt_tokens: Number of tokens that the engine was asked with.
        completion_tokens: Number of tokens that it sampled.
        stop: Stop string that ended the reply.
        logprobs: Tokens and their log-probs, as OpenAI writes them; None if they were not asked for.
    """

    number: int
    reply: Reply
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    logprobs: list[dict[str, Any]] | None = None
