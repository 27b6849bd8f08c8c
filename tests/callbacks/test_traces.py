"""Sampled trajectories in the trace views of MLflow, trackio (the real packages, offline), and Weave (a double)."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightrl.callbacks.completion_logger import CompletionLogger
from lightrl.callbacks.traces import log_traces
from lightrl.records import Rollouts
from tests.callbacks.toys import Loader, LoggingModule

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1? <|im_end|> 😀"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "two"},
]


@pytest.fixture
def conversations(rollouts: Rollouts) -> Rollouts:
    """The toys' four completions, each the last reply of a conversation."""
    rollouts.reward_parts = {"exact": rollouts.rewards, "judge": torch.tensor([0.5, 0.25, 0.0, 0.0])}
    rollouts.messages = [CONVERSATION] * 4
    rollouts.stop_reasons = ["stop"] * 4
    return rollouts


def train(logger: Any, rollouts: Rollouts, make_trainer: Callable[..., Any]) -> None:
    callback = CompletionLogger(1, num_samples=2, terminal=False)
    make_trainer(callback, logger=logger).fit(LoggingModule(), Loader([rollouts]))


@pytest.fixture
def weave(monkeypatch: Any) -> Any:
    """A double of weave's module, since Weave has no offline mode; its client has the signatures of the real one."""
    client = mock.Mock(["create_call", "finish_call"])
    try:
        from weave.trace.weave_client import WeaveClient
    except ImportError:
        pass
    else:
        client = mock.create_autospec(WeaveClient, instance=True)
    double: Any = types.ModuleType("weave")
    double.__spec__ = importlib.machinery.ModuleSpec("weave", None)
    double.get_client, double.init = mock.Mock(return_value=None), mock.Mock(return_value=client)
    monkeypatch.setitem(sys.modules, "weave", double)
    return double


def wandb_logger(tmp_path: Path, offline: bool) -> WandbLogger:
    pytest.importorskip("wandb")
    logger = WandbLogger(project="p", save_dir=tmp_path, offline=True)
    if not offline:
        run = mock.Mock(entity="me", project="p", id="4f2a", offline=False, disabled=False, step=0)
        logger._experiment = run
        logger.log_table = mock.Mock()  # type: ignore[method-assign]
    return logger


def test_weave_gets_calls_of_an_online_run_and_its_failure_costs_the_calls_only(
    weave: Any, conversations: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    logger = wandb_logger(tmp_path, offline=False)
    train(logger, conversations, make_trainer)
    assert weave.init.call_args.args == ("me/p",)
    client = weave.init.return_value
    assert client.create_call.call_count == client.finish_call.call_count == 2
    op, inputs = client.create_call.call_args_list[0].args
    assert op == "samples_train" and [turn["role"] for turn in inputs["messages"]] == ["system", "user"]
    assert client.create_call.call_args_list[0].kwargs["attributes"]["lightrl"]["reward"] == 1.0
    output = client.finish_call.call_args_list[0].args[1]
    assert output["messages"][-1]["content"] == "two" and output["reward"] == 1.0
    columns, rows = (logger.log_table.call_args.kwargs[name] for name in ("columns", "data"))
    assert "1+1? <|im_end|>" in rows[0][columns.index("messages")]
    weave.init.side_effect = RuntimeError("no such server")
    train(wandb_logger(tmp_path, offline=False), conversations, make_trainer)


def test_weave_is_left_alone_offline(weave: Any, tmp_path: Path) -> None:
    logger = wandb_logger(tmp_path, offline=True)
    record = {"prompt": "1+1=", "completion": "2", "reward": 1.0, "reward_parts": {"exact": 1.0}}
    log_traces(logger, "samples/train", [record], 0)
    logger.experiment.finish()
    weave.init.return_value.create_call.assert_not_called()  # wandb itself may call `init`


def test_mlflow_gets_a_trace_of_the_run_with_turns_and_feedback(
    conversations: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    mlflow = pytest.importorskip("mlflow", minversion="3.0")
    logger = MLFlowLogger("tests", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", save_dir=str(tmp_path / "mlruns"))
    train(logger, conversations, make_trainer)
    found = mlflow.search_traces(locations=[logger.experiment_id], return_type="list")
    assert len(found) == 2 and {one.info.trace_metadata["mlflow.sourceRun"] for one in found} == {logger.run_id}
    one = next(one for one in found if one.info.tags["reward"] == "1.0")
    root, first, second = one.data.spans
    assert [turn["content"] for turn in root.inputs["messages"]] == ["Be brief.", "[image]\n1+1? <|im_end|> 😀"]
    assert [turn["role"] for turn in root.outputs["messages"]] == ["assistant", "tool", "assistant"]
    assert first.outputs["choices"][0]["message"]["tool_calls"] == [CALL]
    assert second.inputs["messages"] == [CONVERSATION[3]] and root.attributes["advantage"] in (4.0, 7.5)
    values = {each.name: each.value for each in one.info.assessments}
    assert values["reward"] == 1.0 and values["reward/judge"] in (0.5, 0.0)


def test_trackio_gets_traces_by_the_logger_in_the_docs(
    conversations: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    scope: dict[str, Any] = {}
    page = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Trackio" in code), scope)
    train(scope["TrackioLogger"]("lightrl-tests", tmp_path.name), conversations, make_trainer)
    found = {one["key"]: one for one in storage.get_traces("lightrl-tests", tmp_path.name)}
    assert set(found) == {"samples/train/0", "samples/train/1"}
    one = found["samples/train/0"]
    assert [turn["role"] for turn in one["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert one["messages"][2]["tool_calls"] == [CALL] and one["metadata"]["reward/judge"] == 0.5 and one["step"] == 0


def test_a_logger_without_an_experiment_gets_no_traces(
    conversations: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    class Own(Logger):
        name, version, save_dir = "own", "1", str(tmp_path)

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    train(Own(), conversations, make_trainer)
