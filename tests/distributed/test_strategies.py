"""Every strategy on two real processes: equal to one process, checkpoints, resumes, exports, and a rank that dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from transformers import AutoModelForCausalLM

from lightrl.cli.export import export
from lightrl.distributed.precision import refuse_unsupported
from lightrl.engines import TransformersEngine
from tests import forks
from tests.distributed.job import ROLLOUTS, train
from tests.toys import OtherExperts, quickstart_model

ROOT = Path(__file__).resolve().parent.parent.parent
MIDDLE, END = f"rollout={ROLLOUTS // 2:06d}.ckpt", f"rollout={ROLLOUTS:06d}.ckpt"
LONG_ONES = [pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "zero2", "zero3")]
STRATEGIES = ["ddp", "fsdp2", *LONG_ONES]
EXTRA = {
    "ddp": ["experts", "unrewarded"],
    "fsdp2": ["offload", "bf16", "live", f"lora@one/lora/{MIDDLE}"],
    "zero2": ["every", "every-broken", "experts", "unrewarded"],
}

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]  # the first may have to compile


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # vLLM on CPU serves heads of 32 and more
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, **heads}
    quickstart_model(folder / "model", **sizes)
    quickstart_model(folder / "experts", family="Mixtral", **sizes | {"num_hidden_layers": 1})
    return folder


@pytest.fixture(scope="module")
def one(place: Path) -> dict[str, Any]:
    """The runs of one process with the same global batch; they save plain checkpoints."""
    torch.set_num_threads(1)
    model = str(place / "model")
    return {kind: train(kind, model, place / "one" / kind) for kind in ("ppo", "lora", "broken")}


@pytest.fixture(scope="module", params=STRATEGIES)
def ranks(request: Any, place: Path, one: dict[str, Any]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """What both ranks of a strategy report of each step, all run by one pair of processes."""
    name = request.param
    steps = ["ppo", "lora", "broken", f"ppo@{name}/ppo/{MIDDLE}", *EXTRA.get(name, [])]
    if not name.startswith("zero"):
        steps.append(f"ppo@one/ppo/{MIDDLE}")
    forks.ranks("tests.distributed.job", name, str(place / "model"), str(place), *steps)
    files = {step: [place / f"{name}-{step.replace('/', '+')}-{rank}.pt" for rank in range(2)] for step in steps}
    yield name, {step: [torch.load(file, weights_only=True) for file in own] for step, own in files.items()}


def assert_same_weights(ours: Any, expected: Any) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, atol=1e-5, rtol=1e-5), (name, (ours[name] - value).abs().max())


def test_two_ranks_learn_what_one_process_learns(ranks: Any, one: dict[str, Any]) -> None:
    """PPO with a critic, GRPO with an adapter and dynamic sampling, and a loss that is no number on one rank."""
    _, steps = ranks
    for kind in ("ppo", "lora", "broken"):
        for rank in steps[kind]:
            assert_same_weights(rank["weights"], one[kind]["weights"])
            assert len(rank["gaps"]) == ROLLOUTS and max(rank["gaps"]) < 1e-5, "the engine's log-probs"
        assert steps[kind][0]["metrics"] == steps[kind][1]["metrics"]
        for ours, expected in zip(steps[kind][0]["metrics"], one[kind]["metrics"], strict=True):
            assert ours.keys() == expected.keys()
            for metric in ("reward/mean", "kl/ref", "optim/lr_policy", "optim/skipped_updates", "loss/policy"):
                assert ours[metric] == pytest.approx(expected[metric], abs=2e-5), (kind, metric)
            assert ours.get("optim/grad_norm") == pytest.approx(expected.get("optim/grad_norm"), rel=1e-4)
    assert sum(m["optim/skipped_updates"] for m in one["broken"]["metrics"]) == 0.5, "one of two updates"
    assert any(m["rollout/dropped_groups"] for m in one["lora"]["metrics"]), "the toy must refill"


def test_runs_go_on_under_two_ranks(ranks: Any, one: dict[str, Any]) -> None:
    """From its own checkpoint, and, except under DeepSpeed, from that of one process."""
    _, steps = ranks
    for step, both in steps.items():
        if "@" in step:
            for rank in both:
                assert len(rank["metrics"]) == ROLLOUTS // 2
                assert_same_weights(rank["weights"], one[step.partition("@")[0]]["weights"])


@pytest.mark.parametrize("ranks", ["ddp"], indirect=True)
def test_runs_go_on_in_one_process(ranks: Any, one: dict[str, Any], place: Path) -> None:
    name, _ = ranks
    for kind in ("ppo", "lora"):
        again = train(kind, str(place / "model"), resume=str(place / name / kind / MIDDLE))
        assert_same_weights(again["weights"], one[kind]["weights"])


def logprobs(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        return model.eval()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def test_exports_load_in_transformers(ranks: Any, one: dict[str, Any], place: Path, tmp_path: Path) -> None:
    """Policy and adapter: the weights of the run, whatever wrote the checkpoint."""
    from peft import PeftModel

    name, _ = ranks
    for kind in ("ppo", "lora"):
        export(str(place / name / kind / END), str(tmp_path / kind))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        own = {n: v for n, v in one[kind]["weights"].items() if not n.startswith("critic.")}
        assert_same_weights(dict(exported.named_parameters()), own)
    export(str(place / name / "lora" / END), str(tmp_path / "adapter"), "adapter")
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    start = logprobs(base)
    adapted = logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    torch.testing.assert_close(adapted, logprobs(exported), atol=1e-5, rtol=1e-5)
    assert (adapted - start).abs().max() > 1e-3, "the adapter must do something"


@pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)
def test_fsdp2_options(ranks: Any, one: dict[str, Any]) -> None:
    """Offload, recomputation, early reduction, and a live model change nothing; bfloat16 rounds what is computed."""
    _, steps = ranks
    for rank in (*steps["offload"], *steps["live"]):
        assert_same_weights(rank["weights"], one["ppo"]["weights"])
    first, rounded = (x["weights"]["model.embed_tokens.weight"] for x in (one["ppo"], steps["bf16"][0]))
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.allclose(rounded, first, atol=1e-6)
    assert torch.equal(rounded, steps["bf16"][1]["weights"]["model.embed_tokens.weight"])


@pytest.mark.parametrize("ranks", ["ddp", LONG_ONES[1]], indirect=True)
def test_experts_are_replayed_on_both_ranks(ranks: Any, place: Path) -> None:
    model, (_, steps) = str(place / "model"), ranks
    one, free = (train("experts", model, engine=engine) for engine in (OtherExperts(), TransformersEngine()))
    for rank in steps["experts"]:
        assert_same_weights(rank["weights"], one["weights"])
        assert len(rank["gaps"]) == ROLLOUTS and max(rank["gaps"]) < 1e-5
    router = "model.layers.0.mlp.gate.weight"
    assert (one["weights"][router] - free["weights"][router]).abs().max() > 1e-3, (
        "the toy's experts are not the router's"
    )


@pytest.mark.parametrize("ranks", ["ddp", LONG_ONES[1]], indirect=True)
def test_an_update_is_skipped_where_no_rank_has_a_token_to_train(ranks: Any) -> None:
    """One that has none beside one that has takes part."""
    _, steps = ranks
    first, second = steps["unrewarded"]
    for rank in (first, second):
        assert [m["optim/skipped_updates"] for m in rank["metrics"]] == [0.0, 0.0, 1.0, 1.0]
        assert_same_weights(rank["weights"], first["weights"])
        assert len(rank["gaps"]) == ROLLOUTS and max(rank["gaps"]) < 1e-5


@pytest.mark.parametrize("ranks", ["fsdp2", LONG_ONES[1]], indirect=True)
def test_reduced_every_micro_batch_is_reduced_once(ranks: Any) -> None:
    """Gradients in shards after each backward, and the same updates; also where one is skipped in the middle.

    Adam's quotient makes the rounding of small gradients larger: measured are differences of up to 3.1e-6 in weights.
    """
    name, steps = ranks
    pairs = [("ppo", "offload")] if name == "fsdp2" else [("ppo", "every"), ("broken", "every-broken")]
    for late, early in pairs:
        for once, always in zip(steps[late], steps[early], strict=True):
            assert once["updates"] == always["updates"] > 1
            for parameter, value in once["weights"].items():
                torch.testing.assert_close(always["weights"][parameter], value, atol=6e-6, rtol=0)


def dies(place: Path, strategy: str, step: str, rank: int) -> None:
    """Runs a step in which a rank is killed: the other one ends, with an error."""
    both = forks.start_ranks("tests.distributed.job", strategy, str(place / "model"), str(place), step)
    try:
        assert both[rank].poll(400) == -signal.SIGKILL, both[rank].printed()[-4000:]
        survivor = both[1 - rank]
        assert survivor.poll(250), f"the other rank hangs or ends well: {survivor.printed()[-4000:]}"
    finally:
        for process in both:
            process.kill()
    assert not (place / f"{strategy}-{step}-{1 - rank}.pt").exists()


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), pytest.param("zero3", 1, marks=pytest.mark.long)])
def test_a_dead_rank_ends_the_run(strategy: str, rank: int, place: Path) -> None:
    dies(place, strategy, f"kill{rank}", rank)


@pytest.mark.parametrize(("strategy", "rank"), [("fsdp2", 1), pytest.param("zero2", 0, marks=pytest.mark.long)])
def test_a_rank_that_dies_while_parts_are_saved_costs_that_checkpoint(
    strategy: str, rank: int, place: Path, one: dict[str, Any]
) -> None:
    step = f"saving{rank}"
    folder = place / strategy / step
    dies(place, strategy, step, rank)
    assert {path.name for path in folder.glob("*.ckpt")} == {MIDDLE, "last.ckpt"}, "what is not whole has no name"
    forks.ranks("tests.distributed.job", strategy, str(place / "model"), str(place), f"{step}@last")
    assert {path.name for path in folder.iterdir()} >= {MIDDLE, END} and not [*folder.glob(".*.partial")]
    for number in range(2):
        rest = torch.load(place / f"{strategy}-{step}@last-{number}.pt", weights_only=True)
        assert len(rest["gaps"]) == ROLLOUTS // 2
        assert_same_weights(rest["weights"], one["ppo"]["weights"])


@pytest.mark.vllm
def test_vllm_follows_on_both_ranks(place: Path) -> None:
    """An engine in each trainer process, fed from shards: its log-probs are the trainer's after every update."""
    forks.ranks("tests.distributed.job", "fsdp2", str(place / "model"), str(place), "vllm")
    both = [torch.load(place / f"fsdp2-vllm-{rank}.pt", weights_only=True) for rank in range(2)]
    for rank in both:
        assert len(rank["gaps"]) == ROLLOUTS and 0 < max(rank["gaps"]) < 2e-5
    assert_same_weights(both[0]["weights"], both[1]["weights"])


def test_refuses_what_would_train_apart() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2.*FSDP2Strategy"):
        refuse_unsupported(ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), "32-true")
    with pytest.raises(ValueError, match="FSDP1.*FSDP2Strategy"):
        refuse_unsupported(FSDPStrategy(), "32-true")
    with pytest.raises(ValueError, match="precision=16-mixed with FSDP2"):
        refuse_unsupported(ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1), "16-mixed")
