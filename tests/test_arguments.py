"""Checks of arguments, import paths, and optional packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.compat.arguments import above, at_least, bearer_token, fraction, imported, one_of, require_packages

NAN, INF = float("nan"), float("inf")
MODULE = "tests.environments.plain_program"


@pytest.mark.parametrize(
    ("check", "accepted", "rejected"),
    [
        (lambda x: at_least("A.x", x, 1), [1, 2.5], [0, NAN, INF, "x", None, [1]]),
        (lambda x: above("A.x", x), [1e-9], [0, -1, NAN]),
        (lambda x: above("A.x", x, or_none="for no limit"), [None, 1], [0]),
        (lambda x: fraction("A.x", x), [0, 0.5, 1], [-0.1, 1.1, NAN]),
        (lambda x: fraction("A.x", x, "(0, 1)"), [0.5], [0, 1]),
        (lambda x: one_of("A.x", x, "a", "b"), ["a", "b"], ["c", None]),
    ],
    ids=["at_least", "above", "or_none", "fraction", "open_fraction", "one_of"],
)
def test_a_value_comes_back_or_is_rejected_by_name(
    check: Callable[[Any], Any], accepted: list[Any], rejected: list[Any]
) -> None:
    for value in accepted:
        assert check(value) == value
    for value in rejected:
        with pytest.raises(ValueError, match=r"^A\.x="):
            check(value)


def test_an_import_path_names_an_object_of_a_module_or_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("runs = []\n\ndef score():\n    return 1\n")
    assert imported("reward", f"{file}:score")() == 1
    assert imported("reward", f"{file}:runs") is imported("reward", f"{file}:runs")  # the file is run once
    assert imported("run:", f"{MODULE}:once") is imported("run:", f"{MODULE}.once")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact", "'exact'"),
        ("no_such.module:f", "'no_such.module:f'.*ModuleNotFoundError"),
        (f"{MODULE}:nothing", "'nothing'.*once"),
        ("none.py:f", "'none.py:f'.*FileNotFoundError"),
    ],
)
def test_an_import_path_that_names_nothing_is_rejected(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        imported("reward", path)


def test_a_file_that_fails_is_run_again_after_a_fix(tmp_path: Path) -> None:
    (file := tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="broken.py.*ZeroDivisionError"):
        imported("reward", f"{file}:f")
    file.write_text("f = 1\n")
    assert imported("reward", f"{file}:f") == 1


def test_missing_packages_are_rejected_with_the_command_that_installs_them() -> None:
    require_packages("Judge", "rewards", "json", "re")
    with pytest.raises(ValueError, match=r"Judge: .*no_such_package.* pip install 'lightrl-llm\[rewards\]'\."):
        require_packages("Judge", "rewards", "json", "no_such_package")


def test_a_token_that_no_header_can_hold_is_not_shown() -> None:
    assert bearer_token("key", "") is None and bearer_token("key", "sk-1") == "sk-1"
    with pytest.raises(ValueError, match="^key") as error:
        bearer_token("key", "hunter2\n")
    assert "hunter2" not in str(error.value)
