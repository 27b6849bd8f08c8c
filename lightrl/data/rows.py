"""Rows of a data set: from a file, a folder, the hub, memory or a function, under one name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from datasets import (
    Audio,
    Dataset,
    DatasetDict,
    Image,
    IterableDataset,
    IterableDatasetDict,
    Video,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.files import BUILDERS, PROGRESS_SECONDS, nth_line, one_line, require_readable, suffix_of
from lightrl.data.tables import VERSION, FileTables, columns_of

# As the command line reads them: text is tried first, else "007" in quotes would become a number.
Text = str | Any
Row = dict[str, str | list[dict[str, Text]] | list[Text] | dict[str, Text] | Any]


class RowError(ValueError):
    """A row that cannot be used: a column of a wrong type, a conversation without roles, an empty prompt."""


@dataclass
class RowSource:
    """Where rows come from. Exactly one of `path` and `rows` is given.

    Args:
        path: a JSON, JSONL or CSV file, compressed by gzip or not, or a Parquet file; a folder of such files or one
            written by `Dataset.save_to_disk`; or the name of a data set on the hub, such as "openai/gsm8k". Values of
            local JSON and CSV files stay what they are there: text is never read as a number or a date. In CSV a column
            is one of numbers where each of its cells is written as Python writes that number; an empty cell is None.
        rows: a list of dictionaries, a `datasets.Dataset`, or a function or configurable object without arguments that
            returns one of them; YAML names a function by its import path and an object by `class_path`.
        name: configuration of a hub data set, such as "main".
        split: which split to take; slices such as "train[:100]" are understood.
        limit: only the first so many rows of the split, before any shuffling; None is all.
        streaming: read a hub data set or file as a stream, row by row, without downloading or converting it first (a
            local file is looked through once all the same). A
            stream has no length and no random access: see `PromptSet` for what that costs.
        load_kwargs: further arguments of `datasets.load_dataset`, such as `revision`.
        on_bad_row: what happens to a row that cannot be used (a column of a wrong type, a conversation without roles,
            an empty prompt): "error" stops and names file, row and value, "drop" leaves it out, says so and counts
            it. All rows are looked at before training; those of a stream as they come.
    """

    path: str | None = None
    rows: Callable[[], Any] | list[Row] | None = None
    name: str | None = None
    split: str = "train"
    limit: int | None = None
    streaming: bool = False
    load_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.rows is None):
            given = "neither" if self.path is None else f"path={self.path!r} and rows"
            raise ValueError(f"{type(self).__name__}: give exactly one of path and rows, not {given}.")
        if isinstance(self.rows, list | Dataset) and len(self.rows) == 0:
            raise ValueError(f"{type(self).__name__}: rows=[] has no rows: give one or more.")
        at_least(f"{type(self).__name__}.limit", self.limit, 1, or_none="for all rows")
        one_of(f"{type(self).__name__}.on_bad_row", self.on_bad_row, "error", "drop")

    @property
    def label(self) -> str:
        """What messages call this source."""
        return self.path if self.path is not None else getattr(self.rows, "__name__", type(self.rows).__name__)

    def read(self) -> Any:
        """The rows: something with a length and integer access to dictionaries, or an `IterableDataset`.

        Raises:
            ValueError: the file or data set does not exist, is of an unknown kind, or has no rows.
        """
        data = self._from_path(self.path) if self.path is not None else self._from_rows()
        if isinstance(data, DatasetDict | IterableDatasetDict):
            if self.split not in data:
                raise ValueError(f"split={self.split!r}: {self.label} has the splits {list(data)}.")
            data = data[self.split]
        if isinstance(data, IterableDataset):
            return data if self.limit is None else data.take(self.limit)
        if len(data) == 0:
            raise ValueError(f"{self.label} has no rows (split={self.split!r}); there is nothing to train on.")
        if self.limit is not None and self.limit < len(data):
            data = data[: self.limit] if isinstance(data, list) else data.select(range(self.limit))
        return data

    def where(self, row: int) -> str:
        """How messages name a row: source and number, and the line where the source is a JSONL file."""
        local = None if self.path is None else Path(self.path).expanduser()
        line = None
        if local is not None and local.is_file() and "[" not in self.split and not self.streaming:
            line = nth_line(local, row)
        return f"{self.label}, row {row}" + ("" if line is None else f" (line {line})")

    def drops(self, error: ValueError) -> bool:
        """Whether a row with this error is left out, rather than ending the run."""
        return self.on_bad_row == "drop"

    def good_rows(self, data: Any, columns: Iterable[str], check: Callable[[Mapping[str, Any]], None]) -> Sequence[int]:
        """Looks at all rows before any is used.

        Args:
            data: what `read` gave, with a length.
            columns: those that `check` needs.
            check: raises a ValueError about a row that cannot be used.

        Returns:
            the numbers of the good rows, in order.

        Raises:
            RowError: a bad row that is not to be dropped; or no row is left.
        """
        bad: dict[int, str] = {}
        begun = said = time.monotonic()
        for number, row in enumerate(plain_rows(data, columns)):
            try:
                check(row)
            except ValueError as error:
                if not self.drops(error):
                    kind = type(error) if isinstance(error, RowError) else RowError
                    raise kind(f"{self.where(number)}{error}") from error
                bad[number] = str(error)
            if number % 1000 == 0 and time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                rate = number / (said - begun)
                rank_zero_info(f"{self.label}: looked at {number:,} of {len(data):,} rows, {rate:,.0f} a second.")
        if not bad:
            return range(len(data))
        first = next(iter(bad))
        message = f"{len(bad)} of {len(data)} rows cannot be used; the first: {self.where(first)}{bad[first]}"
        if len(bad) == len(data):
            raise RowError(f"no row is left: {message}")
        rank_zero_warn(f"Dropped: {message}")
        return [number for number in range(len(data)) if number not in bad]

    def usable_rows(
        self, arguments: Iterable[str], check: Callable[[Mapping[str, Any]], None], optional: Iterable[str] = ()
    ) -> tuple[Any, Sequence[int]]:
        """Reads rows that training goes through in whole passes.

        Args:
            arguments: of this source, that name columns; those that are None name none.
            check: see `good_rows`.
            optional: columns that `check` reads if the rows have them.

        Returns:
            all rows, and the numbers of the good ones.

        Raises:
            ValueError: the rows have no length, or lack a column.
        """
        data = self.read()
        if isinstance(data, IterableDataset):
            raise ValueError(f"{self.label} is a stream: whole passes need rows with a length.")
        named = {argument: column for argument in arguments if (column := getattr(self, argument)) is not None}
        columns = getattr(data, "column_names", None) or data[0]
        for argument, column in named.items():
            require_columns(columns, [column], self.label, argument)
        return data, self.good_rows(data, [*named.values(), *optional], check)

    def stream_rows(self, data: IterableDataset) -> Iterator[dict[str, Any]]:
        """The rows of a stream; a ValueError says after how many of them it broke off, and where the file is broken."""
        count = 0
        rows = iter(data)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                self._require_readable_files()
                raise ValueError(f"{self.label}: reading broke off after {count} rows: {one_line(error)}.") from error
            count += 1
            yield entered(row)

    def _from_rows(self) -> Any:
        data: Any = self.rows() if callable(self.rows) else self.rows
        if isinstance(data, IterableDataset | IterableDatasetDict | DatasetDict):
            return data
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(
                f"rows={self.label}: expected a list of dictionaries or a Dataset, got {type(data).__name__}."
            )
        if not isinstance(data, Dataset):
            for number in range(len(data)):
                if not isinstance(data[number], Mapping):
                    raise RowError(
                        f"rows={self.label}: row {number} is {str(data[number])[:80]!r} of type "
                        f"{type(data[number]).__name__}, not a dictionary of columns."
                    )
        return data

    def _from_path(self, path: str) -> Any:
        local = Path(path).expanduser()
        try:
            local.exists()
        except OSError as error:
            raise ValueError(f"path={path[:80]!r}...: cannot be looked for: {one_line(error)[:80]}.") from error
        if local.is_file():
            builder = BUILDERS.get(suffix_of(local))
            if builder is None:
                raise ValueError(
                    f"path={path!r}: unknown kind of file; known are {', '.join(BUILDERS)}, text with .gz, too."
                )
            files = {self.split.split("[")[0]: str(local)}  # whatever split is asked for is this file
            return self._load_dataset(builder, data_files=files)
        if local.is_dir():
            if local.resolve().parent == local.resolve():
                raise ValueError(f"path={path!r}: holds all there is on this machine; name the folder of the rows.")
            if any((local / marker).exists() for marker in ("dataset_dict.json", "state.json")):
                try:
                    return load_from_disk(str(local))
                except Exception as error:
                    raise ValueError(
                        f"path={path!r}: the saved data set cannot be read: {one_line(error)}. Save it again."
                    ) from error
            if not any(self._files_below(local)):
                raise ValueError(f"path={path!r}: there is no file in this folder to read rows from.")
            return self._load_dataset(str(local), name=self.name)
        if suffix_of(local) in BUILDERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ValueError(f"path={path!r}: there is no such file or folder (looked from {Path.cwd()}).")
        return self._load_dataset(path, name=self.name)

    def _local_tables(self, builder: Any) -> FileTables | None:
        """What reads local JSON or CSV files; None for others, and where arguments ask for another way of reading."""
        config = builder.config
        files = [str(file) for part in (config.data_files or {}).values() for file in part]
        sep = getattr(config, "sep", ",")
        asked = set(self.load_kwargs) <= {"sep", "delimiter"} and len(sep) == 1
        # The README.md of a folder may ask for another way.
        plain = config.features is None and not getattr(config, "field", None)
        kinds = {"csv": (".csv",), "json": (".json", ".jsonl")}.get(builder.name, ())
        local = all(file.lower().removesuffix(".gz").endswith(kinds) and Path(file).is_file() for file in files)
        if not (asked and plain and files and kinds and local):
            return None
        return FileTables(
            dataset_name=builder.dataset_name,
            config_name=config.name,
            hash=VERSION,
            data_files=config.data_files,
            features=columns_of(files, sep),
            sep=sep,
        )

    def _require_readable_files(self) -> None:
        """Names the broken line of a local file; with `load_kwargs` a file may have a form that only they tell."""
        local = Path(self.path or "").expanduser()
        if self.path is None or self.load_kwargs:
            return
        for file in [local] if local.is_file() else sorted(self._files_below(local)) if local.is_dir() else []:
            if suffix_of(file) in BUILDERS:
                require_readable(file)

    def _files_below(self, folder: Path) -> Iterator[Path]:
        """Files in a folder and those below, less hidden ones."""
        try:
            yield from (file for file in folder.rglob("[!.]*") if file.is_file())
        except OSError as error:
            raise ValueError(
                f"path={self.path!r}: this folder cannot be looked through: {one_line(error)}. Name the file itself."
            ) from error

    def _load_dataset(self, builder: str, **kwargs: Any) -> Any:
        tables = None
        if self.path is not None and Path(self.path).expanduser().exists():
            with self._named_errors():
                found = load_dataset_builder(builder, **kwargs, **self.load_kwargs)
            tables = self._local_tables(found)
            if tables is None:
                self._require_readable_files()  # of a stream, too: pyarrow's reader crashes on some broken files
        with self._named_errors():
            if tables is None:
                return load_dataset(builder, split=self.split, streaming=self.streaming, **kwargs, **self.load_kwargs)
            if self.streaming:
                return tables.as_streaming_dataset(split=self.split)
            tables.download_and_prepare()
            return tables.as_dataset(split=self.split)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Makes one message of what `datasets` raises."""
        try:
            yield
        except Exception as error:
            cache, failed = Path(datasets.config.HF_DATASETS_CACHE), getattr(error, "filename", None)
            if isinstance(failed, str) and (cache.is_relative_to(failed) or Path(failed).is_relative_to(cache)):
                raise ValueError(
                    f"path={self.path!r}: the cache of `datasets`, {str(cache)!r}, cannot be used: {one_line(error)}. "
                    "Name a folder that can be written, in HF_DATASETS_CACHE or HF_HOME."
                ) from error
            if isinstance(error, FileNotFoundError | ConnectionError):
                raise ValueError(
                    f"path={self.path!r}: neither a file or folder here nor on the hub (or no network): "
                    f"{one_line(error)}."
                ) from error
            self._require_readable_files()
            raise ValueError(f"path={self.path!r}, split={self.split!r}: {one_line(error)}.") from error


def plain_rows(data: Any, columns: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Rows with some of their columns, media as bytes or paths; in batches where the data can, which is much faster."""
    if not isinstance(data, Dataset):
        yield from (entered(data[number]) for number in range(len(data)))
        return
    names = [name for name in dict.fromkeys(columns) if name in data.column_names]
    part = data.select_columns(names).with_format(None)
    for name, feature in part.features.items():
        if isinstance(feature, Image | Audio | Video):
            part = part.cast_column(name, type(feature)(decode=False))
    for batch in part.iter(1000):
        for values in zip(*batch.values(), strict=True):
            yield entered(dict(zip(batch, values, strict=True)))


def entered(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of Arrow without the empty keys that other rows gave its messages, tools, and template variables.

    Arrow gives all objects of a column the same keys, and None for those that a row did not have; lists of such rows
    (`Dataset.to_list`) keep them. In other columns None stays, because only the user knows what it means there.
    """
    return {name: _without_nulls(value) if _has_keys_of_others(name, value) else value for name, value in row.items()}


def _has_keys_of_others(name: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return name.endswith("template_kwargs")
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and bool({"role", "function", "parameters"} & set(first))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def require_columns(columns: Iterable[str], wanted: Iterable[str], label: str, argument: str) -> None:
    """Raises a `ValueError` that lists the columns there are, where one of `wanted` is missing.

    Args:
        columns: names of the columns there are.
        wanted: names of the columns that are needed.
        label: what to call the data set.
        argument: the argument that names the column.
    """
    have = list(columns)
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ValueError(f"{argument}={missing[0]!r}: {label} has no such column; it has {have}.")


def shuffled_order(num_rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation of `range(num_rows)` that depends on (seed, epoch) alone, so a position is enough to resume."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
