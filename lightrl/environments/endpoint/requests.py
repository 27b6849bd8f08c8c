"""A program's request and its answer, independent of the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrl.environments.base import Message, Reply


class RefusedError(Exception):
    """Raised to reject a request. The message contains the fix, and SDKs read the code."""

    def __init__(self, status: int, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code


@dataclass
class Asked:
    """A parsed request.

    Attributes:
        messages: Conversation, with the program's IDs of tool calls.
        tools: JSON schemas in the format of chat templates.
        max_new_tokens: Maximum number of tokens of the reply. None uses the run's limit.
        model: Model name, which is echoed and has no effect.
        stream: Whether to answer with server-sent events.
        usage: Whether a stream of chat completions ends with token counts.
        ignored: Names of ignored sampling parameters.
        template_kwargs: Requested variables of the chat template.
        instructions: Number of leading messages that are not part of the conversation that a response continues.
        stop: Stop strings.
        forced: Names of the tools of which the reply must call one; empty means any tool. None makes calls optional.
        single: Whether the reply may have at most one tool call.
        structured: Grammar of the reply, in the format of vLLM's `structured_outputs`.
        n: Number of replies.
        top_logprobs: Number of most likely tokens to return with each token's log-prob. None returns no log-probs.
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
    """A turn to return to the program.

    Attributes:
        reply: Reply up to the stop string. IDs of tool calls are unique in the trajectory.
        prompt_tokens: Number of prompt tokens.
        completion_tokens: Number of sampled tokens.
        stop: Stop string that ended the reply.
        logprobs: Tokens and log-probs in OpenAI's format. None if not requested.
    """

    reply: Reply
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    logprobs: list[dict[str, Any]] | None = None
