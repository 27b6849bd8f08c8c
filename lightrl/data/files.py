"""Readers of JSONL, JSON, and CSV files that preserve values. Errors name the line.

The readers of `datasets` infer types: "2024-01-01" becomes a date, "007" the number 7, and 2 becomes 2.0 if another
example has a fraction. A reward function that compares answers would then reject correct ones.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_info

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Builder names in `datasets` by file suffix."""

T = TypeVar("T")


class BrokenFileError(ValueError):
    """A data file can't be read. The message names the file and the line."""


class FileRows(Sequence[Any]):
    """Rows of files in memory. JSONL lines are decoded on access.

    Args:
        rows: JSON lines or dictionaries.
        column_names: Names of all columns, of which a row may lack some.
    """

    def __init__(self, rows: Sequence[bytes | dict[str, Any]], column_names: Sequence[str]) -> None:
        self._rows = rows
        self.column_names = list(column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        row = self._rows[number]
        return json.loads(row) if isinstance(row, bytes) else row

    def select(self, numbers: Iterable[int]) -> FileRows:
        """Returns the rows with these indices."""
        return FileRows([self._rows[number] for number in numbers], self.column_names)


def read_files(files: Sequence[str], sep: str = ",") -> FileRows:
    """Reads and validates all rows of files.

    Args:
        files: JSONL, JSON, or CSV files, optionally gzipped. CSV cells are strings, or None if empty.
        sep: Separator of CSV cells.

    Raises:
        ValueError: If a file is invalid. The message names the file and the line.
    """
    rows: list[bytes | dict[str, Any]] = []
    columns: dict[str, None] = {}
    for file in files:
        for _, raw, row in _entries(Path(file), sep):
            columns.update(dict.fromkeys(row))
            rows.append(raw or row)
    return FileRows(rows, list(columns))


def iterate_files(files: Sequence[str], sep: str = ",") -> Iterator[dict[str, Any]]:
    """Iterates over the rows of `read_files`."""
    for file in files:
        yield from (row for _, _, row in _entries(Path(file), sep))


def nth_line(file: Path, row: int) -> int | None:
    """Returns the line (from 1) of a row (from 0) in a JSONL file, or None for other files."""
    if suffix_of(file) != ".jsonl":
        return None
    return next((line for line, _, _ in islice(_entries(file, ","), row, None)), None)


def suffix_of(file: str | Path) -> str:
    """Returns a file's lowercase suffix, without the `.gz` of text files."""
    name = Path(str(file).lower())
    inner = Path(name.stem).suffix
    return inner if name.suffix == ".gz" and inner in (".json", ".jsonl", ".csv") else name.suffix


def one_line(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line of at most 300 characters."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def with_progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Iterates over items and logs progress every ten seconds."""
    last = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            rank_zero_info(f"{label}: read {count:,} of {len(items):,} examples.")
        yield item


def _entries(file: Path, sep: str) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yields (line number, text if the row is one JSON line, row)."""
    with file.open("rb") as start:
        packed = start.read(2) == b"\x1f\x8b"
    line = 0
    opened: Any
    try:
        with gzip.open(file) if packed else file.open("rb") as opened:
            if suffix_of(file) == ".csv":
                text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
                for line, row in _cells(text, sep):
                    yield line, b"", row
                return
            if suffix_of(file) == ".json":
                content = opened.read()
                whole = _whole(content)
                if whole is not None:
                    yield from ((0, b"", _columns(row)) for row in whole)
                    return
                opened = io.BytesIO(content)
            for line, raw in enumerate(opened, 1):
                if not raw.isspace():
                    row = _columns(json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8")))
                    yield line, raw if line > 1 else b"", row
    except (ValueError, RecursionError, OSError, EOFError, csv.Error) as error:
        at = getattr(error, "line", line)
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]  # causes of JSON errors are internal
        raise BrokenFileError(f"{file}, line {at}: {what}. Fix or remove it.") from error


def _whole(content: bytes) -> list[Any] | None:
    """Returns the rows of a file with one JSON array or object, or None if it has one object per line."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        first = content.split(b"\n", 1)[0]
        if content.lstrip()[:1] == b"{" and first.rstrip().endswith(b"}"):
            return None
        error.line = error.lineno  # type: ignore[attr-defined]
        raise
    return value if isinstance(value, list) else [value]


def _columns(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or not row:
        raise ValueError(f'{json.dumps(row)[:80]} is not an example. Use an object such as {{"prompt": "..."}}')
    return row


def _cells(text: Iterable[str], sep: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row) of a CSV file."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(text, strict=True, delimiter=sep)
    header = next((cells for cells in reader if cells), [])
    header = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
    if len(set(header)) < len(header):
        raise _at(reader, f"two columns have the same name, in {header}")
    try:
        for cells in reader:
            if len(cells) == len(header):
                yield reader.line_num, {name: cell or None for name, cell in zip(header, cells, strict=True)}
            elif cells:
                raise _at(reader, f"{len(cells)} cells, but the header has {len(header)}. Quote cells with {sep!r}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise _at(reader, one_line(error)) from error


def _at(reader: Any, message: str) -> ValueError:
    error = ValueError(message)
    error.line = reader.line_num  # type: ignore[attr-defined]
    return error
