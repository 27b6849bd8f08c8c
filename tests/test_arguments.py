"""Checks of arguments: what each accepts, and what its message says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.compat.arguments import (
    above,
    at_least,
    fraction,
    imported,
    instance_of,
    one_of,
    require_packages,
    whole_number,
)

NAN = float("nan")
MODULE = "tests.environments.plain_program"


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "message"),
    [
        (lambda x: at_least("A.x", x, 1), [1, 2.5], [0, NAN], "A.x={}: must be at least 1."),
        (lambda x: at_least("A.x", x, 1), [1], ["x", None, [1]], "A.x={}: must be at least 1."),
        (lambda x: at_least("A.x", x, 1), [1], [float("inf"), float("-inf")], "A.x={}: must be finite."),
        (lambda x: above("A.x", x), [1e-9], [0, -1, NAN], "A.x={}: must be above 0."),
        (lambda x: fraction("A.x", x), [0, 0.5, 1], [-0.1, 1.1, NAN], "A.x={}: must be in [0, 1]."),
        (lambda x: fraction("A.x", x, "(0, 1)"), [0.5], [0, 1], "A.x={}: must be in (0, 1)."),
        (
            lambda x: whole_number("A.x", x, 1),
            [1, 7],
            [0, 1.0, True, "1"],
            "A.x={}: must be at least 1, a whole number.",
        ),
        (
            lambda x: instance_of("A.x", x, int, str, or_none="for none"),
            [None, 1, "a"],
            [[]],
            "A.x={} (list): give an object of int or str, or of a class derived from it, or None for none.",
        ),
        (lambda x: one_of("A.x", x, "a", "b"), ["a", "b"], ["c"], "A.x={}: must be 'a' or 'b'."),
        (
            lambda x: above("A.x", x, 0, " seconds", or_none="for no limit"),
            [None, 1],
            [0],
            "A.x={}: must be above 0 seconds, or None for no limit.",
        ),
    ],
    ids=[
        "at_least",
        "no_number",
        "infinite",
        "above",
        "fraction",
        "open_fraction",
        "whole_number",
        "instance_of",
        "one_of",
        "or_none",
    ],
)
def test_a_value_comes_back_or_is_refused(
    check: Callable[[Any], Any], accepted: list[Any], refused: list[Any], message: str
) -> None:
    for value in accepted:
        assert check(value) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(message.format(repr(value)))}$"):
            check(value)


def test_a_class_in_place_of_an_object_is_told_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"A\.x=Path is a class: give an object, such as Path\(\)\."):
        instance_of("A.x", Path, Path)


def test_an_import_path_names_an_object_of_a_module_or_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("runs = []\n\ndef score():\n    return 1\n")
    assert imported("reward", f"{file}:score")() == 1
    assert imported("reward", f"{file}:runs") is imported("reward", f"{file}:runs")  # the file is run once
    assert imported("run:", f"{MODULE}:once") is imported("run:", f"{MODULE}.once")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact", "reward 'exact': give package.module:name.* Did you mean 'exact_match'?"),
        ("no_such.module:f", "there is no module 'no_such' on the Python path"),
        (f"{MODULE}:nothing", "has no 'nothing'. It has: .*once"),
        ("none.py:f", "there is no file none.py"),
    ],
)
def test_an_import_path_that_names_nothing_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        imported("reward", path, ["exact_match"])


def test_a_file_that_fails_is_run_again_when_it_is_mended(tmp_path: Path) -> None:
    (file := tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="running .*broken.py failed: ZeroDivisionError"):
        imported("reward", f"{file}:f")
    file.write_text("f = 1\n")
    assert imported("reward", f"{file}:f") == 1


def test_missing_packages_are_refused_with_the_command_that_installs_them() -> None:
    require_packages("Judge", "rewards", "json", "re")
    with pytest.raises(ValueError, match=r"Judge needs no_such_package: pip install 'lightrl-llm\[rewards\]'\."):
        require_packages("Judge", "rewards", "json", "no_such_package")
