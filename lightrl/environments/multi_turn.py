"""Attempts of many turns: what environments and programs that are played have in common."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightrl.compat.arguments import above, at_least, fraction
from lightrl.data.processing import row_variables
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.engines.background import all_of
from lightrl.environments.base import Tools
from lightrl.environments.bridges import Bridge, ImageProcessor, RendererBridge, TemplateBridge, make_renderer
from lightrl.environments.episodes import Ask, Episode, Task
from lightrl.environments.parsing import ReplyParser, choose_parser
from lightrl.records import SamplingParams, Trajectory
from lightrl.rewards.calls import copied

_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "Qd5"}}, "required": ["x"]}
EXAMPLE_TOOLS: Tools = [
    {"type": "function", "function": {"name": "Qt7", "description": "Qd7", "parameters": _PARAMETERS}},
]
"""Stands for the tools of environments that are not made yet."""


@dataclass
class Attempt:
    """One attempt of a `MultiTurn` episode.

    Attributes:
        row: a row of the data set.
        ask: has the engine complete a request.
        seed: of the group.
        turn_seed: from a turn's number to the seed of its request.
        sampling: the distribution; its `max_new_tokens` is the most that one request may bring.
        max_tokens: most tokens of a row, context included.
        name: how messages call it.
    """

    row: Mapping[str, Any]
    ask: Ask
    seed: int
    turn_seed: Callable[[int], int]
    sampling: SamplingParams
    max_tokens: int
    name: str


class MultiTurn(Episode):
    """Plays the attempts of a group at once, each a conversation of its own.

    Args:
        max_turns: most turns of the policy in a trajectory.
        max_tokens_per_turn: most tokens of a reply; None takes the sampling's `max_new_tokens`.
        max_tokens: most tokens of a trajectory's row, prompt and context included; None leaves only the engine's limit.
        max_seconds: most seconds that an attempt may take; None is no limit. Waiting for the engine does not count.
        max_environments: most attempts at once in this process.
        max_retries: times that an attempt is made again that failed for something the policy did not cause.
        max_failed: fraction of a rollout's trajectories on a rank, in [0, 1], that may have failed for good; with
            more the run stops with the cause.
        renderer: the family's name in the package `renderers`, such as "qwen3", for local folders and fine-tunes that
            keep their model's chat template; "template" takes the chat template; None takes a renderer for the models
            that the package knows by their exact hub name, otherwise the chat template.
        tool_parser: vLLM's name of the parser of tool calls, such as "hermes"; None takes the renderer's, or else
            the one that fits the chat template.
        reasoning_parser: vLLM's name of the parser of thoughts, such as "deepseek_r1"; None takes the renderer's,
            otherwise thoughts stay in the content.
        template_kwargs: Variables of the chat template, such as `enable_thinking`. A row's own, in its column
            `chat_template_kwargs` or `template_kwargs`, override these.

    Raises:
        ValueError: a value is out of its range; the message names the argument.
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
        self.max_seconds = above("max_seconds", max_seconds, note=" seconds", or_none="for no limit")
        self.max_environments = at_least("max_environments", max_environments, 1)
        self.max_retries = at_least("max_retries", max_retries, 0)
        self.max_failed = fraction("max_failed", max_failed)
        self.renderer = renderer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.template_kwargs = dict(template_kwargs or {})
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._tokenizer: Any = None
        self._renderer: Any = None
        self._processor: ImageProcessor | None = None
        self._bridge: Bridge | None = None
        self._bridges: dict[str, Bridge] = {}  # by a row's own variables of the chat template
        self._parsers: dict[bool, ReplyParser] = {}  # by whether there are tools

    @abstractmethod
    def player(self) -> AbstractAsyncContextManager[Callable[[Attempt], Awaitable[Trajectory]]]:
        """What plays one attempt; entered once for each group, and left when all its attempts are over."""

    def setup(self, tokenizer: Any, processor: ImageProcessor | None = None) -> None:
        """Takes the policy's tokenizer, and the processor of a model that sees images. Once, before the first attempt.

        Raises:
            ValueError: it has no chat template, or one that hides tools although `tool_parser` is set; `renderer` names
                none, or vLLM has no parser of a name.
        """
        self._tokenizer = tokenizer
        self._parsers = {}
        self._processor = processor
        self._bridges = {}
        self._renderer, self._bridge = self._rendering(self.template_kwargs)
        if self.tool_parser is not None:
            self._require_shown(EXAMPLE_TOOLS)
        if self.tool_parser is not None or self.reasoning_parser is not None:
            self.parser(())  # which refuses names that vLLM does not know, before any model loads

    def _rendering(self, variables: Mapping[str, Any]) -> tuple[Any, Bridge]:
        """The renderer, if there is one, and the bridge for some variables of the chat template."""
        renderer = make_renderer(self._tokenizer, self.renderer, variables)
        if renderer is not None:
            return renderer, RendererBridge(renderer, self._tokenizer)
        return None, TemplateBridge(self._tokenizer, variables, self._processor)

    def variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of the chat template for a row."""
        return row_variables(row, self.template_kwargs)

    def bridge_of(self, row: Mapping[str, Any]) -> Bridge:
        """The bridge for a row's variables of the chat template."""
        variables = self.variables(row)
        if variables == self.template_kwargs:
            return self.bridge
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._bridges:
            self._bridges[key] = self._rendering(variables)[1]
        return self._bridges[key]

    @property
    def bridge(self) -> Bridge:
        """Turns conversations into tokens; set by `setup`."""
        assert self._bridge is not None, "setup comes first"
        return self._bridge

    def parser(self, tools: Tools) -> ReplyParser:
        """The parser of replies where there are these tools.

        Raises:
            ValueError: the chat template hides tools or calls of them from the model, or no parser fits it.
        """
        if bool(tools) not in self._parsers:
            if tools:
                self._require_shown(tools)
            self._parsers[bool(tools)] = choose_parser(
                self._tokenizer,
                renderer=self._renderer,
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
                tools=bool(tools),
            )
        return self._parsers[bool(tools)]

    def _require_shown(self, tools: Tools) -> None:
        if self._renderer is None and (hidden := self.bridge.hidden(tools)) is not None:
            raise ValueError(
                f"tool_parser={self.tool_parser!r}: the chat template hides {hidden} from the model. Set "
                "actor.chat_template to a template that writes tools and calls, or leave out the tools and tool_parser."
            )

    def check_template(self) -> None:
        """Refuses one beside a renderer of a model family."""
        if self.renderer not in (None, "template"):
            raise ValueError(
                f"actor.chat_template with episode.renderer={self.renderer!r}: a renderer writes its family's own "
                "template. Leave the renderer out (and name the tool_parser), or the template."
            )

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:
        for source in prompts.sources if isinstance(prompts, PromptMixture) else [prompts]:
            if source.system_prompt is not None:
                raise ValueError(
                    "prompts.system_prompt with an environment: its `reset` makes the first messages. Put the system's "
                    "turn there, or into the prompt, a conversation."
                )
            if source.template_kwargs:
                raise ValueError("prompts.template_kwargs with an environment: set episode.template_kwargs.")
            if source.max_prompt_tokens is not None and source.overlong == "truncate_left":
                raise ValueError(
                    'prompts.overlong="truncate_left" with an environment, which gets the row and not its tokens: take '
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

        async def one(number: int, play: Callable[[Attempt], Awaitable[Trajectory]]) -> Trajectory:
            name, turn_seed = f"attempt {number} at {task.name}", partial(task.turn_seed, number)
            async with places:
                self.playing += 1
                try:
                    own = copied(row)  # what an environment changes reaches neither the others nor the rewards
                    played = await play(Attempt(own, ask, task.seed, turn_seed, task.sampling, longest, name))
                finally:
                    self.playing -= 1
                task.ended(played)
                return played

        async with self.player() as play:
            return await all_of(one(number, play) for number in task.attempts)
