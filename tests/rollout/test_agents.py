"""Programs in the pipeline: whole runs of a tiny model, and the log-probs of what they train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lightrl.environments import AgentProgram
from tests.rollout.tasks import chat_model, fit


def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Goes on for three turns, with a question beside, and begins again with a summary."""
    with httpx.Client(headers={"x-api-key": api_key}, timeout=60) as client:

        def ask(messages: list[Any]) -> str:
            answer = client.post(base_url + "/chat/completions", json={"messages": messages})
            said: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
            return said

        said: list[Any] = [{"role": "user", "content": row["prompt"]}]
        reward = 0.0
        for turn in range(3):
            if turn == 1:
                ask([{"role": "user", "content": "beside"}])
            said.append({"role": "assistant", "content": ask(said)})
            reward += sum(c in "aeiou" for c in said[-1]["content"]) / 10
            said.append({"role": "user", "content": f"again {turn}"})
        ask([{"role": "user", "content": "summary"}, said[-1]])
    return reward


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_a_program_is_trained_on_the_log_probs_that_the_engine_sampled_with(family: str, tmp_path: Path) -> None:
    _, keep = fit(chat_model(tmp_path, family), made=AgentProgram(main, max_environments=16))
    assert len(keep.rollouts) == 2
    assert max(keep.gaps) < 1e-5
    for rollouts in keep.rollouts:
        turns = rollouts.turn_ids
        assert turns is not None
        for trajectory in rollouts.trajectory_ids.unique():
            trained = turns[rollouts.trajectory_ids == trajectory]
            assert sorted(set(trained[trained >= 0].tolist())) == [0, 1, 2, 3, 4]
        if family == "qwen2.5":  # one row that goes on, the question beside, the summary; random text rarely forks
            assert 16 * 3 <= len(rollouts) < 16 * 4
    assert keep.rollouts[0].rewards.std() > 0
