"""The agent examples: the task, careless demonstrations, both runs briefly, and that the native one learns (long)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.agent.make_model import make_model
from examples.agent.task import Demonstrations, Questions
from examples.agent.tools import Calculator
from examples.endpoint import agent
from lightrl.cli.report.read import read_run
from lightrl.environments import ToolEnvironment
from lightrl.environments.parsing import choose_parser
from lightrl.models.packing.streams import make_stream
from tests.toys import run_example


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent") / "start"
    make_model(folder)
    return folder


def test_answers_are_right_and_held_out_questions_are_held_out() -> None:
    rows = {split: Questions(split)() for split in ("train", "eval")}
    for row in [*rows["eval"], *rows["train"].select(range(500))]:
        assert eval(row["prompt"]) == int(row["answer"]) >= 0
    assert len(rows["eval"]) == 256 and not set(rows["eval"]["prompt"]) & set(rows["train"]["prompt"])
    shown = Demonstrations(size=300)()["prompt"]
    asked = {text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for text in shown}
    assert asked <= set(rows["train"]["prompt"])


def test_demonstrated_calls_are_read_as_calls(start: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)
    tools = ToolEnvironment(Calculator).tools
    parser = choose_parser(tokenizer, renderer=None, tool_parser=None, reasoning_parser=None, tools=True)
    kinds: Counter[str] = Counter()
    for row in Demonstrations(size=60)():
        ids = tokenizer(row["completion"] + "<|im_end|>")["input_ids"]
        reply = parser.parse([], ids, tools)
        assert not reply.errors and bool(reply.tool_calls) == ("tool_call" in row["completion"])
        kinds.update(call.name for call in reply.tool_calls)
        assert tokenizer.decode(tokenizer(row["prompt"])["input_ids"]) == row["prompt"]
        assert len(ids) <= 24  # sampling.max_new_tokens
    assert set(kinds) == {"add", "subtract"}


def test_the_program_asks_with_the_same_tools() -> None:
    """So that both examples begin with the same prompts."""
    native = {tool["function"]["name"]: tool["function"] for tool in ToolEnvironment(Calculator).tools}
    assert all(tool.pop("return") == {"type": "string"} for tool in native.values())  # OpenAI's schemas have none
    assert {tool["function"]["name"]: tool["function"] for tool in agent.TOOLS} == native


def step(config: str, folder: Path, name: str, actor: Path, *extra: str) -> dict[str, list[float]]:
    """One command of the examples; what its CSV logger wrote, metric -> values."""
    run_example(config, folder / name, f"--model.init_args.actor.path={actor}", *extra)
    return {metric: [*values.values()] for metric, values in read_run(folder / name).metrics.items()}


FEW = [
    *("--trainer.max_epochs=1", "--trainer.limit_val_batches=1", "--data.init_args.evaluation.batch_size=4"),
    *("--data.init_args.engine=TransformersEngine", "--data.init_args.rollouts_per_epoch=1"),
    *("--data.init_args.prompts_per_rollout=2", "--data.init_args.group_size=2"),
    "--model.init_args.extra_losses.entropy_coef=0.01",  # rows without an advantage are run, too
]


@pytest.mark.slow
def test_the_examples_briefly(start: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    size = "--data.init_args.train.rows.init_args.size=100"
    step("agent/sft", tmp_path, "sft", start, "--trainer.max_steps=2", size)
    model = tmp_path / "sft" / "model"
    streams: list[Any] = []

    def kept(*masks: Any, **settings: Any) -> Any:
        streams.append(make_stream(*masks, **settings))
        return streams[-1]

    monkeypatch.setattr("lightrl.models.policy.make_stream", kept)
    for name in ("agent/grpo", "endpoint/grpo", "endpoint/forks"):
        streams.clear()
        metrics = step(name, tmp_path, name, model, *FEW)
        assert metrics["reward/scored_fraction"] == [1.0]
        assert (tmp_path / name / "model" / "model.safetensors").is_file()
    assert metrics["rollout/forks"] == [1.0]
    # The update computes each of the two questions once, and of each of the four attempts the turns before its fork;
    # an attempt whose branches happen to say the same has none.
    parents = max(streams, key=lambda stream: stream.num_tokens).parents
    roots = {node for node, parent in enumerate(parents) if parent < 0}
    forks = set(parents) - roots - {-1}
    unforked = [node for node, parent in enumerate(parents) if parent in roots and node not in parents]
    assert len(roots) <= 2 and forks and len(forks) + len(unforked) >= 4
    assert "factory: examples.agent.tools.Calculator" in (tmp_path / "agent" / "grpo" / "config.yaml").read_text()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(3000)
def test_the_policy_learns(start: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 25 points on held-out questions over the warm start."""
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    step("agent/sft", tmp_path, "sft", start)
    right = step("agent/grpo", tmp_path, "grpo", tmp_path / "sft" / "model")["eval/reward/ExactAnswer"]
    assert right[-1] >= right[0] + 0.25
