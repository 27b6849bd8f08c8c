"""Plays an environment with scripted replies and no model, and says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightrl.engines.background import BackgroundLoop
from lightrl.environments import Environment, EnvironmentEpisode, Task
from lightrl.models.turns import end_of_turn
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Prompts, SamplingParams, Trajectory

PLAIN = "I do not know."
MOST_TURNS = 1 << 20
EXAMPLES = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass
class Played:
    """One script played at one row.

    Attributes:
        row: number of the row. script: its name. repeat: whether the same script was played there before.
        trajectory: the attempt.
    """

    row: int
    script: str
    repeat: bool
    trajectory: Trajectory

    @property
    def reward(self) -> float:
        """Of all turns; NaN for one that failed."""
        failed = self.trajectory.failed
        return math.nan if failed else math.fsum(self.trajectory.turn_rewards)


@dataclass
class EnvironmentCheck:
    """What was played, and what to say of it.

    Attributes:
        played: in the order of rows and scripts.
        notes: what could not be tried.
        reward_functions: whether the run has some beside the environment.
        mistake: what would end a run at once (a step or reward that is none), and ended the play; None where nothing.
    """

    played: list[Played]
    notes: list[str] = field(default_factory=list)
    reward_functions: bool = False
    mistake: str | None = None

    def problems(self) -> list[str]:
        """What is wrong, each with what to do; empty where nothing is."""
        found = [] if self.mistake is None else [self.mistake]
        failures = {p.trajectory.failure for p in self.played if p.trajectory.failed}
        for cause in sorted(map(str, failures)):
            found.append(
                f"failed: {cause}. Such attempts are never trained on. Correct it, or answer the policy in words where "
                "its reply is the cause."
            )
        first: dict[tuple[int, str], Played] = {}
        for p in self.played:
            before = first.setdefault((p.row, p.script), p)
            if not _same(before, p):
                found.append(
                    f"{p.script} at row {p.row}, played twice with one seed: rewards {before.reward:g} and "
                    f"{p.reward:g}, or other answers. Draw everything random from `reset`'s seed, and share no state "
                    "between environments; otherwise luck is trained on."
                )
                break
        unclosed = sum(p.trajectory.metrics.get("close_errors", 0.0) > 0 for p in self.played)
        if unclosed:
            found.append(f"`close` failed or took too long in {unclosed} of {len(self.played)} attempts.")
        rewards = {p.reward for p in self.played if math.isfinite(p.reward)}
        if rewards == {0.0} and not self.reward_functions:
            self.notes.append(
                "every reward was 0: no script earned any. Play one that should with --replies, to see a reward."
            )
        return list(dict.fromkeys(found))

    def lines(self) -> list[str]:
        """The report: a line per script, then totals; nothing where a mistake ended the play before the first."""
        if not self.played:
            return []
        width = max(len(p.script) for p in self.played)
        out = [f"{'script':<{width}}  row  ended by  turns  reward  rows  trained tokens  s/step"]
        for p in self.played:
            if p.repeat:
                continue
            t = p.trajectory
            sampled, total = len(t.sampled_ids), sum(len(row.token_ids) for row in t.rows)
            out.append(
                f"{p.script:<{width}}  {p.row:>3}  {t.stop_reason:<8}  {len(t.turn_rewards):>5}  {p.reward:>6.3g}  "
                f"{len(t.rows):>4}  {f'{sampled} of {total}':>14}  {_seconds(t):>6.3f}"
            )
        rewards = [p.reward for p in self.played if math.isfinite(p.reward)]
        turns = sum(len(p.trajectory.turn_rewards) for p in self.played)
        forks = int(sum(p.trajectory.metrics.get("forks", 0.0) for p in self.played))
        if rewards:
            out.append(f"rewards: {min(rewards):g} to {max(rewards):g}")
        proof = "every turn extends the last one's tokens"
        if forks:
            proof = (
                f"{forks} of {turns} turns began a new row, because the chat template rewrites what came before "
                "(correct, and costs tokens)"
            )
        out.append(f"template: {proof}")
        return out


def _same(one: Played, other: Played) -> bool:
    failed = one.trajectory.failed or other.trajectory.failed
    rewards = one.trajectory.turn_rewards, other.trajectory.turn_rewards
    return failed or (rewards[0] == rewards[1] and one.trajectory.messages == other.trajectory.messages)


def _seconds(trajectory: Trajectory) -> float:
    return trajectory.metrics.get("environment_seconds", 0.0) / max(len(trajectory.turn_rewards), 1)


def play(
    episode: EnvironmentEpisode,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    replies: Sequence[str] = (),
    reward_functions: bool = False,
) -> EnvironmentCheck:
    """Plays each script twice at each row, all with one seed, as the attempts of a group.

    The scripts: a plain answer in every turn; a call of each tool, with arguments that fit its schema; a call that
    breaks off; a reply that the token limit cuts; and `replies`.

    Args:
        episode: set up with the tokenizer. rows: of the data set.
        tokenizer: of the policy. sampling: its limits.
        seed: of the groups. replies: texts of a further script, one per turn, the last one again and again.
        reward_functions: whether the run has some, so that the environment need not give rewards.
    """
    check = EnvironmentCheck([], reward_functions=reward_functions)
    loop = BackgroundLoop("check-env")  # in a notebook the calling thread has one that runs already
    try:
        for number, row in enumerate(rows):
            scripts = loop.run(_scripts(episode, row, tokenizer, seed, replies, check.notes))
            try:
                check.played += loop.run(_play(episode, number, row, scripts, tokenizer, sampling, seed))
            except ValueError as error:
                check.mistake = f"row {number}: {error}"
                break
    finally:
        loop.close()
    check.notes = list(dict.fromkeys(check.notes))
    return check


class _Scripted(Task):
    """Attempts whose requests tell by their seed which turn of which attempt they are."""

    def turn_seed(self, attempt: int, turn: int) -> int:
        return attempt * MOST_TURNS + turn


async def _play(
    episode: EnvironmentEpisode,
    number: int,
    row: Mapping[str, Any],
    scripts: dict[str, list[_Reply]],
    tokenizer: Any,
    sampling: SamplingParams,
    seed: int,
) -> list[Played]:
    """Each script twice at one row."""
    names = [name for name in scripts for _ in range(2)]

    async def ask(request: GenerationRequest) -> CompletionGroup:
        attempt, turn = divmod(request.seed, MOST_TURNS)
        script = scripts[names[attempt]]
        reply = script[min(turn, len(script) - 1)]
        ids = reply.ids[: request.sampling.max_new_tokens]
        cut = reply.cut or len(ids) < len(reply.ids)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        done = Completion(ids, [0.0] * len(ids), text, "length" if cut else "stop")
        return CompletionGroup(request, [done], 0)

    columns = {name: [value] for name, value in row.items()}
    prompt = Prompts([[]], [""], columns, raw=[row.get("prompt", "")])
    task = _Scripted(prompt, tuple(range(len(names))), seed, sampling, tokenizer, max_model_len=1 << 30)
    trajectories = await episode.run(task, ask)
    return [
        Played(number, name, i % 2 == 1, trajectory)
        for i, (name, trajectory) in enumerate(zip(names, trajectories, strict=True))
    ]


@dataclass
class _Reply:
    """Sampled ids, and whether a limit cut them."""

    ids: list[int]
    cut: bool = False


async def _scripts(
    episode: EnvironmentEpisode,
    row: Mapping[str, Any],
    tokenizer: Any,
    seed: int,
    replies: Sequence[str],
    notes: list[str],
) -> dict[str, list[_Reply]]:
    """Name -> replies by turn, for the tools that the environment has at this row."""
    end = [end_of_turn(tokenizer)]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    plain = ids(PLAIN)
    scripts = {"plain answer": [_Reply(plain + end)], "cut off": [_Reply(plain, cut=True)]}
    if replies:
        scripts["--replies"] = [_Reply(ids(text) + end) for text in replies]
    environment: Environment | None = None
    try:
        environment = episode.environment()
        messages = await asyncio.wait_for(environment.reset(row, seed=seed), episode.environment_timeout)
        tools = list(environment.tools)
    except Exception:  # playing it says so
        return scripts
    finally:
        if environment is not None:
            with suppress(Exception):  # as above
                await asyncio.wait_for(environment.close(), episode.environment_timeout)
    for tool in tools:
        function = tool.get("function", tool)
        name = function["name"]
        text = _call_text(tokenizer, messages, tools, name, _arguments(function), episode.template_kwargs)
        if text is None:
            notes.append(
                "the chat template gives no text for a tool call after this prompt; calls were not played. Write one "
                "with --replies."
            )
            break
        scripts[f"calls {name}"] = [_Reply(ids(text) + end)]
        scripts.setdefault("broken call", [_Reply(ids(text[: len(text) * 2 // 3]) + end)])
    return scripts


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that fit a tool's schema: the required ones."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {name: _example(properties.get(name) or {}) for name in parameters.get("required") or []}


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "a")


def _call_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    name: str,
    arguments: dict[str, Any],
    options: Mapping[str, Any],
) -> str | None:
    """What a policy would write to call a tool, by the chat template; None where it cannot be told."""
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        after = tokenizer.apply_chat_template([*messages, said], tools=tools, tokenize=False, **options)
    except Exception:  # a template may refuse tools, or anything else, in its own words
        return None
    if not after.startswith(before) or json.dumps(name)[1:-1] not in after[len(before) :]:
        return None
    text: str = after[len(before) :]
    return text.split(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))[0]
