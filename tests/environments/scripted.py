"""An engine whose replies are written beforehand, as ids that do not survive decoding and encoding."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.environments import Environment, EnvironmentEpisode, Reply, Step, Task, ToolCall
from lightrl.environments.multi_turn import MultiTurn
from lightrl.environments.parsing import ReplyParser
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Prompts, SamplingParams, Trajectory
from tests.environments.families import FAMILIES, make_tokenizer

TOKENIZER = make_tokenizer(FAMILIES["qwen2.5"])
SAMPLING = SamplingParams(max_new_tokens=200)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "one"},
                "b": {"type": "integer", "description": "two"},
            },
            "required": ["a", "b"],
        },
    },
}


def spell(tokenizer: Any, text: str, literal: str = "") -> list[int]:
    """Ids that decode to the text but are not those that encoding it gives: one character at a time.

    Special and added tokens are one id, but not where they stand inside `literal`.
    """
    tokens = sorted({t.content for t in tokenizer.added_tokens_decoder.values()}, key=len, reverse=True)
    ids: list[int] = []
    for number, part in enumerate(text.split(literal) if literal else [text]):
        if number:
            ids += [i for c in literal for i in tokenizer.encode(c, add_special_tokens=False)]
        for piece in re.split("(" + "|".join(map(re.escape, tokens)) + ")", part):
            if piece in tokens:
                ids.append(tokenizer.convert_tokens_to_ids(piece))
            else:
                ids += [i for c in piece for i in tokenizer.encode(c, add_special_tokens=False)]
    return ids


@dataclass
class Turn:
    """A reply, how it was sampled, and what follows it."""

    reply: Reply
    ids: list[int]
    answer: list[dict[str, Any]] | None = None
    finish: str = "stop"


def said(text: str, *calls: Any, errors: Sequence[str] = (), finish: str = "stop") -> Turn:
    """A reply with these calls, spelt in the tokens of Qwen2.5."""
    ids = spell(TOKENIZER, (text or "call") + ("<|im_end|>" if finish == "stop" else ""))
    return Turn(Reply(text, None, list(calls), list(errors)), ids, finish=finish)


class Script(Environment):
    """Says what the script says."""

    def __init__(self, turns: Sequence[Turn], tools: bool = True) -> None:
        self.turns = list(turns)
        self.tools = [ADD] if tools else []
        self.number = 0
        self.closed = 0

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Add 1 and 2."}]

    async def step(self, reply: Reply) -> Step:
        answer = self.turns[self.number].answer
        self.number += 1
        return Step(answer or (), reward=float(self.number), done=answer is None)

    async def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedEngine:
    """Gives the script's ids, whatever it is asked; log-prob and version tell turn and place."""

    turns: Sequence[Turn]
    asked: list[list[int]] = field(default_factory=list)

    async def __call__(self, request: GenerationRequest) -> CompletionGroup:
        number = len(self.asked)
        self.asked.append(list(request.token_ids))
        turn = self.turns[number]
        logprobs = [-(number + 1) - i / 1000 for i in range(len(turn.ids))]
        completion = Completion(list(turn.ids), logprobs, "", turn.finish)  # type: ignore[arg-type]
        return CompletionGroup(request, [completion], number)  # type: ignore[arg-type]


class ScriptedAttempts(EnvironmentEpisode):
    """Attempts whose replies are known and need no parsing."""

    def __init__(self, environment: Any, *, turns: Sequence[Turn], tokenizer: Any, **settings: Any) -> None:
        super().__init__(environment, **settings)
        self.turns = turns
        self.setup(tokenizer)

    def parser(self, tools: Sequence[dict[str, Any]]) -> ReplyParser:
        script = iter(self.turns)

        class Parser(ReplyParser):
            def parse(self, *args: Any) -> Reply:
                return next(script).reply

        return Parser(self._tokenizer)


async def play(
    tokenizer: Any, turns: Sequence[Turn], tools: bool, **settings: Any
) -> tuple[ScriptedEngine, Trajectory]:
    engine = ScriptedEngine(turns)
    attempts = ScriptedAttempts(
        lambda: Script(turns, tools),
        on_truncated="continue",
        max_turns=50,
        turns=turns,
        tokenizer=tokenizer,
        **settings,
    )
    (trajectory,) = await alone(attempts, engine, {}, SamplingParams(max_new_tokens=1000))
    return engine, trajectory


def play_group(
    environment: Any,
    turns: Sequence[Turn],
    row: Mapping[str, Any] | None = None,
    *,
    engine: Any = None,
    number: int = 1,
    seed: int = 1,
    **settings: Any,
) -> list[Trajectory]:
    """The trajectories of attempts at a row, each with these replies."""

    async def ask(request: GenerationRequest) -> CompletionGroup:
        return await ScriptedEngine([turns[request.seed % 100]])(request)

    attempts = ScriptedAttempts(environment, turns=turns, tokenizer=TOKENIZER, **settings)
    row = {"prompt": "Go."} if row is None else row
    return asyncio.run(alone(attempts, engine or ask, row, number=number, seed=seed))


def play_one(*args: Any, **settings: Any) -> Trajectory:
    (trajectory,) = play_group(*args, **settings)
    return trajectory


class Numbered(Task):
    """A task whose requests tell by their seed which turn of which attempt they are."""

    def turn_seed(self, attempt: int, turn: int) -> int:
        return 100 * attempt + turn


async def alone(
    attempts: MultiTurn,
    ask: Any,
    row: Mapping[str, Any],
    sampling: SamplingParams = SAMPLING,
    number: int = 1,
    seed: int = 1,
    max_model_len: int = 1 << 30,
) -> list[Trajectory]:
    prompt = Prompts([[]], [""], {name: [value] for name, value in row.items()}, raw=[row.get("prompt", "")])
    return await attempts.run(Numbered(prompt, tuple(range(number)), seed, sampling, None, max_model_len), ask)


async def closing(program: Any, playing: Awaitable[list[Trajectory]]) -> list[Trajectory]:
    try:
        return await playing
    finally:
        await program.close()


def mismatches(engine: ScriptedEngine, trajectory: Trajectory) -> int:
    """Tokens that differ between what was asked and sampled, and what is trained."""
    wrong = 0
    seen: list[int] = []
    for row in trajectory.rows:
        for turn in sorted(set(row.turn_ids) - {-1}):
            seen.append(turn)
            places = [i for i, t in enumerate(row.turn_ids) if t == turn]
            start, end = places[0], places[-1] + 1
            asked, ids = engine.asked[turn], engine.turns[turn].ids
            wrong += places != list(range(start, end)) or row.token_ids[:start] != asked
            wrong += row.token_ids[start:end] != ids
            wrong += row.logprobs[start:end] != [-(turn + 1) - i / 1000 for i in range(len(ids))]
            wrong += row.policy_versions[start:end] != [turn] * len(ids)
        context = [i for i, t in enumerate(row.turn_ids) if t < 0]
        wrong += any(row.logprobs[i] != 0 or row.policy_versions[i] != -1 for i in context)
    return wrong + (sorted(seen) != [n for n, turn in enumerate(engine.turns[: len(engine.asked)]) if turn.ids])


def call(number: int, **arguments: Any) -> ToolCall:
    return ToolCall("add", arguments, f"call{number:05d}")
