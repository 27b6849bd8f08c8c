"""JSON and CSV files as data sets whose values are those of the file: what is text there stays text.

The readers of `datasets` and pandas guess: "2024-01-01" becomes a date, "007" a 7, "1.50" a 1.5, "None" nothing, and 2
a 2.0 where another row holds a fraction. A reward function that compares answers then finds every right one wrong.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import pyarrow as pa
from datasets import ArrowBasedBuilder, BuilderConfig, DatasetInfo, Features, SplitGenerator, Value
from datasets.builder import Key
from datasets.features.features import register_feature

from lightrl.data.files import file_rows, is_csv

VERSION = "1"
"""Part of the cache's name: with another one all files are read anew."""

_MARK = "\x1e"
_DEEPEST = 50
_BATCH = 1000
_KINDS = {bool: "bool", int: "int64", float: "float64", str: "string", list: "list", dict: "object"}
_PLAIN = ("bool", "int64", "float64", "string")


@dataclass
class AnyValue:
    """A column of lists, objects, or numbers of several kinds: stored as JSON, given back as it was."""

    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="LightRLAnyValue", init=False, repr=False)

    def __call__(self) -> Any:
        """The Arrow type of what is stored."""
        return self.pa_type

    def encode_example(self, value: Any) -> str | None:
        """What is stored for a value; what is stored already stays."""
        if value is None or (isinstance(value, str) and value.startswith(_MARK)):
            return value
        return _MARK + json.dumps(value, ensure_ascii=False)

    def decode_example(self, value: str | None, token_per_repo_id: Any = None) -> Any:
        """The value."""
        return None if value is None else json.loads(value.removeprefix(_MARK))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it may change
    register_feature(AnyValue, "LightRLAnyValue")


@dataclass
class _Config(BuilderConfig):
    features: Features | None = None
    sep: str = ","


class FileTables(ArrowBasedBuilder):
    """Makes a data set of local files; `datasets` caches it by their names, times and columns."""

    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=self.config.features)

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        splits = self.config.data_files.items()
        return [SplitGenerator(name=name, gen_kwargs={"files": list(files)}) for name, files in splits]

    def _generate_shards(self, files: Sequence[str]) -> Iterator[str]:
        yield from files

    def _generate_tables(self, files: Sequence[str]) -> Iterator[tuple[Key, pa.Table]]:
        for shard, file in enumerate(files):
            rows, number = file_rows(file, self.config.sep), 0
            while batch := [row for _, row in islice(rows, _BATCH)]:
                yield Key(shard, number), self._table(batch, is_csv(file))
                number += 1

    def _table(self, rows: Sequence[Mapping[str, Any]], csv: bool) -> pa.Table:
        columns = {}
        for name, feature in self.config.features.items():
            values = [row.get(name) for row in rows]
            if csv and feature != Value("string"):
                values = [None if cell is None else json.loads(cell) for cell in values]
            if isinstance(feature, AnyValue):
                values = [feature.encode_example(value) for value in values]
            columns[name] = pa.array(values, type=feature())
        return pa.table(columns)


def columns_of(files: Sequence[str], sep: str = ",") -> Features:
    """The columns of some files and their types, after a look at every row.

    A column of JSON has the type of its values; lists, objects and numbers of several kinds are kept as they are. One
    of CSV holds numbers only where every cell is written as Python writes that number, else text.

    Args:
        files: all of JSON, or all of CSV.
        sep: what stands between the cells of a CSV file.

    Raises:
        ValueError: a broken file, a column that mixes text with numbers, or CSV files with different columns.
    """
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    csv = is_csv(files[0])
    for file in files:
        for count, (line, row) in enumerate(file_rows(file, sep)):
            if csv and count == 0 and found and set(row) != set(found):
                raise ValueError(
                    f"{file} has the columns {list(row)}, and {files[0]} has {list(found)}: the files of one data set "
                    "need the same columns."
                )
            for name, value in row.items():
                kinds = found.setdefault(name, {})
                kind = _kind(value) if not csv else "string" if "string" in kinds else _cell_kind(value)
                if kind not in kinds:
                    kinds[kind] = f"{file}, line {line}" if line else f"{file}, row {count}", value
                if kind in ("list", "object") and _is_deep(value):
                    raise ValueError(
                        f"{file}, {f'line {line}' if line else f'row {count}'}, column {name!r}: nested more than "
                        f"{_DEEPEST} levels deep. Write the value as text, in quotes."
                    )
    return Features({name: _feature(name, kinds, csv) for name, kinds in found.items()})


def _feature(name: str, kinds: Mapping[str, tuple[str, Any]], csv: bool) -> Any:
    """The type of a column, by what is in it: kind -> (where it stands first, the value)."""
    held = [kind for kind in kinds if kind != "null"]
    if csv and "string" in held:
        return Value("string")
    others = [kind for kind in held if kind in ("bool", "int64", "big", "float64")]
    if "string" in held and others:
        (text_place, text), (place, value) = kinds["string"], kinds[others[0]]
        shown = json.dumps(value)[:80]
        raise ValueError(
            f"{place}, column {name!r}: {shown} is no text, and {json.dumps(text)[:80]} ({text_place}) is: a column "
            f'holds one of the two. Write all its values as text, here "{shown}".'
        )
    if len(held) == 1 and held[0] in _PLAIN:
        return Value(held[0])
    return AnyValue() if held else Value("null")


def _kind(value: Any) -> str:
    """What a value of JSON is."""
    kind = _KINDS.get(type(value), "null")
    return "big" if kind == "int64" and not -(2**63) <= value < 2**63 else kind


def _cell_kind(cell: str | None) -> str:
    """What a cell of CSV is: a number where it is written as Python writes that number, so that nothing is lost."""
    if cell is None:
        return "null"
    try:
        if str(int(cell)) == cell:
            return "int64" if len(cell) < 19 else "string"
    except ValueError:
        pass
    try:
        number = float(cell)
    except ValueError:
        return "string"
    return "float64" if math.isfinite(number) and repr(number) == cell else "string"


def _is_deep(value: Any) -> bool:
    """Whether lists and objects stand in one another more than so many levels."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, list | dict)]
        if not level:
            return False
    return True
