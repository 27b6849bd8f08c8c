"""Routing replay: tokens go to the experts that the engine chose, and routers and experts learn from it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightrl.algorithms import GRPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import RolloutWriter
from lightrl.callbacks.rollout_writer import load_rollouts
from lightrl.engines.base import EngineContext
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.engines.vllm.conversion import completion
from lightrl.models.loading import load_causal_lm
from lightrl.models.packing.streams import make_stream
from lightrl.models.policy import PolicyModel
from lightrl.models.routing import Routers
from lightrl.models.spec import ModelSpec
from lightrl.records import GenerationRequest, Routes, SamplingParams
from tests.algorithms.toys import fit, weights
from tests.models.conftest import Batch
from tests.rows import as_rows
from tests.toys import QUICKSTART_MODEL, ThreadEngine, build, near_ties, sgd

LAYOUTS = ("padded", "packed", "shared_prefix")
EXPERTS, K = 4, 3  # of two pairs that tie one is taken whole, and of the other one expert
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS, "sliding_window": None},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 8},
}


def moe(kind: str, **changes: Any) -> Any:
    """Two layers with experts; of a Qwen3-MoE three, the one between them without."""
    settings = {"intermediate_size": 32, "num_experts_per_tok": K, **KINDS.get(kind, {})}
    settings |= {"num_hidden_layers": 3, "mlp_only_layers": [1]} if kind == "Qwen3Moe" else {}
    return build(kind, **{**settings, **changes})


def saved(kind: str, folder: Path, by: float = 6e-8) -> str:
    """A model whose routers nearly tie, with the quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    near_ties(moe(kind, vocab_size=len(tokenizer), **ends), by).save_pretrained(folder)
    return str(folder)


def some_routes(batch: Batch, seed: int = 0, same: bool = False) -> list[Routes | None]:
    """Random experts for two layers of all rows but the last, which has none; `same` in the prompts of a group."""
    generator = torch.Generator().manual_seed(seed)
    routes: list[Routes | None] = []
    for row, attention in enumerate(batch.attention_mask):
        order = torch.rand(int(attention.sum()) - 1, 2, EXPERTS, generator=generator).argsort(-1)
        routes.append(Routes(order[..., :K].to(torch.uint8)))
        first = int((batch.group_ids == batch.group_ids[row]).nonzero()[0])
        if same and first < row:
            prompt = int((attention & ~batch.response_mask[row]).sum())
            routes[row] = Routes(torch.cat([routes[first].experts[:prompt], routes[row].experts[prompt:]]))  # type: ignore[union-attr]
    routes[-1] = None
    return routes


HIDDEN = torch.tensor([[1.0, 2.0, 3.0, 6.0], [6.0, 3.0, 2.0, 1.0]]).log()


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        # softmax gives token 0 (1, 2, 3, 6) / 12 and token 1 (6, 3, 2, 1) / 12; token 0 is to go to experts 0 and 2
        ("Qwen3Moe", {"norm_topk_prob": True}, [1 / 4, 3 / 4]),
        ("Qwen3Moe", {"norm_topk_prob": False}, [1 / 12, 3 / 12]),
        ("Mixtral", {}, [1 / 4, 3 / 4]),
        ("GraniteMoe", {"num_local_experts": EXPERTS}, [1 / 4, 3 / 4]),
        # sigmoid(log x) = x / (1 + x): 1/2 and 3/4, renormalised 0.4 and 0.6, times 2.5
        (
            "DeepseekV3",
            {
                **{"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
                **{"moe_intermediate_size": 8, "first_k_dense_replace": 0, "norm_topk_prob": True},
            },
            [1.0, 1.5],
        ),
    ],
)
def test_weights_of_replayed_experts_by_hand(kind: str, changes: dict[str, Any], expected: list[float]) -> None:
    changes = {"hidden_size": 4, "num_attention_heads": 2, "num_experts_per_tok": 2, "num_hidden_layers": 1} | changes
    model = moe(kind, **changes, **({"mlp_only_layers": []} if kind == "Qwen3Moe" else {}))
    routers = Routers(model)
    router = next(module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter"))
    router.weight.data = torch.eye(4)

    def run() -> list[Tensor]:  # weights are between the logits and the experts, in either order
        return sorted(router(HIDDEN), key=lambda x: (x.shape[1] == 4, x.dtype == torch.int64))

    own, own_taken, _ = run()
    with routers.replaying(torch.tensor([[[0, 2]], [[-1, -1]]])) as forward:
        replayed, taken, _ = run()
    assert taken.tolist() == [[0, 2], own_taken[1].tolist()] and sorted(own_taken[1].tolist()) == [0, 1]
    assert replayed[0].tolist() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(replayed[1], own[1])
    assert routers.recorded(forward).tolist() == taken[:, None].tolist()
    torch.testing.assert_close(run()[0], own)  # and the hooks do nothing by themselves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_to_their_own_experts_in_every_layout(kind: str, layout: Any, batch: Batch) -> None:
    policy = PolicyModel(moe(kind), layout=layout)
    for same in (False, True):
        routes = some_routes(batch, same=same)
        out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, routes=routes)).logprobs
        alone = [policy(as_rows(*batch.pick([row])[:3], routes=[routes[row]])).logprobs for row in range(len(routes))]
        torch.testing.assert_close(out, torch.cat(alone), atol=2e-5, rtol=1e-5)
        free = policy(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
        torch.testing.assert_close(out[-1], free[-1], atol=2e-5, rtol=1e-5)  # nothing was recorded of the last row
        assert (out - free)[:-1].abs().max() > 0.1


def test_prompts_are_shared_only_where_their_experts_are_the_same(batch: Batch) -> None:
    counts = [
        make_stream(*batch[:3], routes=routes).num_tokens
        for routes in ([], some_routes(batch, same=True), some_routes(batch), [None] * len(batch.token_ids))
    ]
    apart = make_stream(*batch[:3], share=False).num_tokens
    assert counts == [counts[0], counts[0] + 1, apart, counts[0]]  # the last row, without any, repeats its token


@pytest.mark.parametrize(("kind", "layout"), [("Mixtral", "padded"), ("Qwen3Moe", "shared_prefix")])
def test_gradients_of_router_and_experts_are_those_of_finite_differences(
    kind: str, layout: Any, batch: Batch, tmp_path: Path
) -> None:
    moe(kind).save_pretrained(tmp_path)
    routes = some_routes(batch)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(batch.token_ids.shape, generator=generator)
    found = []
    for recompute in (False, True):
        spec = ModelSpec(str(tmp_path), gradient_checkpointing=recompute)
        policy = PolicyModel(load_causal_lm(spec, trainable=True), layout=layout)

        def loss(policy: PolicyModel = policy) -> Tensor:
            out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, routes=routes))
            return (out.logprobs.double() * weight).sum()

        total = loss()
        backward = threading.Thread(target=total.backward)  # as on a GPU, where autograd has threads of its own
        backward.start()
        backward.join()
        names = {n: p for n, p in policy.named_parameters() if "gate.weight" in n or "experts." in n}
        assert len(names) == 6  # router, gates and ups, downs of two layers
        found.append({name: parameter.grad.clone() for name, parameter in names.items()})  # type: ignore[union-attr]
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], atol=1e-5, rtol=1e-4)
        direction = gradient / gradient.norm()
        values = []
        for step in (2e-3, -2e-3):
            with torch.no_grad():
                names[name].add_(step * direction)
                values.append(float(loss()))
                names[name].sub_(step * direction)
        assert gradient.norm() > 1e-2
        assert (values[0] - values[1]) / 4e-3 == pytest.approx(float(gradient.norm()), rel=2e-2), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_with_near_ties_has_no_gap_with_replay_and_one_without(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path)
    engine = TransformersEngine()
    engine.start(EngineContext(model_path=path, dtype="float32", device="cpu", seed=0))
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [GenerationRequest([5 + i for i in range(n)], sampling, seed=n, num_completions=3) for n in (3, 7)]
    groups = {len(group.request.token_ids): group for group in engine.generate_all(requests)}
    rows = [(n, groups[n].request.token_ids + c.token_ids, c) for n in (3, 7) for c in groups[n].completions]
    ids, sampled = torch.zeros(6, 20, dtype=torch.long), torch.zeros(6, 20)
    lengths, starts = torch.tensor([[len(tokens)] for _, tokens, _ in rows]), torch.tensor([[n] for n, *_ in rows])
    for row, (n, tokens, sample) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        sampled[row, n : len(tokens)] = torch.tensor(sample.logprobs)
        assert sample.routes is not None and sample.routes.experts.shape == (len(tokens) - 1, 2, K)
        assert sample.routes.experts.dtype == torch.uint8
    columns = torch.arange(20)
    attention, response = columns < lengths, (columns >= starts) & (columns < lengths)
    for layout in LAYOUTS:
        policy = PolicyModel(load_causal_lm(ModelSpec(path), trainable=False), layout=layout)
        for name, parameter in policy.named_parameters():
            if "gate.weight" in name:  # the last bits, by which engines and trainers differ
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                parameter.data += 1e-7 * noise
        gaps = []
        for routes in ([sample.routes for *_, sample in rows], []):
            out = policy(as_rows(ids, attention, response, group_ids=starts[:, 0], routes=routes))
            gaps.append(float((out.logprobs - sampled).abs().max()))
        assert gaps[0] < 1e-5 and gaps[1] > 0.1, layout


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("Qwen3Moe", tmp_path_factory.mktemp("near"))


def grpo(path: str, **arguments: Any) -> GRPOLightningModule:
    return GRPOLightningModule(path, kl=None, optimizer=sgd, **arguments)


def test_a_run_learns_from_the_experts_that_sampled(near: str, tmp_path: Path) -> None:
    """Micro-batches, mini-batches, and recomputation give the update of one pass, on the recorded experts."""
    module = grpo(near)
    keep = fit(module, callbacks=[RolloutWriter(1, str(tmp_path))])
    rows = keep.rollouts[0]
    assert [len(routes) for routes in rows.routes] == [int(n) - 1 for n in rows.attention_mask.sum(1)]  # type: ignore[arg-type]
    first = GRPOLightningModule(near, kl=None)
    first.build_models()
    gaps = []
    for routes in (rows.routes, []):
        with torch.no_grad():
            out = first.actor(replace(rows, routes=routes)).logprobs
        gaps.append(float((out - rows.engine_logprobs)[rows.response_mask].abs().max()))
    assert gaps[0] < 1e-5 < 0.01 < gaps[1]
    stored = load_rollouts(tmp_path / "rollout=000001")[0]["routes"]
    assert all(torch.equal(a, b.experts) for a, b in zip(stored, rows.routes, strict=True))
    moved = (weights(first), weights(module))
    assert not torch.equal(*moved)
    recomputing = ModelSpec(near, gradient_checkpointing=True)
    for other, data in (
        (grpo(near, updates=Updates(micro_batch_tokens=64)), {}),
        (grpo(recomputing), {"engine": ThreadEngine()}),  # type: ignore[arg-type]
    ):
        fit(other, **data)
        torch.testing.assert_close(weights(other), moved[1], atol=1e-6, rtol=1e-5)


def test_the_engine_takes_the_experts_of_earlier_turns_again(near: str) -> None:
    engine = TransformersEngine()
    engine.start(EngineContext(model_path=near, dtype="float32", device="cpu", seed=0))
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    known = Routes(torch.tensor([[[3, 1, 0], [2, 1, 3]]] * 2, dtype=torch.uint8))
    requests = [GenerationRequest([5, 6, 7][:n], sampling, seed=1, routes=known) for n in (2, 3)]
    requests += [GenerationRequest([5, 6, 7], sampling, seed=1)]
    short, long, free = [engine_group.completions[0] for engine_group in sorted(
        engine.generate_all(requests), key=lambda group: requests.index(group.request)
    )]  # fmt: skip
    for sample, n in ((short, 4), (long, 5)):
        assert sample.routes is not None and sample.routes.experts[:2].equal(known.experts)
        assert len(sample.routes) == n
    assert free.routes is not None and not free.routes.experts[:2].equal(known.experts)
    assert abs(long.logprobs[0] - free.logprobs[0]) > 1e-3


def test_what_vllm_returns_is_replayed(batch: Batch) -> None:
    # It numbers all layers, the one without experts too, and leaves the last token out.
    recorded = some_routes(batch)[2]
    assert recorded is not None
    first, second = recorded.experts.numpy().transpose(1, 0, 2)
    output = SimpleNamespace(
        token_ids=[1, 2], logprobs=[{1: SimpleNamespace(logprob=-1.0)}, {2: SimpleNamespace(logprob=-1.0)}], text="",
        finish_reason="stop", routed_experts=np.stack([first, np.zeros_like(first), second], 1),
    )  # fmt: skip
    sample = completion(output, GenerationRequest([3], SamplingParams(max_new_tokens=2), seed=0), 0)
    assert sample.routes is not None and sample.routes.experts.shape[1:] == (3, K)
    policy, row = PolicyModel(moe("Qwen3Moe")), batch.pick([2])
    out = [policy(as_rows(*row[:3], routes=[routes])).logprobs for routes in (recorded, sample.routes, None)]
    assert torch.equal(out[0], out[1]) and (out[0] - out[2]).abs().max() > 0.1
