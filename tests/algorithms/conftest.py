"""The model of tests that need a small one."""

from __future__ import annotations

from tests.toys import SMALL, model_fixture

model_path = model_fixture(**SMALL)
