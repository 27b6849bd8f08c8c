"""What every test shares: one thread, no network, a scratch cache, and the quickstart's model folder."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

# Before torch, transformers and datasets are imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), f"lightrl-tests-{os.getuid()}"))
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `long`, unless it is asked for, and begins with the files that take long."""
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    # The files that take long come first: one of them that came last would leave the other worker idle.
    late = {item.path for item in items} - {
        item.path for item in items if any(item.get_closest_marker(name) for name in ("vllm", "slow", "distributed"))
    }
    items.sort(key=lambda item: item.path in late)


def pytest_collection_finish() -> None:
    """Saves time: garbage collections skip what imports made; transformers formats no configuration for its log."""
    gc.collect()
    gc.freeze()
    if "transformers" in sys.modules:
        sys.modules["transformers"].PretrainedConfig.__repr__ = object.__repr__


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    """vLLM in this process changes the number of threads; a test must not depend on which ran before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


# Left in `os.environ` by Lightning's launchers: a command started afterwards would take itself for one of their ranks.
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_rank_of_an_earlier_test() -> None:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _secrets_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test has remembered as secret, such as the word itself, is none in the texts of the next one."""
    from lightrl.checkpoints import redaction

    monkeypatch.setattr(redaction, "_secrets", set(redaction._secrets))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The quickstart's model folder: a 0.45 M-parameter Qwen2 configuration and a character tokenizer, no weights."""
    return ROOT / "configs" / "quickstart" / "model"


@pytest.fixture(scope="session")
def side_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model, also for vLLM in subprocesses."""
    from tests.toys import quickstart_model

    folder = tmp_path_factory.mktemp("side_model")
    return quickstart_model(folder, num_hidden_layers=1, intermediate_size=64)  # heads of 32, which vLLM can do


@pytest.fixture()
def tokenizer(model_dir: Path) -> Any:
    """The quickstart's character tokenizer, a new object for each test."""
    from lightrl.data.templates import load_tokenizer

    return load_tokenizer(str(model_dir))
