"""A batch that mixes text, images and video gives what each row gives alone, in every layout, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.models.multimodal import marked_tokens, media_positions
from lightrl.models.packing.streams import make_stream
from lightrl.models.turns import placeholder_ids
from lightrl.records import RowBatch
from tests.rows import as_rows
from tests.vision.conftest import Batch, completed, film, mixed_rows, picture
from tests.vision.models import FAMILIES, QWEN

LAYOUTS = ("padded", "packed", "shared_prefix")


def mixed(folder: Any, copies: int = 3) -> Batch:
    prompts = folder.prompts(mixed_rows(folder.family))
    return completed(prompts, copies, next(iter(folder.processor.placeholders.values())))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_mixed_batch_are_as_alone_in_every_layout(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    batch, policies = mixed(folder), {layout: folder.policy(layout) for layout in LAYOUTS}
    count = len(batch.token_ids)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        alone = [batch.pick([i]).run(policies["padded"]).logprobs[0] for i in range(count)]
        assert min(float(row.min()) for row in alone) < -1
        for layout, policy in policies.items():
            for order in (list(range(count)), shuffled):
                part = batch.pick(order)
                out = part.run(policy).logprobs
                for row, i in zip(out, order, strict=True):
                    gap = (row[: len(alone[i])] - alone[i]).abs().max()
                    assert gap < 1e-5, (layout, i, float(gap))


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_a_row_is_what_the_model_itself_computes(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    rows = mixed_rows(family)[:4] + ([{"prompt": "<video>", "videos": [film(4)]}] if family in QWEN else [])
    prompts = folder.prompts([{"images": None, "videos": None} | row for row in rows])
    policy = folder.policy("packed")
    lm = folder.policy("padded").lm
    generator = torch.Generator().manual_seed(0)
    for tokens, inputs in zip(prompts.token_ids, prompts.inputs, strict=True):
        new = torch.randint(3, 50, (6,), generator=generator).tolist()
        ids = torch.tensor([tokens + new])
        mask = torch.ones_like(ids, dtype=torch.bool)
        response = mask.clone()
        response[:, : len(tokens)] = False
        extra = dict(inputs)
        if "mm_token_type_ids" in extra:
            extra["mm_token_type_ids"] = torch.cat([extra["mm_token_type_ids"], torch.zeros(1, 6, dtype=torch.long)], 1)
        with torch.no_grad():
            ours = policy(as_rows(ids, mask, response, inputs=[inputs])).logprobs[0, len(tokens) :]
            theirs = lm(input_ids=ids, **extra).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert (ours - theirs[len(tokens) - 1 :]).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_padded_layout_vision_tower_included(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    batch, gradients = mixed(folder), {}
    for layout in LAYOUTS:
        policy = folder.policy(layout)
        out = batch.run(policy, entropy=True)
        (out.logprobs.sum() + 0.1 * out.entropy.sum()).backward()
        gradients[layout] = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    padded = gradients["padded"]
    assert any("vis" in name and float(grad.abs().max()) > 1e-3 for name, grad in padded.items())
    scale = max(float(grad.norm()) for grad in padded.values())
    for layout in ("packed", "shared_prefix"):
        assert gradients[layout].keys() == padded.keys()
        for name, grad in padded.items():
            gap = float((gradients[layout][name] - grad).norm())
            # a key's bias has no effect on attention: its gradient is rounding alone
            assert gap <= 1e-5 * max(float(grad.norm()), 1e-3 * scale), (layout, name, gap / float(grad.norm()))


def test_pictures_of_rows_with_nothing_to_learn_leave_every_parameter_a_gradient(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP waits for each of them: of rows that were all truncated the stream is empty, and the tower does not run."""
    folder = folder_of(QWEN[0])
    batch, policy = mixed(folder), folder.policy("shared_prefix")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr("lightrl.models.multimodal.runs_on_all_ranks", lambda body: False)  # there is none
    batch._replace(response_mask=torch.zeros_like(batch.response_mask)).run(policy).logprobs.sum().backward()
    assert [n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2_vl", "padded"), ("qwen2_vl", "shared_prefix"), ("idefics3", "packed")]
)
def test_a_truncated_row_that_sampled_a_placeholder_changes_nothing(folder_of: Any, family: str, layout: str) -> None:
    folder = folder_of(family)
    batch, policy = mixed(folder), folder.policy(layout)
    row = next(i for i, inputs in enumerate(batch.inputs) if inputs)
    ids, mask = batch.token_ids.clone(), batch.response_mask.clone()
    ids[row, mask[row].nonzero()[-1]] = next(iter(placeholder_ids(policy.lm.config).values()))
    mask[row] = False
    with torch.no_grad():
        plain = batch._replace(response_mask=mask).run(policy).logprobs
        sampled = batch._replace(token_ids=ids, response_mask=mask).run(policy).logprobs
    torch.testing.assert_close(sampled, plain)
    assert bool(plain.any())


def test_equal_tokens_with_different_images_share_nothing(folder_of: Any) -> None:
    folder = folder_of("idefics3")
    prompts = folder.prompts([{"prompt": "it?", "image": picture(16, 16, seed)} for seed in (1, 2)])
    assert prompts.token_ids[0] == prompts.token_ids[1]
    batch = completed(prompts, 2, 5)._replace(group_ids=torch.zeros(4, dtype=torch.long))
    with torch.no_grad():
        alone = folder.policy("padded")
        expected = torch.cat([batch.pick([i]).run(alone).logprobs.sum(1) for i in range(4)])
        shared = batch.run(folder.policy("shared_prefix")).logprobs.sum(1)
    assert (shared - expected).abs().max() < 1e-4 and (expected[:2] - expected[2:]).abs().max() > 1e-2


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_the_models_own(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    body = folder.policy().lm.model
    prompts = folder.prompts(mixed_rows(family)[1:3])
    for tokens, inputs in zip(prompts.token_ids, prompts.inputs, strict=True):
        ids = torch.tensor([tokens + [9] * 5])
        types = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 5))
        own, _ = body.get_rope_index(ids, types, image_grid_thw=inputs["image_grid_thw"])
        found = media_positions(body, ids, [inputs])
        assert found is not None and torch.equal(found, own) and not torch.equal(own[1], own[2])


def test_text_after_a_long_video_comes_after_it(folder_of: Any) -> None:
    folder = folder_of("qwen2_5_vl")
    prompts = folder.prompts([{"prompt": "<video>?", "videos": [film(12)]}])
    found = media_positions(folder.policy().lm.model, torch.tensor(prompts.token_ids), prompts.inputs)
    assert found is not None
    types = prompts.inputs[0]["mm_token_type_ids"][0]
    last = int((types == 2).nonzero().max())
    assert int(found[:, 0, last + 1].min()) == int(found[:, 0, : last + 1].max()) + 1


def test_inputs_that_do_not_fit_are_rejected(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    policy, batch = folder.policy("shared_prefix"), mixed(folder, copies=1)

    def refused(row: int, inputs: dict[str, Any]) -> None:
        rows = [inputs if i == row else own for i, own in enumerate(batch.inputs)]
        with pytest.raises(ValueError):
            batch._replace(inputs=rows).run(policy)

    two = batch.inputs[2]
    first = int(two["image_grid_thw"][0].prod())
    refused(2, {**two, "pixel_values": two["pixel_values"][first:], "image_grid_thw": two["image_grid_thw"][1:]})
    refused(2, {**two, "image_grid_thw": two["image_grid_thw"].flip(0)})
    refused(1, two)


def test_too_few_features_of_a_row_are_refused_without_own_positions(folder_of: Any) -> None:
    folder = folder_of("llava")
    policy, batch = folder.policy(), mixed(folder, copies=1)
    rows = [{"pixel_values": row["pixel_values"][:1]} if row else {} for row in batch.inputs]
    with pytest.raises(ValueError, match="features"):
        batch._replace(inputs=rows).run(policy)


SYSTEM = "look at the picture with care and answer each question in few words. "


def question(text: str, *seeds: int) -> dict[str, Any]:
    return {"prompt": SYSTEM + text, "images": [picture(16, 24, seed) for seed in seeds]}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_groups_of_one_picture_run_it_once_and_have_the_gradient_of_the_padded_layout(
    folder_of: Any, family: str
) -> None:
    """Two questions about one picture, one about another, and two that part between the same two pictures."""
    folder = folder_of(family)
    long = "here is the first one of two that differ <image> and now "
    rows = [
        question("<image> " + "what does it show in the middle, say? " + "left?", 1),
        question("<image> " + "what does it show in the middle, say? " + "right?", 1),
        question("<image> " + "what does it show in the middle, say? " + "left?", 2),
        question(long + "the second <image>", 3, 4),
        question(long + "another one <image>", 3, 4),
    ]
    batch = completed(folder.prompts(rows), 2, next(iter(folder.processor.placeholders.values())))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    batch, towers, gradients = batch.pick(order), {}, {}
    for layout in ("padded", "shared_prefix"):
        policy = folder.policy(layout)
        tower = policy.lm.model.visual if family in QWEN else None
        tower = tower or getattr(policy.lm.model, "vision_model", None) or policy.lm.model.vision_tower
        run: list[int] = []
        first = next(m for m in tower.modules() if isinstance(m, torch.nn.Linear))
        first.register_full_backward_hook(lambda m, i, o, to=run: to.append(o[0].numel() // o[0].shape[-1]))
        out = batch.run(policy, entropy=True)
        (out.logprobs.sum() + 0.1 * out.entropy.sum()).backward()
        towers[layout] = sum(run)
        gradients[layout] = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    # padded: 2 x (1 + 1 + 1 + 2 + 2) pictures; else one for both questions, another, and two for each of the last two
    assert towers["shared_prefix"] * 14 == towers["padded"] * 6
    padded = gradients["padded"]
    scale = max(float(grad.norm()) for grad in padded.values())
    assert gradients["shared_prefix"].keys() == padded.keys()
    for name, grad in padded.items():
        gap = float((gradients["shared_prefix"][name] - grad).norm())
        assert gap <= 1e-5 * max(float(grad.norm()), 1e-3 * scale), (name, gap / float(grad.norm()))


def test_prefixes_end_before_pictures_that_differ_and_never_between_two(folder_of: Any) -> None:
    """All rows share the 77 tokens before their pictures."""
    folder = folder_of("idefics3")
    rows = [question("<image> and that <image> " + "what else is there? " * 3 + end, 1, 2) for end in ("left?", "up?")]
    rows += [question("<image> is it?", 5)]
    batch = completed(folder.prompts(rows), 2, 5)
    ids, spans = marked_tokens(folder.policy().lm.config, RowBatch(**batch._asdict()))
    stream = make_stream(ids, batch.attention_mask, batch.response_mask, spans=spans)
    ends = [offset + length for offset, length in zip(stream.offsets, stream.lengths, strict=True)]
    assert stream.lengths[0] == 77 and stream.parents[0] == -1 and stream.parents.count(0) == 2
    for first, last in spans.tolist():
        assert not any(first < ends[parent] <= last for parent in stream.parents if parent >= 0)
    assert sorted(row // 4 for row in stream.shown) == [0, 1]
