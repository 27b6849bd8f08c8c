"""What a class that replaces another on the command line starts from; lists as values; short names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from jsonargparse import ArgumentParser, _typehints

from lightrl.compat.jsonargparse import (
    copy_tried_dictionaries,
    keep_lists,
    prefer_own_names,
    start_from_own_defaults,
)


class Base:
    pass


class One(Base):
    def __init__(self, width: float = 0.2) -> None:
        self.width = width


class Other(Base):
    def __init__(self, width: float = 3.0) -> None:
        self.width = width


def parsed(*args: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Base, default=None)
    return parser.parse_args(list(args)).part.init_args.width


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _typehints.discard_init_args_on_class_path_change
    monkeypatch.setattr(_typehints, "discard_init_args_on_class_path_change", getattr(function, "wrapped", function))


@pytest.mark.usefixtures("restored")
def test_a_new_class_starts_from_its_own_defaults() -> None:
    start_from_own_defaults(Base)
    start_from_own_defaults(Base)  # wraps once
    one, other = f"{__name__}.One", f"{__name__}.Other"
    assert parsed("--part", one, "--part.width", "0.2", "--part", other) == 3.0
    assert parsed("--part", one, "--part.width", "0.7") == 0.7
    assert parsed("--part", other, "--part.width", "0.7") == 0.7


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


def test_a_short_name_that_a_dependency_has_too_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Callback

    from lightrl.callbacks import ThroughputMonitor  # loads it: packages import their modules lazily

    paths = _typehints.get_all_subclass_paths
    monkeypatch.setattr(_typehints, "get_all_subclass_paths", getattr(paths, "wrapped", paths))
    with pytest.raises(ValueError, match="Multiple subclasses"):  # else the wrapper may go
        _typehints.resolve_class_path_by_name(Callback, "ThroughputMonitor")
    prefer_own_names()
    prefer_own_names()  # wraps once
    found = _typehints.resolve_class_path_by_name(Callback, "ThroughputMonitor")
    assert _typehints.import_object(found) is ThroughputMonitor


@dataclass
class Rows:
    path: str
    options: dict[str, Any] = field(default_factory=dict)


class Named:
    def __init__(self, rows: Rows | dict[str, Rows]) -> None:
        self.rows = rows


def named_rows() -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Named, "named")
    rows = {"a": {"path": "1"}, "b": {"path": "2"}}
    config = {"named": {"class_path": f"{__name__}.Named", "init_args": {"rows": rows}}}
    return parser.instantiate(parser.parse_object(config)).named.rows


def test_dictionaries_of_dataclasses_are_copied_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _typehints.pristine_value
    monkeypatch.setattr(_typehints, "pristine_value", getattr(function, "wrapped", function))
    with pytest.raises(Exception, match=r"Expected a <class 'dict'>. Got value: Namespace\(\)"):
        named_rows()  # when this passes, jsonargparse has changed, and the wrapper may go
    copy_tried_dictionaries()
    copy_tried_dictionaries()  # wraps once
    assert named_rows() == {"a": Rows("1"), "b": Rows("2")}
