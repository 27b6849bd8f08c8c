"""Lazy defaults, and what a class that replaces another on the command line starts from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser, _typehints, lazy_instance

from lightrl.compat.jsonargparse import deferred, keep_lists, realized, start_from_own_defaults


class Base:
    pass


class One(Base):
    def __init__(self, width: float = 0.2) -> None:
        self.width = width


class Other(Base):
    def __init__(self, width: float = 3.0) -> None:
        self.width = width


@pytest.mark.parametrize("lazy", [deferred, lazy_instance])
def test_a_deferred_default_becomes_the_object_it_stands_for(lazy: Any) -> None:
    made = realized(lazy(One, width=0.5), "part", Base)
    assert type(made) is One
    assert made.width == 0.5
    plain = One()
    assert realized(plain, "part", Base) is plain


def parsed(*args: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Base, default=deferred(One))
    return parser.parse_args(list(args)).part.init_args.width


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _typehints.discard_init_args_on_class_path_change
    monkeypatch.setattr(_typehints, "discard_init_args_on_class_path_change", getattr(function, "wrapped", function))


@pytest.mark.usefixtures("restored")
def test_jsonargparse_hands_a_new_class_the_others_arguments() -> None:
    """Where this fails, jsonargparse has changed, and the wrapper may go."""
    assert parsed("--part", f"{__name__}.One", "--part", f"{__name__}.Other") == 0.2


@pytest.mark.usefixtures("restored")
def test_a_new_class_starts_from_its_own_defaults() -> None:
    start_from_own_defaults(Base)
    start_from_own_defaults(Base)  # wraps once
    one, other = f"{__name__}.One", f"{__name__}.Other"
    assert parsed("--part", one, "--part", other) == 3.0
    assert parsed("--part", one, "--part.width", "0.7") == 0.7
    assert parsed("--part", other, "--part.width", "0.7") == 0.7


def test_importing_the_package_builds_no_parser(root: Path) -> None:
    """jsonargparse's `lazy_instance` does, for each default: half of the time of the import."""
    code = (
        "import jsonargparse\ndef refuse(*arguments, **options): raise AssertionError('a parser is built')\n"
        "jsonargparse.ArgumentParser.__init__ = refuse\nimport lightrl.algorithms, lightrl.rollout, lightrl.callbacks"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr


def dumped(rows: list[Any]) -> str:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rows", type=Callable[[], Any] | list[Any])
    return parser.dump(parser.parse_object({"rows": rows}))


def test_a_list_where_a_function_may_stand_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _typehints.serialize_as_import_path
    monkeypatch.setattr(_typehints, "serialize_as_import_path", getattr(function, "wrapped", function))
    with pytest.warns(UserWarning, match="Unable to serialize"):  # else jsonargparse has changed: the wrapper may go
        dumped([{"a": 1}])
    keep_lists()
    keep_lists()  # wraps once
    assert dumped([{"a": 1}]) == "rows:\n- a: 1\n"
