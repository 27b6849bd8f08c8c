"""Logs sampled trajectories to the trace views of MLflow, W&B (Weave), and trackio."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

log = logging.getLogger(__name__)


def log_traces(logger: Any, name: str, records: list[dict[str, Any]], step: int) -> None:
    """Logs each trajectory as a conversation, if the logger supports it.

    `MLFlowLogger` (mlflow 3) logs a trace with a span per turn and the rewards as feedback. `WandbLogger` logs a Weave
    call if `weave` is installed and the run is online. A logger with a trackio run logs a `trackio.Trace`.
    """
    send: Callable[[Any, str, list[dict[str, Any]], dict[str, Any]], None]
    if isinstance(logger, MLFlowLogger):
        send = _to_mlflow
    elif isinstance(logger, WandbLogger):
        send = _to_weave
    elif type(getattr(logger, "experiment", None)).__module__.split(".")[0] == "trackio":
        send = _to_trackio
    else:
        return
    for number, record in enumerate(records):
        turns = record.get("messages") or [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["completion"]},
        ]
        kept = ("reward", "advantage", "num_tokens", "truncated", "stop_reason", "turns", "media")
        facts = {key: record[key] for key in kept if record.get(key) is not None}
        parts = {f"reward/{part}": x for part, x in record["reward_parts"].items() if x is not None}
        facts |= parts | (record.get("extra") or {}) | {"step": step}
        send(logger, f"{name}/{number}", [_message(turn) for turn in turns], facts)


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    """Converts a turn to JSON-compatible values, without media."""
    content = turn.get("content")
    if isinstance(content, list):
        texts = (str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
        content = "\n".join(texts)
    return {**turn, "content": content}


def _exchanges(turns: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yields the messages since the last assistant turn, and each assistant turn."""
    new: list[dict[str, Any]] = []
    for turn in turns:
        if turn.get("role") == "assistant":
            yield new, turn
            new = []
        else:
            new.append(turn)


def _to_mlflow(logger: MLFlowLogger, name: str, turns: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    import mlflow

    if not hasattr(mlflow, "start_span_no_context"):  # mlflow 2
        return
    run, experiment = logger.run_id, logger.experiment_id  # opens the run and sets mlflow's tracking URI
    first = next((i for i, turn in enumerate(turns) if turn.get("role") == "assistant"), len(turns))
    root = mlflow.start_span_no_context(
        name.rpartition("/")[0],
        span_type="AGENT",
        inputs={"messages": turns[:first]},
        attributes=facts,
        tags={key: str(facts[key]) for key in ("step", "reward", "stop_reason") if key in facts},
        metadata={"mlflow.sourceRun": str(run)},
        experiment_id=experiment,
    )
    for number, (asked, reply) in enumerate(_exchanges(turns), 1):
        span = mlflow.start_span_no_context(
            f"turn {number}", span_type="CHAT_MODEL", parent_span=root, inputs={"messages": asked}
        )
        span.end(outputs={"choices": [{"message": reply}]})
    root.end(outputs={"messages": turns[first:]}, status="OK")
    mlflow.flush_trace_async_logging()  # feedback requires the trace
    for key, value in facts.items():
        if key.split("/")[0] == "reward":
            mlflow.log_feedback(trace_id=root.trace_id, name=key, value=value)


def _to_weave(logger: WandbLogger, name: str, turns: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    run = logger.experiment
    if importlib.util.find_spec("weave") is None or run.offline or run.disabled:
        return
    import weave

    try:
        client = weave.get_client() or weave.init(
            f"{run.entity}/{run.project}", settings={"implicitly_patch_integrations": False, "print_call_link": False}
        )
    except Exception as error:  # e.g. a server without Weave
        log.warning(f"Weave is unreachable; logging trajectories only to the table: {error}")
        return
    first = next((i for i, turn in enumerate(turns) if turn.get("role") == "assistant"), len(turns))
    call = client.create_call(
        name.rpartition("/")[0].replace("/", "_"),
        {"messages": turns[:first]},
        attributes={"lightrl": facts, "wandb_run": run.id},
        use_stack=False,
    )
    client.finish_call(call, {"messages": turns[first:], "reward": facts.get("reward")})


def _to_trackio(logger: Any, name: str, turns: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    import trackio

    logger.experiment.log({name: trackio.Trace(messages=turns, metadata=facts)}, step=facts["step"])
