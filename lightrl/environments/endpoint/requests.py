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
    """A parsed request."""

    messages: list[Message]  # with the program's IDs of tool calls
    tools: list[dict[str, Any]] = field(default_factory=list)  # in the format of chat templates
    max_new_tokens: int | None = None  # None uses the run's limit
    model: str = ""  # is echoed and has no effect
    stream: bool = False
    usage: bool = False  # a stream of chat completions ends with token counts
    ignored: tuple[str, ...] = ()  # names of sampling parameters
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    instructions: int = 0  # leading messages that are not part of the conversation that a response continues
    stop: tuple[str, ...] = ()
    forced: tuple[str, ...] | None = None  # tools of which one must be called, any if empty; None: optional
    single: bool = False  # at most one tool call
    structured: Mapping[str, Any] = field(default_factory=dict)  # in the format of vLLM's `structured_outputs`
    n: int = 1
    top_logprobs: int | None = None  # per token; None returns no log-probs
    prefill: bool = False  # the last message is the beginning of the reply


@dataclass
class Answered:
    """A turn to return to the program."""

    reply: Reply  # up to the stop string; IDs of tool calls are unique in the trajectory
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None  # stop string that ended the reply
    logprobs: list[dict[str, Any]] | None = None  # in OpenAI's format; None if not requested
