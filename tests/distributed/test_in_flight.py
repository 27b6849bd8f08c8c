"""Two ranks whose weights change within completions: each engine has its own, and all learn what one process learns.

Run as a module, the file is what each of the two does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.callbacks import RolloutCheckpoint
from lightrl.records import Rollouts
from lightrl.rollout import InFlight
from tests import forks
from tests.rollout.test_in_flight import Scripted, in_flight, versions, worst
from tests.toys import quickstart_model

MIDDLE = 2
DDP = {"trainer": {"devices": 2, "strategy": "ddp"}}


def seen(rollouts: list[Rollouts]) -> dict[Any, Any]:
    """Of each completion, by the numbers of rollout, prompt and attempt: tokens, log-probs, and versions."""
    rows: dict[Any, Any] = {}
    for number, batch in enumerate(rollouts):
        for i, prompt in enumerate(batch.prompts):
            mask = batch.response_mask[i]
            of = [x[i][mask] for x in (batch.token_ids, batch.engine_logprobs, versions(batch))]
            rows[number, prompt, sum(key[:2] == (number, prompt) for key in rows)] = of
    return rows


def learn(path: str, *callbacks: Any, **data: Any) -> dict[str, Any]:
    module, watch = in_flight(path, *callbacks, schedule=InFlight(2), **data)
    weights = {name: value.clone() for name, value in module.actor.state_dict().items()}
    gaps = []
    for rollouts in watch.rollouts:
        sampled = versions(rollouts)
        for version in set(sampled[sampled >= 0].tolist()) & watch.weights.keys():
            gaps.append(worst(module, watch, rollouts, version, version))
    switched = [metrics["rollout/switched"] for metrics in watch.metrics]
    return {"rows": seen(watch.rollouts), "weights": weights, "gap": max(gaps), "switched": switched}


def checkpoints(folder: Path) -> RolloutCheckpoint:
    return RolloutCheckpoint(every_n_rollouts=MIDDLE, dirpath=str(folder), save_top_k=-1)


def middle(folder: Path) -> str:
    (found,) = [f for f in folder.glob("*.ckpt") if torch.load(f, weights_only=True)["global_step"] == MIDDLE]
    return str(found)


def is_the_same(some: Any, whole: Any, first: int = 0, atol: float = 0.0) -> bool:
    """Whether a run that began with rollout `first` is another's rest."""
    rest = {key: row for key, row in whole["rows"].items() if key[0] >= first}
    own = {(number + first, *key): row for (number, *key), row in some["rows"].items()}
    rows = own.keys() == rest.keys() and all(
        torch.equal(tokens, rest[key][0]) and torch.allclose(logprobs, rest[key][1], rtol=0, atol=atol)
        and torch.equal(sampled, rest[key][2]) for key, (tokens, logprobs, sampled) in own.items()
    )  # fmt: skip
    return rows and all(torch.allclose(w, whole["weights"][n], rtol=0, atol=atol) for n, w in some["weights"].items())


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_change_weights_where_one_does_and_resume(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    path = quickstart_model(tmp_path / "model", **sizes)
    one = learn(path, checkpoints(tmp_path / "one"))
    forks.ranks(__name__, path, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    runs = {}
    for name in ranks[0]:
        first, second = (rank[name] for rank in ranks)
        assert not first["rows"].keys() & second["rows"].keys() and max(first["gap"], second["gap"]) < 1e-4
        assert first["switched"] == second["switched"]
        assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())
        runs[name] = first | {"rows": first["rows"] | second["rows"]}
    assert max(runs["whole"]["switched"]) > 0.5
    assert is_the_same(runs["resumed"], runs["whole"], MIDDLE)
    # One process, and its checkpoint in two; gradients are summed in another order.
    assert is_the_same(runs["whole"], one, atol=1e-5)
    assert is_the_same(runs["of one"], one, MIDDLE, atol=1e-5)


def main(path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    two = folder / "two"
    runs = {
        "whole": learn(path, checkpoints(two), **DDP),
        "resumed": learn(path, engine=Scripted(learnt=MIDDLE), ckpt_path=middle(two), **DDP),
        "of one": learn(path, engine=Scripted(learnt=MIDDLE), ckpt_path=middle(folder / "one"), **DDP),
    }
    torch.save(runs, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
