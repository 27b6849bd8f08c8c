"""`lightrl check-env`: environments that are right, and each kind of wrong."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.cli import main
from lightrl.environments import AgentProgram, Environment, EnvironmentEpisode, Reply, Step, ToolEnvironment
from lightrl.environments.scripted import EnvironmentCheck, play, transcript
from lightrl.records import SamplingParams
from tests.environments import plain_program, programs
from tests.environments.families import FAMILIES, make_tokenizer
from tests.rollout.tasks import chat_model
from tests.toys import write_run
from tests.waiting import until


class Adder:
    """Rewards an attempt that called the tool."""

    def reset(self, **row: Any) -> None:
        self.called = 0

    def add(self, a: int, b: int) -> str:
        """
        Adds.

        Args:
            a: one
            b: two
        """
        self.called += 1
        return str(a + b)

    def get_reward(self) -> float:
        return 1.0 if self.called else 0.0


class Says(Environment):
    """Ends after a reply with the reward that `rewards` gives next: whatever the seed, where it is shared."""

    shared = itertools.count()

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, reply: Reply) -> Step:
        return Step(done=True, reward=self.reward(reply))

    def reward(self, reply: Reply) -> float:
        return 1.0 if reply.content == "yes" else 0.0


class Lucky(Says):
    def reward(self, reply: Reply) -> float:
        return float(next(self.shared))


class Broken(Says):
    def reward(self, reply: Reply) -> float:
        raise KeyError("weather")


class NotFinite(Says):
    def reward(self, reply: Reply) -> float:
        return float("nan")


def check(environment: Any, family: str = "qwen2.5", **kwargs: Any) -> EnvironmentCheck:
    tokenizer = make_tokenizer(FAMILIES[family])
    attempts = EnvironmentEpisode(environment, max_turns=3)
    attempts.setup(tokenizer)
    rows = [{"prompt": "add 1 and 2"}, {"prompt": "add 2 and 3"}]
    return play(attempts, rows, tokenizer, SamplingParams(max_new_tokens=200), **kwargs)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_a_tool_environment_is_called_by_its_template(family: str) -> None:
    found = check(lambda: ToolEnvironment(Adder), family)
    assert found.problems() == []
    of = {p.script: p for p in found.played if p.row == 1}
    assert set(of) == {"plain reply", "truncated", "calls add"}
    assert of["plain reply"].reward == 0.0 and of["plain reply"].trajectory.stop_reason == "stop"
    assert of["truncated"].trajectory.stop_reason == "length"
    called = of["calls add"].trajectory
    assert called.stop_reason == "turns" and called.metrics["tool_calls"] == 3 and of["calls add"].reward == 1.0
    assert sum(m["role"] == "tool" and m["content"] == "2" for m in called.messages) == 2
    text = "\n".join(transcript(of["calls add"], make_tokenizer(FAMILIES[family])))
    assert "calls add" in text and ("sequences" in text) == (family == "qwen3")


def test_replies_of_ones_own_are_played() -> None:
    found = check(Says, replies=["yes"])
    assert {p.reward for p in found.played if p.script == "--replies"} == {1.0}
    assert found.problems() == []


def test_luck_outside_the_seed_is_found() -> None:
    assert any("two runs with the same seed" in text for text in check(Lucky).problems())


def test_failures_and_rewards_that_are_none_are_found() -> None:
    assert "failed: KeyError: 'weather'" in check(Broken).problems()[0]
    assert any("example 0: environment NotFinite: `step` returned" in text for text in check(NotFinite).problems())


def test_a_program_is_played_with_scripts_and_its_calls() -> None:
    pytest.importorskip("vllm")
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])

    def played(run: Any, **kwargs: Any) -> EnvironmentCheck:
        program = AgentProgram(run, max_turns=3, max_retries=0)
        program.setup(tokenizer)
        return play(program, [{}], tokenizer, SamplingParams(max_new_tokens=200), **kwargs)

    found = played(programs.chat, replies=["3"])
    assert found.problems() == []
    of = {p.script: p for p in found.played}
    assert set(of) == {"plain reply", "truncated", "--replies", "calls add"}
    assert of["--replies"].reward == 1.0 and of["calls add"].trajectory.metrics["tool_calls"] == 1
    text = "\n".join(transcript(of["calls add"], tokenizer))
    assert 'calls add({"a": 1, "b": 1})' in text and "tool: 2" in text and "trains 15 tokens: 'I do not know." in text

    shared: list[Any] = []

    def mixes(row: Any, base_url: str, api_key: str) -> float:  # keys of others
        shared.append(api_key)
        until(lambda: len(shared) > 1)
        plain_program.once({}, base_url, shared[-1])
        return 1.0

    assert any("Create the client in" in text for text in played(mixes).problems())
    assert any("sent no request" in text for text in played(lambda row, base_url, api_key: 1.0).problems())


def test_a_program_is_played_with_the_model_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "Says")
    config = yaml.safe_load(Path(path).read_text())
    run = {"run": f"{plain_program.__file__}:once", "max_retries": 0}
    config["data"]["init_args"]["episode"] = {"class_path": "AgentProgram", "init_args": run}
    config["data"]["init_args"]["sampling"] = {"max_new_tokens": 5}
    Path(path).write_text(yaml.safe_dump(config))
    main(["check-env", path, "--rows", "1", "--model", str(tmp_path / "model")])
    out = capsys.readouterr().out
    assert "--- model, example 0" in out and "trains 5 tokens" in out and "reward 0.5" in out


def test_the_command_reads_the_class_from_a_configuration_and_leaves_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    path = written(tmp_path, "Says", run_dir="outputs/run")
    before = {str(file) for file in tmp_path.rglob("*")}
    main(["check-env", "--config", path, "--rows", "1"])
    out = capsys.readouterr().out
    assert "plain reply" in out and "No problems found." in out
    assert {str(file) for file in tmp_path.rglob("*")} == before


def written(tmp_path: Path, environment: str, **arguments: Any) -> str:
    if not (tmp_path / "model").exists():
        chat_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "add 1 and 2"}) + "\n")
    played = {"environment": {"class_path": f"{__name__}.{environment}"}, "max_turns": 2}
    episode = {"class_path": "EnvironmentEpisode", "init_args": played}
    data = {"prompts": {"path": str(tmp_path / "rows.jsonl")}, "episode": episode, "rewards": []}
    data |= {"sampling": {"max_new_tokens": 200}}
    trainer = {"logger": bool(arguments)}
    return write_run(tmp_path / "run.yaml", str(tmp_path / "model"), trainer=trainer, data=data, **arguments)


def test_the_command_fails_where_problems_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check-env", written(tmp_path, "Broken")])
    assert stop.value.code == 1 and "problem: failed: KeyError: 'weather'" in capsys.readouterr().out
