"""Two gloo ranks: weights read part by part are those of the files, and rows that share a stream learn what they did.

Run as a module, the file is what each of the two does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightrl.compat.transformers_models import transformer_blocks
from lightrl.models.folders import fill_shards
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.reward import ValueModel
from lightrl.models.spec import LoraSpec, ModelSpec
from tests import forks
from tests.rows import as_rows
from tests.toys import quickstart_model


def rows_of(rank: int | None, case: str) -> dict[str, torch.Tensor]:
    """Unequal rows of two ranks, or of both: groups of one prompt; in `idle` the second has nothing to learn from."""
    generator = torch.Generator().manual_seed(3)
    lengths, prompts = [19, 12, 7, 7, 5], [4, 4, 4, 2, 2]
    ids = torch.randint(3, 20, (5, 19), generator=generator)
    ids[1, :4] = ids[2, :4] = ids[0, :4]
    ids[4, :2] = ids[3, :2]
    positions = torch.arange(19)
    mask = positions < torch.tensor(lengths)[:, None]
    response = mask & (positions >= torch.tensor(prompts)[:, None])
    response[3:] &= case != "idle"
    weights = torch.randn(5, 19, generator=generator)
    groups = torch.tensor([0, 0, 0, 1, 1])
    rows = {"ids": ids * mask, "mask": mask, "response": response, "groups": groups, "weights": weights}
    own = {None: slice(None), 0: slice(0, 3), 1: slice(3, 5)}[rank]
    width = {None: 19, 0: 19, 1: 9}[rank]  # ranks pad to their own longest row
    return {name: x[own, :width] if x.dim() == 2 else x[own] for name, x in rows.items()}


def learn(policy: Any, critic: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probs, entropies and values side by side; their weighted sum has gone backward."""
    arguments = (rows["ids"], rows["mask"], rows["response"])
    out = policy(as_rows(*arguments, group_ids=rows["groups"]), entropy=True)
    values = critic(as_rows(*arguments, group_ids=rows["groups"]))
    both = out.logprobs + 0.3 * out.entropy + 0.7 * values
    (both * rows["weights"]).sum().backward()
    return torch.stack([out.logprobs, out.entropy, values]).detach()


def models(path: str, layout: Any, checkpointing: bool, in_shards: bool = False) -> tuple[Any, Any]:
    spec = ModelSpec(path, layout=layout, gradient_checkpointing=checkpointing)
    torch.manual_seed(5)
    policy = PolicyModel(load_causal_lm(spec, trainable=True, in_shards=in_shards), layout=layout)
    return policy, ValueModel.from_spec(spec, in_shards=in_shards)


CASES = [("shared_prefix", False, "all"), ("packed", True, "all"), ("shared_prefix", False, "idle")]


def main(rank: int, folder: Path) -> None:
    """One of two ranks: compares with what one process loads and computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in ("tied", "untied"):
        whole = models(str(folder / name), "packed", False)
        parts = models(str(folder / name), "packed", False, in_shards=True)
        for expected, model in zip(whole, parts, strict=True):
            of_files = [n for n, p in model.named_parameters() if p.is_meta]
            assert len(of_files) == sum("value_head" not in n for n, _ in model.named_parameters())
            for block in transformer_blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            fill_shards(model, torch.device("cpu"))
            loaded = dict(model.named_parameters())
            assert loaded.keys() == dict(expected.named_parameters()).keys()
            for key, parameter in expected.named_parameters():
                assert loaded[key].to_local().numel() < parameter.numel() or parameter.shape[0] == 1
                assert torch.equal(loaded[key].full_tensor(), parameter), key
        head = parts[0].lm.get_output_embeddings().weight
        assert (head is parts[0].lm.get_input_embeddings().weight) == (name == "tied")
        assert parts[0].lm.generation_config.to_dict() == whole[0].lm.generation_config.to_dict()
        rows, results = rows_of(rank, "all"), []
        for policy, critic in (whole, parts):  # what was read is what is computed with, and learnt from
            results.append(learn(policy, critic, rows))
        torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)
        for expected, model in zip(whole, parts, strict=True):
            for (key, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
                dist.all_reduce(a.grad)
                torch.testing.assert_close(b.grad.full_tensor() * 2, a.grad, atol=2e-6, rtol=1e-5, msg=key)
    for name in ("tied", "untied"):
        for layout, checkpointing, case in CASES:
            alone, spread = (models(str(folder / name), layout, checkpointing) for _ in range(2))
            expected = learn(*alone, rows_of(None, case))
            for model in spread:
                model.stream.group = dist.group.WORLD
            rows = rows_of(rank, case)
            ours = learn(*spread, rows)
            mine = expected[:, :3, :] if rank == 0 else expected[:, 3:, : rows["ids"].shape[1]]
            torch.testing.assert_close(ours, mine, atol=1e-5, rtol=1e-5)
            assert case != "idle" or rank == 0 or not ours.any()
            for a, b in zip(alone, spread, strict=True):
                for (key, one), two in zip(a.named_parameters(), b.parameters(), strict=True):
                    gradient = two.grad.clone()
                    dist.all_reduce(gradient)
                    whole = torch.equal(gradient, two.grad) and bool(gradient.any())
                    assert not whole or ".layers." not in key or case == "idle", "each rank has a part of the sum"
                    torch.testing.assert_close(gradient, one.grad, atol=1e-5, rtol=1e-5, msg=key)
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_read_parts_and_share_streams(tmp_path: Path) -> None:
    quickstart_model(tmp_path / "tied", num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=67)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}  # one key-value head for two ranks
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, tie_word_embeddings=False, **heads
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "untied", max_shard_size="20KB")
    forks.ranks(__name__, str(tmp_path))


def test_what_cannot_be_read_in_parts_is_loaded_whole(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path / "model", num_hidden_layers=1)

    def is_meta(**spec: Any) -> bool:
        lm = load_causal_lm(ModelSpec(path, **spec), trainable=True, in_shards=True)
        return any(p.is_meta for p in lm.parameters())

    assert is_meta() and is_meta(dtype="bfloat16", freeze=["*embed*"])
    assert not is_meta(random_init=True) and not is_meta(kwargs={"attn_implementation": "sdpa"})
    assert not is_meta(lora=LoraSpec(r=2))
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = MixtralConfig(vocab_size=67, num_key_value_heads=2, num_local_experts=2, **sizes)
    written = MixtralForCausalLM(experts)
    path = str(tmp_path / "experts")
    written.save_pretrained(path)  # each expert under a name of its own, which the model holds as one parameter
    assert not is_meta()
    read = load_causal_lm(ModelSpec(path), trainable=True, in_shards=True)
    assert all(torch.equal(p, written.get_parameter(name)) for name, p in read.named_parameters())


if __name__ == "__main__":
    main(int(os.environ["LOCAL_RANK"]), Path(sys.argv[1]))
