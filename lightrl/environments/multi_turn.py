"""Base class of multi-turn episodes with environments or agent programs."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightrl.data.processing import row_variables
from lightrl.engines.background import all_of
from lightrl.environments.base import Tools
from lightrl.environments.bridges import Bridge, TemplateBridge
from lightrl.environments.episodes import Ask, Episode, Task
from lightrl.environments.parsing import ReplyParser, choose_parser
from lightrl.environments.renderers import RendererBridge, make_renderer
from lightrl.models.chat_templates import training_template
from lightrl.records import CompletionGroup, GenerationRequest, SamplingParams, Trajectory
from lightrl.rewards.base import copied

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor
    from lightrl.data.prompts import PromptMixture, PromptSource
    from lightrl.environments.ledger import Ledger

_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "Qd5"}}, "required": ["x"]}
EXAMPLE_TOOLS: Tools = [
    {"type": "function", "function": {"name": "Qt7", "description": "Qd7", "parameters": _PARAMETERS}},
]
"""Placeholder for the tools of environments that are not created yet."""


@dataclass
class Attempt:
    """A trajectory to run in a `MultiTurn` episode."""

    row: Mapping[str, Any]  # changes don't affect other trajectories or rewards
    ask: Ask
    seed: int  # of the group
    turn_seed: Callable[[int], int]  # from a turn's index to the seed of its request
    sampling: SamplingParams  # `max_new_tokens` limits one request
    max_tokens: int  # of a sequence, including context
    name: str  # in messages
    first: list[str]  # keys of the first messages of the group's trajectories so far, shared by the group

    async def sample(
        self, ledger: Ledger, turn: int, sampling: SamplingParams, *, trained: bool = True
    ) -> CompletionGroup:
        """Requests a turn of a conversation from the engine."""
        name = f"turn {turn} of {self.name}"
        request = GenerationRequest(ledger.request_ids, sampling, self.turn_seed(turn), name=name, trained=trained)
        return await self.ask(ledger.shown(request))


class MultiTurn(Episode):
    """Runs the trajectories of a group concurrently, each with a separate conversation.

    Args:
        max_turns: Maximum number of turns per trajectory.
        max_tokens_per_turn: Maximum number of tokens per turn. Defaults to `max_new_tokens` of the sampling settings.
        max_tokens: Maximum number of tokens of a trajectory's sequence, including prompt and context. Defaults to the
            engine's limit.
        max_seconds: Time limit per trajectory in seconds, excluding generation. Defaults to no limit.
        max_environments: Maximum number of concurrent trajectories in this process. Defaults to 64.
        max_retries: Maximum number of retries of a trajectory whose failure the policy did not cause.
        max_failed: Maximum fraction of a rollout's trajectories on a rank, in [0, 1], that may fail after all retries.
            If more fail, the run stops.
        renderer: Model family in the package `renderers`, such as "qwen3". Set it for local model directories and
            fine-tuned models that use the family's chat template. "template" uses the chat template. Defaults to the
            renderer for the model ID if the package has one, otherwise to the chat template.
        tool_parser: Name of vLLM's tool call parser, such as "hermes", or "smollm2" (lists of calls; doesn't require
            vLLM). Defaults to the renderer's parser, or is detected from the chat template.
        reasoning_parser: Name of vLLM's reasoning parser, such as "deepseek_r1". Defaults to the renderer's parser;
            without one, reasoning stays in the content.
        template_kwargs: Variables of the chat template, such as `enable_thinking`. The dataset columns
            `chat_template_kwargs` and `template_kwargs` override them.

    Attributes:
        tools_seen: Tool name -> the tools with which it was offered to the policy.
    """

    def __init__(
        self,
        *,
        max_turns: int = 8,
        max_tokens_per_turn: int | None = None,
        max_tokens: int | None = None,
        max_seconds: float | None = None,
        max_environments: int | None = None,
        max_retries: int = 2,
        max_failed: float = 0.5,
        renderer: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_turns = max_turns
        self.max_tokens_per_turn = max_tokens_per_turn
        self.max_tokens = max_tokens
        self.max_seconds = max_seconds
        self.max_environments = 64 if max_environments is None else max_environments
        self.max_retries = max_retries
        self.max_failed = max_failed
        self.renderer = renderer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.template_kwargs = dict(template_kwargs or {})
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._tokenizer: Any = None
        self._processor: MediaProcessor | None = None
        self._bridges: dict[str, Bridge] = {}  # by variables of the chat template
        self._parsers: dict[bool, ReplyParser] = {}  # by whether there are tools
        self.tools_seen: dict[str, Tools] = {}

    @abstractmethod
    async def play(self, attempt: Attempt) -> Trajectory:
        """Runs one trajectory to the end."""

    def setup(self, tokenizer: Any, processor: MediaProcessor | None = None) -> None:
        """Receives the tokenizer and the processor of a VLM. Rejects unknown parsers and templates that hide tools."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._bridges, self._parsers = {}, {}
        bridge = self.bridge_of({})
        if self.tool_parser is not None:
            self._require_shown(bridge, EXAMPLE_TOOLS)
        if self.tool_parser is not None or self.reasoning_parser is not None:
            self.parser(())  # rejects unknown names before a model is loaded

    def variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return row_variables(row, self.template_kwargs)

    def bridge_of(self, row: Mapping[str, Any]) -> Bridge:
        """The bridge for an example's variables of the chat template."""
        variables = self.variables(row)
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._bridges:
            renderer = make_renderer(self._tokenizer, self.renderer, variables)
            self._bridges[key] = (
                TemplateBridge(self._tokenizer, variables, self._processor)
                if renderer is None
                else RendererBridge(renderer, self._tokenizer)
            )
        return self._bridges[key]

    def parser(self, tools: Tools) -> ReplyParser:
        """The parser of replies with these tools. Raises a ValueError if the chat template hides them."""
        if tools is not EXAMPLE_TOOLS:
            self.tools_seen |= {tool["function"]["name"]: tools for tool in tools}
        if bool(tools) not in self._parsers:
            if tools:
                self._require_shown(self.bridge_of({}), tools)
            self._parsers[bool(tools)] = choose_parser(
                self._tokenizer,
                renderer=self.bridge_of({}).renderer,
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
                tools=bool(tools),
            )
        return self._parsers[bool(tools)]

    def _require_shown(self, bridge: Bridge, tools: Tools) -> None:
        if bridge.renderer is None and (hidden := bridge.hidden(tools)) is not None:
            own = str(self._tokenizer.chat_template)
            to = "training" if training_template(own) != own else "to a template that renders tools and calls"
            raise ValueError(
                f"tool_parser={self.tool_parser!r}: the chat template hides {hidden} from the model. Set "
                f"actor.chat_template: {to}, or remove the tools and tool_parser."
            )

    def check_template(self) -> None:
        if self.renderer not in (None, "template"):
            raise ValueError(f"episode.renderer={self.renderer!r}: ignores actor.chat_template. Remove one of them.")

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:
        for source in getattr(prompts, "sources", None) or [prompts]:
            if source.system_prompt is not None:
                raise ValueError("prompts.system_prompt: has no effect here. Add the message in `reset` or the prompt.")
            if source.template_kwargs:
                raise ValueError("prompts.template_kwargs: has no effect here. Set episode.template_kwargs.")

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        if task.prompt.media and task.prompt.media[0]:
            raise ValueError(
                f"prompts.media_columns: {task.name} has media, but the environment's `reset` returns the first "
                "messages. Set media_columns={}, and add images as content blocks in `reset`."
            )
        row = {**task.columns, "prompt": task.prompt.raw[0]}
        longest = min(self.max_tokens or task.max_model_len, task.max_model_len)
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_environments))
        first: list[str] = []

        async def one(number: int) -> Trajectory:
            name, turn_seed = f"attempt {number} at {task.name}", partial(task.turn_seed, number)
            async with places:
                self.playing += 1
                try:
                    played = await self.play(
                        Attempt(copied(row), ask, task.seed, turn_seed, task.sampling, longest, name, first)
                    )
                finally:
                    self.playing -= 1
                task.ended(played)
                return played

        return await all_of(one(number) for number in task.attempts)
