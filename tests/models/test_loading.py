"""Loading: errors before anything heavy, frozen parameters, dropout, random weights, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightrl.models.loading import _switch_dropout_off, load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from tests.models.conftest import Batch
from tests.rows import as_rows
from tests.toys import build


@pytest.fixture
def folder(tmp_path: Path) -> str:
    build("qwen2", attention_dropout=0.3).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_dropout_does_nothing_in_training_mode(folder: str, batch: Batch) -> None:
    lm = load_causal_lm(ModelSpec(folder), trainable=True)
    assert lm.training and lm.dtype == torch.float32
    for layout in ("padded", "shared_prefix"):
        policy = PolicyModel(lm, layout=layout)  # type: ignore[arg-type]
        assert policy(as_rows(*batch[:3])).logprobs.equal(policy(as_rows(*batch[:3])).logprobs)


def test_batch_norms_keep_their_statistics_in_training_mode() -> None:
    """As in Granite Speech: with the statistics of a batch, log-probs would depend on its other rows."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    _switch_dropout_off(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 3)
    torch.testing.assert_close(model.train()(x), x / (1 + 1e-5) ** 0.5)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_freezing(folder: str) -> None:
    assert not any(p.requires_grad for p in load_causal_lm(ModelSpec(folder), trainable=False).parameters())
    lm = load_causal_lm(ModelSpec(folder, freeze=["*embed_tokens*", "model.layers.0.*"]), trainable=True)
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trained and not any("embed" in name or "layers.0" in name for name in trained)
    with pytest.raises(ValueError, match=r"freeze=\['nothing'\]"):
        load_causal_lm(ModelSpec(folder, freeze=["nothing"]), trainable=True)


def test_random_weights_need_a_configuration_only_and_follow_the_seed(folder: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((Path(folder) / "config.json").read_text())
    spec = ModelSpec(str(bare), random_init=True, dtype="bfloat16")
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(load_causal_lm(spec, trainable=True).model.layers[0].mlp.up_proj.weight)
    assert models[0].dtype == torch.bfloat16
    assert models[0].equal(models[1]) and not models[0].equal(models[2])
