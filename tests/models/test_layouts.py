"""Every layout gives what transformers gives row by row, forward and backward."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.compat import torch as compat
from lightrl.models.packing import attention, cuda_attention
from lightrl.models.packing.streams import TokenStream, make_stream
from lightrl.models.policy import PolicyModel
from lightrl.models.reward import ValueModel, new_value_head
from tests.models.conftest import Batch, make_batch, plain_scores
from tests.rows import as_rows
from tests.toys import build

LAYOUTS = ("padded", "packed", "shared_prefix")
FAMILIES = [("qwen2", True), ("llama", False), ("mistral", True)]


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(5))
    return ((logprobs + 0.3 * entropy) * weights).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).norm() <= relative * value.norm(), name


@pytest.mark.parametrize(("kind", "tied"), FAMILIES)
def test_layouts_equal_plain_forward(kind: str, tied: bool, batch: Batch) -> None:
    lm = build(kind, tie_word_embeddings=tied)
    logprobs, entropy = plain_scores(lm, batch, 0.7)
    loss_of(logprobs, entropy).backward()
    expected = gradients(lm)
    for layout in LAYOUTS:
        policy = PolicyModel(build(kind, tie_word_embeddings=tied), layout=layout)
        out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, temperature=0.7), entropy=True)
        torch.testing.assert_close(out.logprobs, logprobs, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(out.entropy, entropy, atol=1e-5, rtol=1e-6)
        loss_of(out.logprobs, out.entropy).backward()
        assert_close(gradients(policy.lm), expected, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_order_and_split_do_not_matter(layout: str, batch: Batch) -> None:
    policy = PolicyModel(build("llama"), layout=layout)
    with torch.no_grad():
        whole = policy(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
        order = [3, 9, 0, 5, 1, 8, 2, 4, 7, 6]
        shuffled = policy(as_rows(*batch.pick(order)[:3], group_ids=batch.group_ids[order])).logprobs
        torch.testing.assert_close(shuffled, whole[order], atol=1e-5, rtol=0)
        for rows in ([0, 5], [1, 2, 8], [3]):  # groups cut apart; a micro-batch with an empty response only
            part = policy(as_rows(*batch.pick(rows)[:3], group_ids=batch.group_ids[rows])).logprobs
            torch.testing.assert_close(part, whole[rows], atol=1e-5, rtol=0)
        wider = [torch.nn.functional.pad(x, (0, 5)) for x in batch[:3]]
        wide = policy(as_rows(*wider, group_ids=batch.group_ids)).logprobs
        torch.testing.assert_close(wide[:, : whole.shape[1]], whole, atol=1e-5, rtol=0)
        assert not wide[:, whole.shape[1] :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_wanted_keeps_the_graph(layout: str, batch: Batch) -> None:
    policy = PolicyModel(build("qwen2"), layout=layout)
    policy.value_head = new_value_head(policy.lm)
    nothing = torch.zeros_like(batch.response_mask)
    out = policy(as_rows(batch.token_ids, batch.attention_mask, nothing), entropy=True, values=True)
    assert not any(x.any() for x in out[:3])
    (out.logprobs + out.entropy + out.values).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_only_needed_tokens_go_through(batch: Batch) -> None:
    # last response tokens are never read: group 0: 7 + 4 + 0 + 8 (the empty response needs nothing), group 1: 12 + 3,
    # group 2: 3 + 7 + 1, group 3: 1 + 5 + 5 + 11
    stream = make_stream(*batch[:3])
    assert stream.num_tokens == 19 + 15 + 11 + 22
    # without sharing: 11 + 7 + 15, 15, 10 + 4, 6 + 6 + 12
    assert make_stream(*batch[:3], share=False).num_tokens == 33 + 15 + 14 + 24
    assert stream.max_length == 15
    # the prompt of group 0, and its completions in the order of their first tokens: 42 (8 tokens), 54
    torch.testing.assert_close(stream.position_ids[:17], torch.tensor([*range(15), 7, 8]))


def test_left_padding_is_refused(batch: Batch) -> None:
    with pytest.raises(ValueError, match="attention_mask"):
        make_stream(batch.token_ids, batch.attention_mask.flip(1), batch.response_mask)


def test_autocast_layouts_agree(batch: Batch) -> None:
    policy = PolicyModel(build("qwen2", initializer_range=0.05))
    exact = policy(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        got = policy(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
    torch.testing.assert_close(got, exact, atol=3e-2, rtol=0)
    got.sum().backward()


STREAMS = {
    "unequal": [(9, [4, 30, 2]), (40, [3, 5]), (2, [7])],
    "equal": [(5, [6, 6, 6])] * 4,  # views of the stream, four groups in one piece
    "equal within groups": [(5, [6, 6]), (7, [3, 3, 3]), (4, [9])],
    "lone": [(3, [4]), (3, [4]), (3, [4])],
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_agrees(window: int | None, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for CUDA, not compiled: torch refuses a backward on CPU for its kernel, not for its formula."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    batch = make_batch(STREAMS[stream])
    stream = make_stream(*batch[:3])
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(stream.num_tokens, h, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4)]
    weights, results = leaves.pop(), []
    for path in (cuda_attention._flex, attention._masked_sdpa):
        inputs = [x.clone().requires_grad_() for x in leaves]
        out = path(*inputs, stream, 0.3, window)
        results.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def long_stream(share: bool) -> TokenStream:
    """Streams of several blocks of 128: two groups with prompts of 300 and 5 tokens, responses of 10 to 200."""
    prompts, responses = [300, 300, 300, 5, 5], [200, 170, 10, 130, 140]
    width = max(p + r for p, r in zip(prompts, responses, strict=True))
    columns = torch.arange(width)
    first, length = torch.tensor(prompts)[:, None], torch.tensor(prompts)[:, None] + torch.tensor(responses)[:, None]
    ids = torch.where(columns < first, 1, 2 + torch.arange(5)[:, None])
    return make_stream(ids, columns < length, (columns >= first) & (columns < length), share=share)


def test_flex_attention_compiles_few_graphs_and_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of all lengths, windows and layouts share a graph; another number of heads or dtype makes a new one."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    flex = compat.flex_attention(compiled=True, backend=counter)
    monkeypatch.setattr(cuda_attention, "flex_attention", lambda compiled: flex)
    torch._dynamo.reset()
    graphs = []

    def run(stream: TokenStream, heads: int, dtype: torch.dtype, window: int | None) -> None:
        q, k, v = (torch.randn(stream.num_tokens, h, 16, dtype=dtype) for h in (heads, 2, 2))
        out = cuda_attention._flex(q, k, v, stream, 0.3, window)
        torch.testing.assert_close(out, attention._masked_sdpa(q, k, v, stream, 0.3, window), atol=1e-2, rtol=1e-2)
        graphs.append(counter.frame_count)

    for batch in (make_batch(STREAMS[name]) for name in STREAMS):
        run(make_stream(*batch[:3]), 4, torch.float32, None)
    for share, window in ((True, None), (False, None), (True, 100), (False, 50)):
        run(long_stream(share), 4, torch.float32, window)
    assert graphs[-1] <= 2, "a number of blocks that equals one of heads, here 2, is compiled for itself"
    run(long_stream(True), 2, torch.float32, None)
    run(long_stream(True), 4, torch.bfloat16, None)
    assert graphs[-1] <= 4


@pytest.mark.parametrize("window", [None, 100])
def test_the_variable_length_kernel_gets_each_row_as_a_sequence(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself needs a GPU; here it is written out after its documentation."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **more: Any) -> Any:
        assert cu_q.dtype == torch.int32 and max_q == max_k == int(cu_q.diff().max())
        left, right = more["window_size"]
        assert right == 0, "causal"
        parts = []
        for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            index = torch.arange(end - start)
            distance = index[:, None] - index
            seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            own = (x[start:end].transpose(0, 1) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *own, attn_mask=seen, scale=more["scale"], enable_gqa=more["enable_gqa"]
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(cuda_attention, "varlen_attn", kernel)
    stream = long_stream(share=False)
    q, k, v = (torch.randn(stream.num_tokens, h, 16) for h in (4, 2, 2))
    ours = cuda_attention._varlen(q, k, v, stream, 0.3, window)
    torch.testing.assert_close(ours, attention._masked_sdpa(q, k, v, stream, 0.3, window))


def test_unsupported_models_fall_back_once(batch: Batch) -> None:
    settings: dict[str, Any] = {"head_dim": 8, "sliding_window": 6, "attn_implementation": "eager"}
    gemma = partial(build, "Gemma2", final_logit_softcapping=3.0, **settings)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        policy = PolicyModel(gemma())
        got = policy(as_rows(*batch[:3], group_ids=batch.group_ids, temperature=0.7)).logprobs
        policy(as_rows(*batch[:3], group_ids=batch.group_ids))
    assert len([w for w in seen if "padded layout" in str(w.message)]) == 1
    expected, _ = plain_scores(gemma(), batch, 0.7)  # the head's cap is handled
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="layout='packed'"):
        PolicyModel(gemma(), layout="packed")


def test_attention_that_ignores_the_stream_is_found_out(batch: Batch) -> None:
    """A model whose layers drop the extra arguments must not run packed."""
    lm = build("qwen2")
    layer = lm.model.layers[1]
    original = layer.forward
    layer.forward = lambda *args, stream=None, **kwargs: original(*args, **kwargs)
    with pytest.raises(ValueError, match="1 of its 2 layers"):
        PolicyModel(lm, layout="packed")(as_rows(*batch[:3]))
    expected, _ = plain_scores(build("qwen2"), batch)
    with pytest.warns(UserWarning, match="padded layout"):
        got = PolicyModel(lm)(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_read_before_the_token(layout: str, batch: Batch) -> None:
    torch.manual_seed(1)
    critic = ValueModel(build("qwen2").model, layout=layout)
    torch.nn.init.normal_(critic.value_head.weight)
    got = critic(as_rows(*batch[:3], group_ids=batch.group_ids))
    for i, (ids, attention_row, response) in enumerate(zip(*batch[:3], strict=True)):
        hidden = critic.backbone(input_ids=ids[attention_row][None]).last_hidden_state[0]
        read = critic.value_head(hidden)
        expected = torch.zeros(len(ids))
        for t in response.nonzero().flatten().tolist():
            expected[t] = read[t - 1]
        torch.testing.assert_close(got[i], expected, atol=1e-5, rtol=1e-5)
    shared = PolicyModel(build("qwen2"), layout=layout)
    shared.value_head = new_value_head(shared.lm)
    shared.value_head.load_state_dict(critic.value_head.state_dict())
    values = shared(as_rows(*batch[:3], group_ids=batch.group_ids), values=True).values
    torch.testing.assert_close(values, got, atol=1e-5, rtol=1e-5)
