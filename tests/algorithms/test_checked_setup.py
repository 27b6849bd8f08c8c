"""What can't work is found at setup, before a model is loaded or an engine starts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrl.algorithms import RewardLightningModule, SFTLightningModule
from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
from lightrl.data.sft import SFTDataModule, SFTSource
from tests.toys import quickstart_model, quiet_trainer

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
SFT = SFTDataModule(SFTSource(rows=[{"prompt": "1", "completion": "2"}]), batch_size=1)
PAIR = {"prompt": "1", "chosen": "2", "rejected": "3"}


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded before the check")

    monkeypatch.setattr("lightrl.models.loading.load_model", loaded)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quickstart_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, path: str) -> str:
    """A tokenizer with a token that the model has no embedding for."""
    folder = tmp_path_factory.mktemp("larger")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (SFTLightningModule, lambda path: SFTDataModule(SFT.train, batch_size=1, tokenizer=path)),
        (
            RewardLightningModule,
            lambda path: PreferenceDataModule(PreferenceSource(rows=[PAIR]), batch_size=1, tokenizer=path),
        ),
    ],
)
def test_a_tokenizer_larger_than_the_model(kind: Any, data: Any, path: str, larger: str) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer=.*<tool>.* \(32\)"):
        quiet_trainer().fit(kind(path), data(larger))


@pytest.mark.parametrize(("argument", "name"), [("reasoning_parser", "deepseek_r1"), ("tool_parser", "deepseek_v3")])
def test_a_parser_of_another_family(argument: str, name: str, path: str) -> None:
    pytest.importorskip("vllm")
    from lightrl.compat import vllm_parsers

    with pytest.raises(ValueError, match=f"^{argument}='{name}'"):
        getattr(vllm_parsers, argument)(name, AutoTokenizer.from_pretrained(path))
