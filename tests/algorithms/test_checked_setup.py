"""What can't work is found at setup, before a model is loaded or an engine starts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.toys import quickstart_model

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded before the check")

    monkeypatch.setattr("lightrl.models.loading.load_model", loaded)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quickstart_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.mark.parametrize(("argument", "name"), [("reasoning_parser", "deepseek_r1"), ("tool_parser", "deepseek_v3")])
def test_a_parser_of_another_family(argument: str, name: str, path: str) -> None:
    pytest.importorskip("vllm")
    from lightrl.compat import vllm_parsers

    with pytest.raises(ValueError, match=f"^{argument}='{name}'"):
        getattr(vllm_parsers, argument)(name, AutoTokenizer.from_pretrained(path))
