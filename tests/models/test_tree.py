"""The tree layout: what rows begin with alike goes through the model once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.models.packing import attention, cuda_attention
from lightrl.models.packing.streams import TokenStream, make_stream
from lightrl.models.policy import PolicyModel
from tests.models.conftest import Batch, make_batch, make_tree
from tests.models.test_layouts import assert_close, gradients, loss_of
from tests.rows import as_rows
from tests.toys import build

SEEDS = range(6)


def scored(kind: str, layout: str, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    policy = PolicyModel(build(kind, max_position_embeddings=512, **changes), layout=layout)
    out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, temperature=0.7), entropy=True)
    loss_of(out.logprobs, out.entropy).backward()
    return out.logprobs.detach(), out.entropy.detach(), gradients(policy)


def distinct(batch: Batch) -> int:
    """Different beginnings of rows that some wanted token depends on: the fewest tokens that can be computed."""
    seen = set()
    for row, wanted in zip(batch.token_ids.tolist(), batch.response_mask.tolist(), strict=True):
        last = max((t for t, w in enumerate(wanted) if w), default=0)
        seen |= {tuple(row[:t]) for t in range(1, last + 1)}
    return len(seen)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_trees_have_the_gradient_of_the_padded_layout(seed: int, kind: str) -> None:
    """Also where a shared token is trained in one row and context in another. Mistral's window is 6 tokens."""
    batch = make_tree(seed)
    stream, packed = make_stream(*batch[:3]), make_stream(*batch[:3], share=False)
    fewest = distinct(batch)
    assert fewest <= stream.num_tokens < packed.num_tokens
    # what is not shared is less than 32 tokens where rows part
    assert stream.num_tokens - fewest <= 31 * (len(batch.token_ids) - 1)
    expected, got = (scored(kind, layout, batch) for layout in ("padded", "shared_prefix"))
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_close(got[2], expected[2], 1e-5)


def system_prompt_batch() -> Batch:
    """A system prompt of 40 tokens, prompts of 20 and 30 after it, two completions of 10 for each; and a row apart."""
    draw = torch.Generator().manual_seed(1)
    system, one, two, other, *ends = (torch.randint(1, 97, (n,), generator=draw) for n in (40, 20, 30, 50, *[10] * 5))
    for i, part in enumerate((one, two, other, *ends)):
        part[0] = i + 1
    system[0] = 1  # before the row apart in the order of tokens
    rows = [[system, one, ends[0]], [system, one, ends[1]], [system, two, ends[2]], [system, two, ends[3]]]
    rows.append([other, ends[4]])
    lengths = torch.tensor([sum(map(len, row)) for row in rows])
    prompts = lengths - 10
    ids = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], batch_first=True)
    places = torch.arange(ids.shape[1])
    attention = places < lengths[:, None]
    return Batch(ids, attention, attention & (places >= prompts[:, None]), torch.tensor([0, 0, 1, 1, 2]))


def test_groups_share_their_system_prompt() -> None:
    """All 40 tokens. Last tokens are not run: 40 + (20 + 9 + 9) + (30 + 9 + 9) + 59."""
    stream = make_stream(*system_prompt_batch()[:3])
    assert stream.lengths == [40, 20, 9, 9, 30, 9, 9, 59]
    assert stream.parents == [-1, 0, 1, 1, 0, 4, 4, -1]
    assert stream.num_tokens == 40 + 38 + 48 + 59
    assert stream.offsets == [0, 40, 60, 60, 40, 70, 70, 0]
    assert stream.family_ends == [126, 78, 69, 78, 126, 117, 126, 185]


def test_a_few_equal_tokens_are_no_node_and_a_short_prompt_of_a_group_is() -> None:
    batch = make_batch([(5, [40, 40, 40])], pad=0)
    batch.token_ids[2, 5] = 96  # the last in the order of tokens
    batch.token_ids[1, 5:30] = batch.token_ids[0, 5:30]  # 25 tokens that agree by chance
    assert make_stream(*batch[:3]).lengths == [5, 39, 39, 39]
    batch.token_ids[1, 30:40] = batch.token_ids[0, 30:40]  # 35 of them are worth it
    assert make_stream(*batch[:3]).lengths == [5, 35, 4, 4, 39]


def test_attempts_that_fork_share_their_short_prompt_and_their_first_turn() -> None:
    """A prompt of 20 tokens; two attempts, each a turn of 10, an answer of 5 and, twice from there, a turn of 6."""
    ids, prompt = torch.randint(3, 90, (4, 41), generator=torch.Generator().manual_seed(0)), torch.arange(20) + 3
    ids[:, 20], ids[:, 35] = torch.tensor([3, 3, 4, 4]), torch.arange(4) + 3  # where attempts, and branches, part
    ids[:, :20], ids[1, 20:35], ids[3, 20:35] = prompt, ids[0, 20:35], ids[2, 20:35]
    response = torch.zeros_like(ids, dtype=torch.bool)
    response[:, 35:] = True
    response[::2, 20:30] = True
    stream = make_stream(ids, torch.ones_like(response), response)
    assert stream.lengths == [20, 15, 5, 5, 15, 5, 5] and stream.parents == [-1, 0, 1, 1, 0, 4, 4]
    ids[:, 35] = torch.tensor([3, 4, 4, 3])  # the forks lie between the others
    assert make_stream(ids, torch.ones_like(response), response).lengths == stream.lengths


def test_rows_that_others_begin_with_cost_nothing() -> None:
    """Equal rows once; a row whose last wanted token lies inside another has no segment of its own."""
    batch = make_batch([(9, [30, 30, 30])], pad=0)
    batch.token_ids[1:] = batch.token_ids[0]
    batch.attention_mask[2, 20:] = batch.response_mask[2, 20:] = False
    stream = make_stream(*batch[:3])
    assert stream.lengths == [38] and len(stream.targets) == 30 + 30 + 11
    first, second = (stream.read[stream.targets // 39 == row] for row in (0, 2))
    assert first[:11].tolist() == second.tolist() == list(range(8, 19))


def seen(stream: TokenStream, window: int | None) -> Tensor:
    """(N, N) bool, who sees whom by FlexAttention's mask."""
    mask = cuda_attention._block_mask(stream, window, torch.device("cpu"))
    index = torch.arange(stream.num_tokens)
    visible: Tensor = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    return visible


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_sees_the_tokens_before_it_in_its_row_and_no_others(seed: int) -> None:
    batch = make_tree(seed)
    stream = make_stream(*batch[:3])
    rows, places = stream.source // stream.shape[1], stream.source % stream.shape[1]
    begins = [tuple(batch.token_ids[row, : place + 1].tolist()) for row, place in zip(rows, places, strict=True)]
    for token, visible in enumerate(seen(stream, None)):
        context = sorted((begins[i] for i in visible.nonzero().flatten().tolist()), key=len)
        assert context == [begins[token][:n] for n in range(1, len(begins[token]) + 1)]
    near = seen(stream, 20).sum(1)
    assert near.tolist() == [min(20, int(place) + 1) for place in places]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("seed", [0, 3, 4])
def test_attention_paths_agree_on_trees(seed: int, window: int | None) -> None:
    """The masked path against one dense mask, in double precision."""
    stream = make_stream(*make_tree(seed)[:3])
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(stream.num_tokens, h, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4)]
    weights, results = leaves.pop(), []

    def dense(q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None) -> Tensor:
        heads = (x.transpose(0, 1).repeat_interleave(4 // x.shape[1], 0) for x in (q, k, v))
        mask = seen(stream, window)
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)
        return out.transpose(0, 1)

    for way in (dense, attention.stream_attention):
        inputs = [x.clone().requires_grad_() for x in leaves]
        out = way(*inputs, stream, 0.3, window)
        results.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for ours in results[1:]:
        for got, expected in zip(ours, results[0], strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("window", [None, 100])
def test_blocks_from_trees_hide_nothing_that_is_seen(window: int | None) -> None:
    """Several blocks of 128 tokens: one that is left out has no visible pair, one that is called full has only such."""
    draw = torch.Generator().manual_seed(0)
    root, *rest = (torch.randint(1, 97, (n,), generator=draw) for n in (320, 288, 200, 140, 130, 300))
    for i, part in enumerate(rest):
        part[0] = i
    rows = [(root, rest[0], rest[2]), (root, rest[0], rest[3]), (root, rest[1]), (rest[4],)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([sum(map(len, row)) for row in rows])[:, None]
    stream = make_stream(ids, mask, mask & (torch.arange(ids.shape[1]) >= 310))
    assert stream.parents == [-1, 0, 1, 1, 0]  # the row apart is shorter than what is wanted
    blocks = cuda_attention._block_mask(stream, window, torch.device("cpu"))
    size = blocks.seq_lengths[0] // 128
    index = torch.arange(size * 128)
    dense = blocks.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    tiles = dense.view(size, 128, size, 128).transpose(1, 2).flatten(2)
    full = torch.zeros(size, size, dtype=torch.bool)
    for row, (number, columns) in enumerate(
        zip(blocks.full_kv_num_blocks[0, 0], blocks.full_kv_indices[0, 0], strict=True)
    ):
        full[row, columns[:number].long()] = True
    some = blocks.to_dense()[0, 0].bool()
    assert not (tiles.any(-1) & ~some).any() and not (full & ~tiles.all(-1)).any()
    if window is None:
        assert some.equal(tiles.any(-1)) and full.equal(tiles.all(-1))


def test_without_groups_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = attention.stream_attention
    monkeypatch.setattr(attention, "stream_attention", lambda q, *more: (seen.append(len(q)), original(q, *more))[1])
    batch = make_tree(2)
    policy = PolicyModel(build("qwen2", max_position_embeddings=512), layout="shared_prefix")
    with torch.no_grad():
        for groups in (None, batch.group_ids):
            policy(as_rows(*batch[:3], group_ids=groups))
    assert seen[0] == make_stream(*batch[:3], share=False).num_tokens
    assert seen[-1] == make_stream(*batch[:3]).num_tokens < seen[0]
