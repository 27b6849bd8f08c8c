"""The model of tests that need a small one."""

from __future__ import annotations

import pytest

from tests.algorithms.toys import SMALL
from tests.toys import quickstart_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quickstart_model(tmp_path_factory.mktemp("model"), **SMALL)
