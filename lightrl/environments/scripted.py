"""A dry run of environments and programs, with scripted replies or with a model, and without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightrl.engines.background import BackgroundLoop
from lightrl.engines.base import Engine
from lightrl.environments.base import Tools
from lightrl.environments.episodes import Task
from lightrl.environments.multi_turn import MultiTurn
from lightrl.environments.playing import EnvironmentEpisode
from lightrl.models.turns import end_of_turn
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Prompts, SamplingParams, Trajectory

MOST_TURNS = 1 << 20
SHOWN = 500
"""Maximum number of characters of a message that a transcript shows."""
EXAMPLES = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass
class Played:
    """A script played twice at one row, with one seed."""

    row: int
    script: str
    trajectory: Trajectory
    again: Trajectory

    @property
    def reward(self) -> float:
        """Reward of all turns; NaN for an attempt that failed, or that is left to the reward functions."""
        rewards = self.trajectory.turn_rewards
        return math.nan if self.trajectory.failed or not rewards else math.fsum(rewards)


@dataclass
class EnvironmentCheck:
    """What was played.

    Attributes:
        notes: What could not be tried.
        mistake: What ended the play and would end a run.
        seeded: Whether two plays must be the same, because all that is random comes from a seed.
    """

    played: list[Played] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mistake: str | None = None
    seeded: bool = True

    def problems(self) -> list[str]:
        """What is wrong, with the fix."""
        found = [] if self.mistake is None else [self.mistake]
        for p in self.played:
            for trajectory in (p.trajectory, p.again):
                if trajectory.failed:
                    found.append(
                        f"failed: {trajectory.failure}. Such attempts are never trained on. Fix it, or answer the "
                        "policy in words if its reply is the cause."
                    )
                if trajectory.metrics.get("close_errors"):
                    found.append("`close` failed or took too long.")
            one, other = p.trajectory, p.again
            same = one.turn_rewards == other.turn_rewards and one.messages == other.messages
            if self.seeded and not (same or one.failed or other.failed):
                found.append(
                    f"{p.script} at row {p.row}: played twice with one seed, it had other rewards or messages. Draw "
                    "everything random from `reset`'s seed, and share no state between environments."
                )
        return list(dict.fromkeys(found))

    def lines(self) -> list[str]:
        """The report: a line per script and row."""
        out = [f"{'script':<16}  row  ended by  turns  reward  rows  trained tokens  s/turn"] if self.played else []
        for p in self.played:
            t = p.trajectory
            tokens = f"{len(t.sampled_ids)} of {sum(len(row.token_ids) for row in t.rows)}"
            seconds = t.metrics["environment_seconds"] / max(len(t.turn_rewards), 1)
            out.append(
                f"{p.script:<16}  {p.row:>3}  {t.stop_reason:<8}  {len(t.turn_rewards):>5}  {p.reward:>6.3g}  "
                f"{len(t.rows):>4}  {tokens:>14}  {seconds:>6.3f}"
            )
        if any(len(p.trajectory.rows) > 1 for p in self.played):
            out.append("template: it rewrites earlier turns, so some turns begin a new row (exact, but costs tokens)")
        return out


class _Scripted(Task):
    """Attempts whose requests tell by their seed which turn of which attempt they are."""

    def turn_seed(self, attempt: int, turn: int) -> int:
        return attempt * MOST_TURNS + turn


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
    """Plays each script twice at each row, all with one seed, as the attempts of a group.

    Scripts: a plain reply in every turn; a reply that the token limit cuts; a call of each tool, with arguments that
    fit its schema (in every turn of an environment, in the first turn of a program); a call that breaks off; and
    `replies`.

    Args:
        episode: Episode that is set up with the tokenizer. It is closed at the end.
        rows: Rows of the dataset.
        tokenizer: Tokenizer of the policy.
        sampling: Sampling settings; of scripts, their limits.
        seed: Seed of the groups.
        replies: Texts of one more script, one per turn, the last one repeated.
        engine: Engine that replies instead of scripts.
    """
    check = EnvironmentCheck(seeded=isinstance(episode, EnvironmentEpisode) and engine is None)
    end = [end_of_turn(tokenizer)]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    async def play_scripts(number: int, row: Mapping[str, Any], scripts: Mapping[str, list[list[int]]]) -> None:
        names = [name for name in scripts for _ in range(2)]

        async def ask(request: GenerationRequest) -> CompletionGroup:
            if engine is not None:
                return await engine.generate(request)
            attempt, turn = divmod(request.seed, MOST_TURNS)
            script = scripts[names[attempt]]
            said = script[min(turn, len(script) - 1)][: request.sampling.max_new_tokens]
            text = tokenizer.decode(said, skip_special_tokens=True)
            finish = Completion(said, [0.0] * len(said), text, "stop" if said[-1:] == end else "length")
            return CompletionGroup(request, [finish], 0)

        columns = {name: [value] for name, value in row.items()}
        prompt = Prompts([[]], [""], columns, raw=[row.get("prompt", "")])
        longest = 1 << 30 if engine is None else engine.max_model_len
        task = _Scripted(prompt, tuple(range(len(names))), seed, sampling, tokenizer, max_model_len=longest)
        trajectories = await episode.run(task, ask)
        for name, one, other in zip(scripts, trajectories[::2], trajectories[1::2], strict=True):
            check.played.append(Played(number, name, one, other))

    async def play_row(number: int, row: Mapping[str, Any]) -> None:
        if engine is not None:
            return await play_scripts(number, row, {"model": []})
        plain = ids("I do not know.")
        scripts = {"plain reply": [plain + end], "cut off": [plain]}  # token IDs by turn; without `end` they are cut
        if replies:
            scripts["--replies"] = [ids(text) + end for text in replies]
        await play_scripts(number, row, scripts)
        scripts = {}
        for name, tools in episode.tools_seen.items():
            if (text := _call(tokenizer, name, tools, episode.template_kwargs)) is None:
                check.notes.append("the chat template writes no tool call here; write one with --replies.")
                continue
            after = [] if isinstance(episode, EnvironmentEpisode) else [plain + end]
            scripts[f"calls {name}"] = [ids(text) + end, *after]
            scripts.setdefault("broken call", [ids(text[: len(text) * 2 // 3]) + end])
        await play_scripts(number, row, scripts)

    loop = BackgroundLoop("check-env")  # the calling thread may have a loop that runs, as in a notebook
    try:
        for number, row in enumerate(rows):
            loop.run(play_row(number, row))
    except ValueError as error:
        check.mistake = f"row {number}: {error}"
    finally:
        loop.run(episode.close())
        loop.close()
    if check.played and all(p.reward == 0 for p in check.played):
        fix = (
            "Play a script that earns one with --replies." if engine is None else "It learns from attempts that differ."
        )
        check.notes.append(f"every reward was 0. {fix}")
    check.notes = list(dict.fromkeys(check.notes))
    return check


def transcript(played: Played, tokenizer: Any) -> list[str]:
    """The messages of a script, its calls of tools, and the tokens that would be trained."""
    t = played.trajectory
    lines = [f"--- {played.script}, row {played.row}"]
    for message in t.messages:
        lines.append(f"{message['role']}: {_cut(message.get('content') or '')}")
        for call in message.get("tool_calls") or ():
            lines.append(f"  calls {call['function']['name']}({_cut(json.dumps(call['function']['arguments']))})")
    for row in t.rows:
        turns = sorted({turn for turn in row.turn_ids if turn >= 0})
        said = [[i for i, at in zip(row.token_ids, row.turn_ids, strict=True) if at == turn] for turn in turns]
        lines += [f"  trains {len(each)} tokens: {_cut(repr(tokenizer.decode(each)))}" for each in said]
    return [*lines, f"  reward {played.reward:g}, ended by {t.stop_reason}", ""]


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _call(tokenizer: Any, name: str, tools: Tools, variables: Mapping[str, Any]) -> str | None:
    """A call of a tool, as the chat template writes it; None if it writes none."""
    parameters = next(t["function"] for t in tools if t["function"]["name"] == name).get("parameters") or {}
    properties = parameters.get("properties") or {}
    arguments = {key: _example(properties.get(key) or {}) for key in parameters.get("required") or []}
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
    write = partial(tokenizer.apply_chat_template, tools=list(tools), tokenize=False, **variables)
    asked = [{"role": "user", "content": "Go on."}]
    with suppress(Exception):  # a template may reject tools in its own words
        before = write(asked, add_generation_prompt=True)
        after = write([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        if after.startswith(before) and json.dumps(name)[1:-1] in (text := after[len(before) :]):
            return str(text.split(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))[0])
    return None


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "a")
