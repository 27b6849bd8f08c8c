"""Episodes of many turns: what environments and programs have in common."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightrl.compat.arguments import above, at_least, fraction
from lightrl.data.processing import row_variables
from lightrl.engines.background import all_of
from lightrl.environments.base import Message, Tools
from lightrl.environments.bridges import Bridge, ImageProcessor, TemplateBridge
from lightrl.environments.episodes import Ask, Episode, Task
from lightrl.environments.parsing import ReplyParser, choose_parser
from lightrl.environments.renderers import RendererBridge, make_renderer
from lightrl.models.chat_templates import training_template
from lightrl.records import SamplingParams, Trajectory
from lightrl.rewards.base import copied

if TYPE_CHECKING:
    from lightrl.data.prompts import PromptMixture, PromptSource

_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "Qd5"}}, "required": ["x"]}
EXAMPLE_TOOLS: Tools = [
    {"type": "function", "function": {"name": "Qt7", "description": "Qd7", "parameters": _PARAMETERS}},
]
"""Stand-in for the tools of environments that are not made yet."""


@dataclass
class Attempt:
    """One attempt of a `MultiTurn` episode.

    Attributes:
        row: Row of the dataset. Changes reach neither other attempts nor rewards.
        ask: Has the engine complete a request.
        seed: Seed of the group.
        turn_seed: From a turn's number to the seed of its request.
        sampling: Distribution; its `max_new_tokens` limits one request.
        max_tokens: Maximum number of tokens of a row, context included.
        name: Name in messages.
        first: First messages of the group's attempts so far, which all its attempts share.
    """

    row: Mapping[str, Any]
    ask: Ask
    seed: int
    turn_seed: Callable[[int], int]
    sampling: SamplingParams
    max_tokens: int
    name: str
    first: list[list[Message]]


class MultiTurn(Episode):
    """Plays the attempts of a group at the same time, each with a separate conversation.

    Args:
        max_turns: Maximum number of turns of a trajectory.
        max_tokens_per_turn: Maximum number of tokens of a reply; None for the sampling's `max_new_tokens`.
        max_tokens: Maximum number of tokens of a trajectory's row, prompt and context included; None for the engine's
            limit.
        max_seconds: Seconds that an attempt may take, without waiting for the engine; None for no limit.
        max_environments: Maximum number of attempts at once in this process.
        max_retries: Maximum number of times that an attempt is made again if the policy did not cause its failure.
        max_failed: Fraction of a rollout's trajectories on a rank, in [0, 1], that may fail for good. More end the run.
        renderer: Family's name in the package `renderers`, such as "qwen3", for local folders and fine-tunes with their
            model's chat template. "template" uses the chat template. None uses a renderer for models that the package
            knows by their exact hub name, otherwise the chat template.
        tool_parser: vLLM's name of the parser of tool calls, such as "hermes", or "smollm2" for lists of calls, which
            needs no vLLM. None uses the renderer's, or the one that fits the chat template.
        reasoning_parser: vLLM's name of the parser of thoughts, such as "deepseek_r1". None uses the renderer's,
            otherwise thoughts stay in the content.
        template_kwargs: Variables of the chat template, such as `enable_thinking`. A row's columns
            `chat_template_kwargs` and `template_kwargs` override them.

    Attributes:
        tools_seen: Tool's name -> the tools with which it was offered to the policy.

    Raises:
        ValueError: A value is out of its range.
    """

    def __init__(
        self,
        *,
        max_turns: int = 8,
        max_tokens_per_turn: int | None = None,
        max_tokens: int | None = None,
        max_seconds: float | None = None,
        max_environments: int = 64,
        max_retries: int = 2,
        max_failed: float = 0.5,
        renderer: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_turns = at_least("max_turns", max_turns, 1)
        self.max_tokens_per_turn = at_least("max_tokens_per_turn", max_tokens_per_turn, 1, or_none="for no limit")
        self.max_tokens = at_least("max_tokens", max_tokens, 1, or_none="for no limit")
        self.max_seconds = above("max_seconds", max_seconds, or_none="for no limit")
        self.max_environments = at_least("max_environments", max_environments, 1)
        self.max_retries = at_least("max_retries", max_retries, 0)
        self.max_failed = fraction("max_failed", max_failed)
        self.renderer = renderer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.template_kwargs = dict(template_kwargs or {})
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._tokenizer: Any = None
        self._processor: ImageProcessor | None = None
        self._renderer: Any = None
        self._bridges: dict[str, Bridge] = {}  # by variables of the chat template
        self._parsers: dict[bool, ReplyParser] = {}  # by whether there are tools
        self.tools_seen: dict[str, Tools] = {}

    @abstractmethod
    async def play(self, attempt: Attempt) -> Trajectory:
        """Plays one attempt to its end."""

    def setup(self, tokenizer: Any, processor: ImageProcessor | None = None) -> None:
        """Takes the policy's tokenizer, and the processor of a model that sees images. Once, before the first attempt.

        Raises:
            ValueError: There is no chat template, or one that hides tools although `tool_parser` is set; `renderer` or
                a parser is unknown.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._renderer = make_renderer(tokenizer, self.renderer, self.template_kwargs)
        self._bridges, self._parsers = {}, {}
        bridge = self.bridge_of({})
        if self.tool_parser is not None:
            self._require_shown(bridge, EXAMPLE_TOOLS)
        if self.tool_parser is not None or self.reasoning_parser is not None:
            self.parser(())  # which rejects unknown names before any model loads

    def variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of the chat template for a row."""
        return row_variables(row, self.template_kwargs)

    def bridge_of(self, row: Mapping[str, Any]) -> Bridge:
        """Turns conversations into tokens, by a row's variables of the chat template."""
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
        """The parser of replies with these tools.

        Raises:
            ValueError: The chat template hides tools or calls from the model, or no parser fits it.
        """
        if tools is not EXAMPLE_TOOLS:
            self.tools_seen |= {tool["function"]["name"]: tools for tool in tools}
        if bool(tools) not in self._parsers:
            if tools:
                self._require_shown(self.bridge_of({}), tools)
            self._parsers[bool(tools)] = choose_parser(
                self._tokenizer,
                renderer=self._renderer,
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
                tools=bool(tools),
            )
        return self._parsers[bool(tools)]

    def _require_shown(self, bridge: Bridge, tools: Tools) -> None:
        if self._renderer is None and (hidden := bridge.hidden(tools)) is not None:
            own = str(self._tokenizer.chat_template)
            to = "training" if training_template(own) != own else "to a template that writes tools and calls"
            raise ValueError(
                f"tool_parser={self.tool_parser!r}: the chat template hides {hidden} from the model. Set "
                f"actor.chat_template: {to}. Or leave out the tools and tool_parser."
            )

    def check_template(self) -> None:
        if self.renderer not in (None, "template"):
            raise ValueError(
                f"actor.chat_template with episode.renderer={self.renderer!r}: a renderer writes its family's "
                "template. Leave the renderer out (and name the tool_parser), or the template."
            )

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:
        for source in getattr(prompts, "sources", None) or [prompts]:
            if source.system_prompt is not None:
                raise ValueError(
                    "prompts.system_prompt with an environment: its `reset` makes the first messages. Put the system's "
                    "turn there, or into the prompt, a conversation."
                )
            if source.template_kwargs:
                raise ValueError("prompts.template_kwargs with an environment: set episode.template_kwargs.")
            if source.max_prompt_tokens is not None and source.overlong == "truncate_left":
                raise ValueError(
                    'prompts.overlong="truncate_left" with an environment, which gets the row and not its tokens: use '
                    '"drop" or "error".'
                )

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        if task.prompt.media and task.prompt.media[0]:
            raise ValueError(
                f"{task.name} has media, but an environment's `reset` makes the first messages: set "
                "prompts.media_columns={}, and put images into content blocks there."
            )
        row = {**task.columns, "prompt": task.prompt.raw[0]}
        longest = min(self.max_tokens or task.max_model_len, task.max_model_len)
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_environments))
        first: list[list[Message]] = []

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
