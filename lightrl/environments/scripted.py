"""Dry runs of environments and programs with scripted replies or a model, without training."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightrl.engines.background import BackgroundLoop, all_of
from lightrl.engines.base import Engine
from lightrl.environments.base import Tools, call_message
from lightrl.environments.episodes import Task
from lightrl.environments.multi_turn import MultiTurn
from lightrl.environments.playing import EnvironmentEpisode
from lightrl.models.turns import end_of_turn
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Prompts, SamplingParams, Support, Trajectory

EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass
class Played:
    """Two runs of a script on one example with the same seed."""

    row: int
    script: str
    trajectory: Trajectory
    again: Trajectory

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards; NaN if the trajectory failed or is scored by reward functions."""
        rewards = self.trajectory.turn_rewards
        return math.nan if self.trajectory.failed or not rewards else math.fsum(rewards)


@dataclass
class EnvironmentCheck:
    """Results of a dry run."""

    seeded: bool  # repeated runs must be identical
    played: list[Played] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)  # errors that would stop a run

    def problems(self) -> list[str]:
        found = list(self.mistakes)
        for p in self.played:
            for trajectory in (p.trajectory, p.again):
                if trajectory.failed:
                    found.append(
                        f"failed: {str(trajectory.failure).removesuffix('.')}. Failed trajectories are not trained. "
                        "Fix the cause. If it is the policy's reply, return an error message to the policy instead."
                    )
                if trajectory.metrics.get("close_errors"):
                    found.append("`close` failed or took too long.")
            one, other = p.trajectory, p.again
            same = one.turn_rewards == other.turn_rewards and one.messages == other.messages
            if self.seeded and not (same or one.failed or other.failed):
                found.append(
                    f"{p.script}, example {p.row}: two runs with the same seed had different rewards or messages. Use "
                    "the seed of `reset` for all randomness, and share no state between environments."
                )
        return list(dict.fromkeys(found))


def play(
    episode: MultiTurn,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    replies: Sequence[str] = (),
    engine: Engine | None = None,
) -> EnvironmentCheck:
    """Runs each script twice on each example with the same seed, or lets `engine` generate the replies.

    Scripts: a plain reply in every turn; a reply truncated by the token limit; a valid call to each tool (in every turn
    of an environment, in the first turn of a program); and `replies`, one per turn, of which the last is repeated.
    Closes the episode, which must be set up with the tokenizer.
    """
    check = EnvironmentCheck(seeded=isinstance(episode, EnvironmentEpisode) and engine is None)
    end = [end_of_turn(tokenizer)]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    async def played(row: Mapping[str, Any], script: list[list[int]], attempt: int) -> Trajectory:
        turns = itertools.count()

        async def ask(request: GenerationRequest) -> CompletionGroup:
            if engine is not None:
                return await engine.generate(request)
            said = script[min(next(turns), len(script) - 1)][: request.sampling.max_new_tokens]
            text = tokenizer.decode(said, skip_special_tokens=True)
            finish = Completion(said, [0.0] * len(said), text, "stop" if said[-1:] == end else "length")
            finish.support = None if request.trained else Support.whole(len(said))  # as VLLMEngine records it
            return CompletionGroup(request, [finish], 0)

        prompt = Prompts([[]], [""], {name: [value] for name, value in row.items()}, raw=[row.get("prompt", "")])
        longest = 1 << 30 if engine is None else engine.max_model_len
        task = Task(prompt, (attempt,), seed, sampling, tokenizer, max_model_len=longest)
        (trajectory,) = await episode.run(task, ask)
        return trajectory

    async def play_scripts(number: int, row: Mapping[str, Any], scripts: Mapping[str, list[list[int]]]) -> None:
        every = await all_of(played(row, script, attempt) for script in scripts.values() for attempt in range(2))
        for name, one, other in zip(scripts, every[::2], every[1::2], strict=True):
            check.played.append(Played(number, name, one, other))

    async def play_row(number: int, row: Mapping[str, Any]) -> None:
        if engine is not None:
            return await play_scripts(number, row, {"model": []})
        plain = ids("I do not know.")
        scripts = {"plain reply": [plain + end], "truncated": [plain]}  # token IDs by turn; truncated without `end`
        if replies:
            scripts["--replies"] = [ids(text) + end for text in replies]
        await play_scripts(number, row, scripts)
        after = [] if isinstance(episode, EnvironmentEpisode) else [plain + end]
        scripts = {}
        for name, tools in episode.tools_seen.items():
            if text := _call(tokenizer, name, tools, episode.template_kwargs):
                scripts[f"calls {name}"] = [ids(text) + end, *after]
        await play_scripts(number, row, scripts)

    loop = BackgroundLoop("check-env")  # the calling thread may already run a loop, as in a notebook
    try:
        for number, row in enumerate(rows):
            loop.run(play_row(number, row))
    except ValueError as error:
        check.mistakes.append(f"example {number}: {error}")
    finally:
        loop.run(episode.close())
        loop.close()
    return check


def transcript(played: Played, tokenizer: Any) -> list[str]:
    """The messages, tool calls, and trained tokens of a script."""
    t = played.trajectory
    lines = [f"--- {played.script}, example {played.row}"]
    for message in t.messages:
        lines.append(f"{message['role']}: {message.get('content') or ''}")
        for call in message.get("tool_calls") or ():
            lines.append(f"  calls {call['function']['name']}({json.dumps(call['function']['arguments'])})")
    for row in t.rows:
        turns = sorted({turn for turn in row.turn_ids if turn >= 0})
        said = [[i for i, at in zip(row.token_ids, row.turn_ids, strict=True) if at == turn] for turn in turns]
        lines += [f"  trains {len(each)} tokens: {tokenizer.decode(each)!r}" for each in said]
    seconds = t.metrics["environment_seconds"] / max(t.metrics["turns"], 1)
    sequences = f"{len(t.rows)} sequences (the template rewrites earlier turns), " if len(t.rows) > 1 else ""
    return [*lines, f"  reward {played.reward:g}, stop reason {t.stop_reason}, {sequences}{seconds:.3f} s per turn", ""]


def _call(tokenizer: Any, name: str, tools: Tools, variables: Mapping[str, Any]) -> str | None:
    """A tool call as rendered by the chat template; None if it doesn't render one, so that no script calls the tool."""
    parameters = next(t["function"] for t in tools if t["function"]["name"] == name).get("parameters") or {}
    properties = parameters.get("properties") or {}
    types = {key: properties.get(key) or {} for key in parameters.get("required") or ()}
    arguments = {k: t["enum"][0] if "enum" in t else EXAMPLES.get(str(t.get("type")), "a") for k, t in types.items()}
    call = call_message("call00000", name, arguments)
    write = partial(tokenizer.apply_chat_template, tools=list(tools), tokenize=False, **variables)
    asked = [{"role": "user", "content": "Go on."}]
    with suppress(Exception):  # templates may reject tools with any exception
        before = write(asked, add_generation_prompt=True)
        after = write([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        if after.startswith(before) and json.dumps(name)[1:-1] in (text := after[len(before) :]):
            return str(text.split(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))[0])
    return None
