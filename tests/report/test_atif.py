"""Trajectories in the Agent Trajectory Interchange Format: what its models demand, and what of a run is in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lightrl.cli.report.atif import write_atif
from lightrl.cli.report.view import view
from tests.report.test_view import record, write


class Strict(BaseModel):
    """Members that the format does not name are errors."""

    model_config = ConfigDict(extra="forbid")


class Source(Strict):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    path: str


class Text(Strict):
    type: Literal["text"]
    text: str


class Picture(Strict):
    type: Literal["image"]
    source: Source


Content = str | list[Annotated[Text | Picture, Field(discriminator="type")]]


class Call(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(Strict):
    source_call_id: str | None = None
    content: Content | None = None


class Observation(Strict):
    results: list[Result]


class Metrics(Strict):
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float] | None = None


class Step(Strict):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = Field(None, ge=0)
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check(self) -> Step:
        if self.source != "agent":
            assert not (self.reasoning_content or self.tool_calls or self.metrics), "only an agent's step has these"
        calls = {call.tool_call_id for call in self.tool_calls or []}
        results = self.observation.results if self.observation else []
        assert {result.source_call_id for result in results} <= {*calls, None}, "results belong to the step's calls"
        return self


class Agent(Strict):
    name: str
    version: str


class Final(Strict):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int = Field(ge=0)


class Trajectory(Strict):
    """What the models of harbor 0.25 (`harbor.models.trajectories`) demand of version 1.7, of the members used here."""

    schema_version: Literal["ATIF-v1.7"]
    session_id: str | None = None
    trajectory_id: str
    agent: Agent
    steps: list[Step] = Field(min_length=1)
    final_metrics: Final | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[Trajectory] | None = None

    @model_validator(mode="after")
    def check(self) -> Trajectory:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        names = [part.trajectory_id for part in self.subagent_trajectories or []]
        assert len(names) == len(set(names))
        return self


def exported(folder: Path, records: list[dict[str, Any]]) -> list[Trajectory]:
    view(write(folder / "run", records), atif=folder / "atif")
    files = sorted((folder / "atif").iterdir())
    assert len(files) == len(records)
    for file in files:
        _as_harbor_reads(file)
    return [Trajectory.model_validate_json(file.read_text()) for file in files]


def _as_harbor_reads(file: Path) -> None:
    """The package's own models too, where it is installed (it needs Python 3.12)."""
    try:
        from harbor.models.trajectories import Trajectory as Theirs  # type: ignore[import-not-found]
    except ImportError:
        return
    Theirs.model_validate_json(file.read_text())


def conversation(texts: list[str], turns: list[int], start: int = 0) -> dict[str, Any]:
    """A row of texts, a token each two characters, numbered from `start`; -1 is context."""
    tokens, of = [], []
    for text, turn in zip(texts, turns, strict=True):
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        tokens += pieces
        of += [turn] * len(pieces)
    logprobs = [-0.5 if turn >= 0 else 0.0 for turn in of]
    return {
        "token_ids": list(range(start, start + len(tokens))), "tokens": tokens, "turns": of,
        "policy_versions": [3 if turn >= 0 else -1 for turn in of], "engine_logprobs": logprobs,
    }  # fmt: skip


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call{number}", "function": {"name": name, "arguments": arguments}}


def test_turns_are_the_agents_steps_with_the_ids_that_were_sampled(tmp_path: Path) -> None:
    """Thoughts, two calls and their results, a malformed call that is not trained, an example that nobody sampled."""
    row = conversation(
        ["<user>task", "hm <call>add</call><call>add</call>", "<tool>3<tool>4", "{oops", "<user>no", "done"],
        [-1, 0, -1, -1, -1, 2],
    )
    said = [
        {"role": "system", "content": "rules"}, {"role": "user", "content": "example"},
        {"role": "assistant", "content": "like this"}, {"role": "user", "content": "task"},
        {"role": "assistant", "content": "", "reasoning_content": "hm",
         "tool_calls": [call("add", 1, a=1), call("add", 2, a=float("nan"))]},
        {"role": "tool", "tool_call_id": "call1", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "call2", "name": "add", "content": [{"type": "image", "image": "<Image>"}]},
        {"role": "assistant", "content": "{oops"}, {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    one = {**record(0, 0, random.Random(0)), "messages": said, "rows": [row], "media": {"images": ["media/a.png"]}}
    one["turns"] = [
        {"turn": turn, "rewards": {"environment": 0.5}, "advantage": 1.0, "tokens": 2, "state": "s"} for turn in (0, 2)
    ]
    place = tmp_path / "run" / "rollouts" / "rollout=000010" / "media"
    place.mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(place / "a.png")
    (made,) = exported(tmp_path, [one])
    assert [step.source for step in made.steps] == ["system", "user", "agent", "user", "agent", "agent", "agent"]
    example, first, malformed, last = (made.steps[i] for i in (2, 4, 5, 6))
    assert example.metrics is None and malformed.metrics is None, "not sampled, and not trained"
    assert first.reasoning_content == "hm" and first.tool_calls and first.tool_calls[1].arguments == {"a": None}
    assert first.observation is not None and first.observation.results[0].content == "3"
    content = first.observation.results[1].content
    assert isinstance(content, list) and len(content) == 1
    shown = content[0]
    assert isinstance(shown, Picture) and (tmp_path / "atif" / shown.source.path).resolve() == place / "a.png"
    assert malformed.observation == Observation(results=[Result(content="no")]), "of no call"
    for step, turn in ((first, 0), (last, 2)):
        where = [i for i, t in enumerate(row["turns"]) if t == turn]
        assert step.metrics is not None and step.extra is not None
        assert step.metrics.completion_token_ids == [row["token_ids"][i] for i in where]
        assert step.metrics.prompt_token_ids == row["token_ids"][: where[0]]
        assert step.metrics.logprobs == [-0.5] * len(where) and step.extra["policy_versions"] == [3] * len(where)
        assert step.extra["rewards"] == {"environment": 0.5} and step.extra["turn"] == turn
    assert made.final_metrics == Final(total_prompt_tokens=5 + 37, total_completion_tokens=18 + 2, total_steps=7)
    assert made.session_id == "run" and made.extra is not None and made.extra["reward"] == one["reward"]
    assert made.extra["stop_reason"] == "stop" and made.subagent_trajectories is None


def test_turns_of_other_conversations_are_embedded_and_none_is_lost(tmp_path: Path) -> None:
    """A program's sub-agent and a compaction: rows beside the one that its last turn is in."""
    rows = [
        conversation(["<u>task", "one"], [-1, 0]),
        conversation(["<u>sub-task", "two", "<u>more", "three"], [-1, 1, -1, 2], start=100),
        conversation(["<u>summary: one", "four", "<u>go on", "five"], [-1, 3, -1, 4], start=200),
    ]
    said = [
        {"role": role, "content": text}
        for role, text in (("user", "summary: one"), ("assistant", "four"), ("user", "go on"), ("assistant", "five"))
    ]
    (made,) = exported(tmp_path, [{**record(0, 0, random.Random(0)), "messages": said, "rows": rows, "turns": []}])
    parts = [made, *(made.subagent_trajectories or [])]
    turns = [[step.extra["turn"] for step in part.steps if step.extra and step.metrics] for part in parts]
    assert turns == [[3, 4], [0], [1, 2]]
    assert [(step.source, step.message) for step in parts[2].steps] == [
        ("user", "<u>sub-task"), ("agent", "two"), ("user", "<u>more"), ("agent", "three"),
    ]  # fmt: skip
    ids = [i for part in parts for step in part.steps if step.metrics for i in step.metrics.completion_token_ids]
    trained = [i for row in rows for i, turn in zip(row["token_ids"], row["turns"], strict=True) if turn >= 0]
    assert sorted(ids) == trained, "each token that is trained is in one step"


def test_a_completion_of_one_turn_is_two_steps(tmp_path: Path) -> None:
    rows = [conversation(["2+2=", "4"], [-1, 0])]
    one = {**record(0, 0, random.Random(0)), "messages": [], "rows": rows, "prompt": "2+2=", "completion": "4"}
    (made,) = exported(tmp_path, [{**one, "turns": [], "columns": {"answer": float("inf")}}])
    assert [(step.source, step.message) for step in made.steps] == [("user", "2+2="), ("agent", "4")]
    assert made.steps[1].metrics is not None and made.steps[1].metrics.completion_token_ids == [2]
    assert made.extra is not None and made.extra["columns"] == {"answer": None}, "JSON has no infinity"


def test_no_path_leads_out_of_the_folder_of_the_record(tmp_path: Path) -> None:
    """A place stays a place: the picture behind those that are left out is still the right one."""
    names = ["../../../secret.png", str(tmp_path / "secret.png"), "media/link.png", "media/a.png", "media/gone.png"]
    said = [{"role": "user", "content": [{"type": "image"}] * len(names)}, {"role": "assistant", "content": "ok"}]
    one = {**record(0, 0, random.Random(0)), "messages": said, "media": {"images": names}}
    place = tmp_path / "run" / "rollouts" / "rollout=000010" / "media"
    place.mkdir(parents=True)
    for path in (place / "a.png", tmp_path / "secret.png"):
        Image.new("RGB", (4, 4)).save(path)
    (place / "link.png").symlink_to(tmp_path / "secret.png")
    (made,) = exported(tmp_path, [one])
    content = made.steps[0].message
    assert isinstance(content, list) and len(content) == len(names)
    (shown,) = (part for part in content if isinstance(part, Picture))
    assert content[3] is shown and (tmp_path / "atif" / shown.source.path).resolve() == place / "a.png"
    assert "secret" not in made.model_dump_json()


def test_no_file_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    found = {"rank": "../../elsewhere", "rows": [], "folder": tmp_path, "place": "line 1"}
    with pytest.raises(ValueError):
        write_atif([found], tmp_path / "atif", "run")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
