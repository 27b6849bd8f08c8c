"""Saved trajectories in the Agent Trajectory Interchange Format (ATIF), which other tools read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightrl import __version__
from lightrl.cli.report.read import is_file_inside

SCHEMA = "ATIF-v1.7"
SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}  # all others are the user's

Steps = list[dict[str, Any]]


class Turn(NamedTuple):
    """A trained turn: its tokens' place and text."""

    row: int
    start: int
    end: int
    text: str


def write_atif(records: Sequence[dict[str, Any]], folder: Path, session: str) -> list[Path]:
    """Writes a file for each trajectory: its conversation as steps, and per turn the sampled ids and their log-probs.

    A turn that is in the conversation is its agent step. Turns of other conversations (a sub-agent's, or from before a
    compaction) are in an embedded trajectory per row, with the row's text as steps. Rewards, advantages, policy
    versions, and the reason of the end are in `extra`, since the format has no field for them.

    Args:
        records: Of `RolloutWriter`, each with the `folder` that it was read from.
        folder: Where to write.
        session: Name of the run.

    Source: RFC 0001 of https://github.com/laude-institute/harbor, version 1.7.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for record in records:
        places = [f"{key}{int(record.get(key) or 0)}" for key in ("rank", "group", "trajectory")]
        name = "-".join([f"rollout{int(record.get('rollout') or 0):06d}", *places])
        agent = {"name": "lightrl", "version": __version__}
        made = {**_trajectory(record, folder, name, agent), "session_id": session}
        text = json.dumps(made, ensure_ascii=False, allow_nan=False)
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(text.encode("utf-8", "replace").decode("utf-8"), encoding="utf-8")
    return paths


def _trajectory(record: dict[str, Any], folder: Path, name: str, agent: dict[str, str]) -> dict[str, Any]:
    turns = {turn: found for r, row in enumerate(record["rows"]) for turn, found in _turns(r, row)}
    pictures = iter(_pictures(record, folder))
    messages = record.get("messages") or _single(record)
    steps: Steps = []
    for message, turn in zip(messages, _turn_of_each(messages, turns), strict=True):
        _add(steps, message, pictures)
        if turn is not None:
            steps[-1] |= _sampled(record, turn, turns.pop(turn))
    start: dict[str, Any] = {"schema_version": SCHEMA, "agent": agent}
    parts: Steps = []
    for r in sorted({found.row for found in turns.values()}):
        rest = {turn: found for turn, found in turns.items() if found.row == r}
        parts.append({**start, "trajectory_id": f"{name}-row{r}", "steps": _numbered(_row_steps(record, rest))})
    metrics = [step["metrics"] for part in [{"steps": steps}, *parts] for step in part["steps"] if "metrics" in step]
    kept = ("rollout", "rank", "group", "trajectory", "policy_version", "reward", "reward_parts", "stop_reason")
    return {
        **start,
        "trajectory_id": name,
        "steps": _numbered(steps),
        "final_metrics": {
            "total_prompt_tokens": sum(metric["prompt_tokens"] for metric in metrics),
            "total_completion_tokens": sum(metric["completion_tokens"] for metric in metrics),
            "total_steps": len(steps),
        },
        "extra": {key: record[key] for key in (*kept, "trained", "columns") if key in record},
        **({"subagent_trajectories": parts} if parts else {}),
    }


def _numbered(steps: Steps) -> Steps:
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _turns(r: int, row: dict[str, Any]) -> Iterator[tuple[int, Turn]]:
    """The turns that are trained in a row."""
    begins = {turn: t for t, turn in reversed(list(enumerate(row["turns"]))) if turn >= 0}
    for turn, start in begins.items():
        end = start + row["turns"].count(turn)
        yield turn, Turn(r, start, end, "".join(row["tokens"][start:end]) if "tokens" in row else "")


def _turn_of_each(messages: Sequence[dict[str, Any]], turns: dict[int, Turn]) -> list[int | None]:
    """The turn of each message, from the last one on: an earlier turn, of the same row if possible.

    An assistant's message that is in no turn's text was not sampled: it came with the task or the program.
    """
    of: list[int | None] = [None] * len(messages)
    last = max(turns, default=-1)
    row = turns[last].row if turns else 0
    left = set(turns)
    for i, message in reversed(list(enumerate(messages))):
        if message.get("role") != "assistant":
            continue
        earlier = sorted((turn for turn in left if turn <= last), key=lambda turn: (turns[turn].row != row, -turn))
        found = next((turn for turn in earlier if _says(turns[turn].text, message)), None)
        if found is not None:
            of[i], last, row = found, found, turns[found].row
            left.discard(found)
    return of


def _says(text: str, message: dict[str, Any]) -> bool:
    """Whether the text of a turn, if it is known, is this message."""
    content = message.get("content")
    words = [content.strip()] if isinstance(content, str) else []
    words += [call["function"]["name"] for call in message.get("tool_calls") or []]
    return not text or all(word in text for word in words)


def _single(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A completion of one turn as a conversation, whose prompt is the text that the engine saw."""
    content = [{"type": "image"} for _ in (record.get("media") or {}).get("images", [])]
    text = record.get("prompt", "")
    prompt = [*content, {"type": "text", "text": text}] if content else text
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": record.get("completion", "")}]


def _add(steps: Steps, message: dict[str, Any], pictures: Iterator[str | None]) -> None:
    """Adds a message as a step; a tool's result belongs to the step of its call."""
    role, content = message.get("role"), _content(message.get("content"), pictures)
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", [])}
        called = message.get("tool_call_id")
        result = {"source_call_id": called} if called in known else {}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result | {"content": content})
        return
    step: dict[str, Any] = {"source": SOURCES.get(str(role), "user"), "message": content}
    if step["source"] == "agent":
        if message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            step["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    elif role not in ("system", "user"):
        step["extra"] = {"role": role}
    steps.append(step)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {"tool_call_id": str(call.get("id", "")), "function_name": call["function"]["name"], "arguments": arguments}


def _content(content: Any, pictures: Iterator[str | None]) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for block in content:
        path = next(pictures, None) if block.get("type") == "image" else None
        if path is not None:
            parts.append({"type": "image", "source": {"media_type": "image/png", "path": path}})
        else:
            parts.append({"type": "text", "text": str(block.get("text", f"[{block.get('type')}]"))})
    return parts


def _pictures(record: dict[str, Any], folder: Path) -> list[str | None]:
    """Paths of the images relative to the written folder; None for what is not a file in the record's folder."""
    images = [Path(record["folder"]) / name for name in (record.get("media") or {}).get("images", [])]
    return [os.path.relpath(path, folder) if is_file_inside(path, record["folder"]) else None for path in images]


def _sampled(record: dict[str, Any], turn: int, found: Turn) -> dict[str, Any]:
    """What is known of a turn in addition to its text."""
    row, place = record["rows"][found.row], slice(found.start, found.end)
    metrics: dict[str, Any] = {
        "prompt_tokens": found.start,
        "completion_tokens": found.end - found.start,
        "prompt_token_ids": row["token_ids"][: found.start],
        "completion_token_ids": row["token_ids"][place],
    }
    logprobs = row.get("engine_logprobs", [])[place]
    if logprobs and None not in logprobs:
        metrics["logprobs"] = logprobs
    of_turn: dict[str, Any] = next((one for one in record.get("turns", []) if one["turn"] == turn), {})
    extra: dict[str, Any] = {key: of_turn[key] for key in ("rewards", "advantage", "state") if key in of_turn}
    extra |= {"turn": turn, "policy_versions": row.get("policy_versions", [])[place]}
    return {"metrics": metrics, "llm_call_count": 1, "extra": extra}


def _row_steps(record: dict[str, Any], turns: dict[int, Turn]) -> Steps:
    """A row's text from turn to turn."""
    steps: Steps = []
    at = 0
    for turn, found in sorted(turns.items(), key=lambda pair: pair[1].start):
        row = record["rows"][found.row]
        steps.append({"source": "user", "message": "".join(row.get("tokens", [])[at : found.start])})
        steps.append({"source": "agent", "message": found.text, **_sampled(record, turn, found)})
        at = found.end
    return steps
