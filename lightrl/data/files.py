"""Reads and validates data files; errors name the file, the line, what is wrong there and what to do.

The readers of `datasets` tell neither the line nor the column, and let some damage pass: bytes that are no text become
question marks, of two equal headers one is renamed, a line of CSV that is too short gets empty cells, and text that
looks like a number or a date becomes one.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file -> how `datasets` calls its kind."""

PROGRESS_SECONDS = 10.0
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_OTHER_KINDS = {b"PK\x03\x04": "a ZIP archive", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}


def require_readable(path: Path) -> None:
    """Raises a `ValueError` where a JSON, JSONL, CSV or Parquet file is broken or holds no rows.

    Lines are looked at one by one, at some hundred thousand a second; a file compressed by gzip is unpacked on the way.
    """
    if suffix_of(path) == ".parquet":
        return _check_parquet(path)
    for _ in file_rows(path):
        pass


def file_rows(file: str | Path, sep: str = ",") -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a JSON, JSONL or CSV file as they stand there, each with its line.

    Args:
        file: whose suffix tells its form; it may be compressed by gzip.
        sep: what stands between the cells of a CSV file.

    Yields:
        number (from 1) of the line that a row ends in, 0 in a file that is one JSON text; and the row. The cells of a
        CSV file are text, empty ones None.

    Raises:
        ValueError: the file is broken or holds no rows.
    """
    path = Path(file)
    with path.open("rb") as opened:
        start = opened.read(6)
    if not start:
        raise ValueError(f"{path} is empty: there are no rows in it.")
    if start.startswith(_PARQUET):
        raise ValueError(f"{path} is a Parquet file: name it {path.with_suffix('.parquet').name}.")
    for magic, name in _OTHER_KINDS.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed ({name}), not {path.suffix}: unpack it first.")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16 text: convert it, for example by `iconv -f UTF-16 -t UTF-8`.")
    yield from _csv_rows(path, sep) if is_csv(path) else _json_rows(path)


def is_csv(file: str | Path) -> bool:
    """Whether a file is CSV, by its name."""
    return suffix_of(file) == ".csv"


def suffix_of(file: str | Path) -> str:
    """The suffix of a file's name in small letters; of JSON and CSV without the `.gz` behind it."""
    name = Path(str(file).lower())
    inner = Path(name.stem).suffix
    return inner if name.suffix == ".gz" and inner in (".json", ".jsonl", ".csv") else name.suffix


def one_line(error: BaseException) -> str:
    """The innermost cause of a library's error, on one line of at most 300 characters."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def nth_line(path: Path, row: int) -> int | None:
    """Number (from 1) of the line of a JSONL file that holds a row (from 0); None where lines are no rows."""
    if suffix_of(path) != ".jsonl":
        return None
    try:
        for found, (number, _) in enumerate(_lines(path)):
            if found == row:
                return number
    except (OSError, ValueError):
        pass
    return None


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return gzip.open(path, "rb") if packed else path.open("rb")


def _lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """(number, text) of each line; of blank ones only where asked for."""
    said = time.monotonic()
    with _open(path) as file:
        number = 0
        while True:
            try:
                raw = file.readline()
            except (OSError, EOFError) as error:  # a gzip file cut short
                raise ValueError(f"{path}, after line {number}: {one_line(error)}.") from error
            if not raw:
                return
            number += 1
            if number % 10_000 == 0 and time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                rank_zero_info(f"{path}: looked at {number:,} lines.")
            if not blank and raw.isspace():
                continue
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: byte {error.start + 1} is {raw[error.start : error.start + 1]!r}, which "
                    "is no UTF-8. Write the file as UTF-8 (`iconv -f LATIN1 -t UTF-8`), or drop the line."
                ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise _DuplicateKeyError(twice)
    return found


class _DuplicateKeyError(ValueError):
    pass


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _HugeNumberError(digits)
    return number


class _HugeNumberError(ValueError):
    pass


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite)


def _decoded(path: Path, where: str, text: str) -> Any:
    """The JSON in a text.

    Raises:
        json.JSONDecodeError: it is none. ValueError: it is JSON that no data set can hold.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except _DuplicateKeyError as error:
        raise ValueError(f"{path}{where}: the key {str(error)!r} stands twice in one object; keep one.") from error
    except _HugeNumberError as error:
        raise ValueError(
            f"{path}{where}: the number {str(error)[:80]} is beyond what a float holds; write it as text, in quotes."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{path}{where}: nested too deeply to be read.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{path}{where}: {one_line(error)}.") from error
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{path}{where}: {error.object[error.start]!r} is half of a surrogate pair, which is no text. It comes "
                "of cutting a string in the middle of an emoji; drop the row or that character."
            ) from error
    return value


def _check_rows(path: Path, where: str, rows: list[Any]) -> None:
    for number, row in enumerate(rows, 1):
        place = where if len(rows) == 1 else f"{where}, element {number}"
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}{place}: {json.dumps(row)[:80]} is no row. Each must be an object with the columns as keys, "
                'such as {"prompt": "..."}.'
            )
        if not row:
            raise ValueError(f"{path}{place}: {{}} has no columns; drop it.")


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """One object a line; or, in a `.json` file, also one array of objects or one object."""
    if suffix_of(path) == ".json":
        lines = list(_lines(path))
        text = "\n".join(line.rstrip("\r\n") for _, line in lines)
        try:
            whole = _decoded(path, "", text) if lines else []
        except json.JSONDecodeError as error:
            if not _is_json(lines[0][1]):
                number, start = lines[text.count("\n", 0, error.pos)][0], text.rfind("\n", 0, error.pos) + 1
                raise ValueError(
                    f"{path}, line {number}: {text[max(start, error.pos - 20) : error.pos + 40]!r} is not JSON "
                    f"({error.msg} at column {error.pos - start + 1}). The file must hold an array of objects, or one "
                    "object a line."
                ) from error
        else:
            del lines, text
            whole = whole if isinstance(whole, list) else [whole]
            _check_rows(path, "", whole)
            if not whole:
                raise ValueError(f"{path} holds no rows.")
            yield from ((0, row) for row in whole)
            return
        del lines, text
    number = 0
    for number, line in _lines(path):
        try:
            row = _decoded(path, f", line {number}", line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: {line[max(0, error.pos - 20) : error.pos + 40]!r} is not JSON ({error.msg} at "
                f"column {error.colno}). A line must hold one whole object; correct it or drop it."
            ) from error
        if type(row) is dict and row:
            yield number, row
        else:
            rows = row if isinstance(row, list) and row else [row]
            _check_rows(path, f", line {number}", rows)
            yield from ((number, row) for row in rows)
    if not number:
        raise ValueError(f"{path} holds blank lines alone: there are no rows in it.")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _csv_rows(path: Path, sep: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row has as many cells as the header, whose names differ."""

    line = 0

    def texts() -> Iterator[str]:
        nonlocal line
        for line, text in _lines(path, blank=True):
            if "\0" in text:
                raise ValueError(f"{path}, line {line}: a NUL byte: the file is cut short, or no CSV.")
            yield text

    limit = csv.field_size_limit(2**31 - 1)  # a text of more than 128 KiB is none too many; the limit is the process's
    read = csv.reader(texts(), strict=True, delimiter=sep)
    rows = (row for row in read if row and (len(row) > 1 or not row[0].isspace()))  # blank lines are none
    try:
        header = next(rows, None)
        if header is None:
            raise ValueError(f"{path} holds blank lines alone: there are no rows in it.")
        header = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ValueError(f"{path}, line {line}: two columns are called {', '.join(map(repr, twice))}.")
        count = 0
        for row in rows:
            count += 1
            if len(row) != len(header):
                raise ValueError(
                    f"{path}, line {line}: {len(row)} cells, the header has {len(header)} ({sep.join(row)[:80]!r}). "
                    "Quote cells that hold commas, or set load_kwargs (sep) where the file uses another separator."
                )
            yield line, {name: cell or None for name, cell in zip(header, row, strict=True)}
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: {error}. A quoted cell may have been left open.") from error
    finally:
        csv.field_size_limit(limit)
    if not count:
        raise ValueError(f"{path} holds a header alone: there are no rows in it.")


def _check_parquet(path: Path) -> None:
    import pyarrow.parquet

    with path.open("rb") as file:
        start = file.read(6)
    if not start:
        raise ValueError(f"{path} is empty: there are no rows in it.")
    if not start.startswith(_PARQUET):
        raise ValueError(f"{path} is no Parquet file: it begins with {start!r}. Is it JSON or CSV under a wrong name?")
    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
    except Exception as error:
        raise ValueError(f"{path} is a broken Parquet file: {one_line(error)} Write or copy it again.") from error
    if not metadata.num_rows:
        raise ValueError(f"{path} holds no rows.")
    names = metadata.schema.to_arrow_schema().names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{path}: two columns are called {', '.join(map(repr, twice))}. Write it with one of each name."
        )
