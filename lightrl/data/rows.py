"""Dataset examples from a file, a directory, the Hugging Face Hub, memory, or a function, and their media columns."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from datasets import (
    Audio,
    Dataset,
    DatasetDict,
    Image,
    IterableDataset,
    IterableDatasetDict,
    ReadInstruction,
    Video,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.records import Media

with suppress(ImportError):
    from PIL import EpsImagePlugin

    EpsImagePlugin.gs_binary = False  # PostScript images are programs, which PIL would run, also for `datasets`

T = TypeVar("T")

# For the command line: tries text first, otherwise a quoted "007" would become a number.
Text = str | Any
Row = dict[str, str | list[dict[str, Text]] | list[Text] | dict[str, Text] | Any]

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Builder names in `datasets` by file suffix."""

COLUMNS = {
    "image": "image",
    "images": "image",
    "video": "video",
    "videos": "video",
    "audio": "audio",
    "audios": "audio",
}
"""Media kinds by column name."""

KINDS = ("image", "video", "audio")


class MediaError(ValueError):
    """Raised for a missing, broken, or unsupported media item."""


@dataclass
class RowSource:
    """Dataset of examples. Set exactly one of `path` and `rows`.

    An invalid example, such as a conversation without roles, raises an error that names it. All examples are checked
    before training, or, in a stream, when they are read.

    Args:
        path: JSONL, JSON, CSV, or Parquet file, a directory of such files or from `Dataset.save_to_disk`, or a dataset
            ID on the Hugging Face Hub, such as "openai/gsm8k". Values of local JSON files keep their types. Cells of
            local CSV files are strings, or None if empty.
        rows: Function without arguments that returns a list of dictionaries or a `datasets.Dataset`. In YAML, its
            import path `package.module.name` or a `class_path`. A list or a `Dataset` also works.
        name: Config of a Hub dataset, such as "main".
        split: Split, or a slice such as "train[:100]".
        limit: Maximum number of examples, taken from the start before shuffling. Defaults to all.
        streaming: Whether to read examples one by one, without downloading the dataset first. A stream has no length
            and no random access. See `PromptSet` for the limitations.
        load_kwargs: Additional arguments of `datasets.load_dataset`, such as `revision`. For a local JSON or CSV file,
            only `sep`, the separator of CSV cells.
    """

    path: str | None = None
    rows: Callable[[], Any] | list[Row] | None = None
    name: str | None = None
    split: str = "train"
    limit: int | None = None
    streaming: bool = False
    load_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.rows is None):
            given = "neither" if self.path is None else f"path={self.path!r} and rows"
            raise ValueError(f"{type(self).__name__}: got {given}. Set exactly one of path and rows.")

    @property
    def label(self) -> str:
        """Name of this source in error messages."""
        return self.path if self.path is not None else getattr(self.rows, "__name__", type(self.rows).__name__)

    def read(self) -> Any:
        """Loads the examples as a sequence of dictionaries or an `IterableDataset`.

        Raises:
            ValueError: If the file or dataset does not exist, is invalid, or is empty.
        """
        data: Any = self.rows() if callable(self.rows) else self.rows
        if self.path is not None:
            data = self._from_path(self.path)
        if isinstance(data, DatasetDict | IterableDatasetDict):
            data = self._part(data)
        elif self.path is None and self.split != "train":
            raise ValueError(f"split={self.split!r}: {self.label} has no splits. Select its examples in the function.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1. Omit it for all examples.")
        if isinstance(data, IterableDataset):
            return data if self.limit is None else data.take(self.limit)
        data = data if hasattr(data, "__len__") else list(data)  # of a generator
        if not isinstance(data, Dataset) and not isinstance(next(iter(data), {}), Mapping):
            raise ValueError(
                f"{self.label}: its rows are not dictionaries. Return a list of dictionaries or a Dataset."
            )
        if len(data) == 0:
            raise ValueError(f"split={self.split!r}: {self.label} has no rows. Check the file and the split.")
        if self.limit is None:
            return data
        return data.select(range(min(self.limit, len(data)))) if isinstance(data, Dataset) else data[: self.limit]

    def where(self, row: int) -> str:
        """Returns the location of an example for error messages: source, row, and the line of a JSONL file."""
        local = None if self.path is None else Path(self.path).expanduser()
        line = None
        if local is not None and not self.streaming and local.suffix == ".jsonl" and "[" not in self.split:
            line = next((line for line, _ in islice(_entries(local), row, None)), None)
        return f"{self.label}, row {row}" + ("" if line is None else f" (line {line})")

    @contextmanager
    def named(self, row: int) -> Iterator[None]:
        """Adds the location of an example to errors."""
        try:
            yield
        except Exception as error:  # templates, tokenizers, and decoders raise many types
            message = f"{self.where(row)}: {error if isinstance(error, ValueError) else repr(error)}"
            raise (MediaError if isinstance(error, MediaError) else ValueError)(message) from error

    def require_columns(self, columns: Iterable[str], *arguments: str) -> list[str]:
        """Returns the columns that these arguments name, if any.

        Raises:
            ValueError: If the dataset lacks a column.
        """
        have, named = list(columns), list[str]()
        for argument in arguments:
            value = getattr(self, argument)
            for column in [value] if isinstance(value, str) else value or ():
                if column not in have:
                    raise ValueError(f"{argument}={column!r}: {self.label} has no such column. Use one of {have}.")
                named.append(column)
        return named

    def fitting(
        self,
        data: Any,
        make: Callable[[dict[str, Any]], T],
        length: Callable[[T], int],
        limit: int | None,
        overlong: str,
    ) -> dict[int, T]:
        """Returns dataset index -> `make(example)` of all examples with a `length` of at most `limit` tokens.

        Raises:
            ValueError: If `make` raises an error, an example is longer and `overlong` is "error", or all are longer.
        """
        kept: dict[int, T] = {}
        for index in with_progress(range(len(data)), len(data), self.label):
            with self.named(index):
                made = make(entered(data[index]))
                size = length(made)
                if limit is None or size <= limit:
                    kept[index] = made
                elif overlong == "error":
                    raise ValueError(f"max_tokens={limit}: the example has {size} tokens. Raise it, or remove it.")
        self.report_dropped(len(data) - len(kept), len(data), f"max_tokens={limit}")
        return kept

    def report_dropped(self, dropped: int, total: int, limit: str) -> None:
        """Logs how many examples were dropped as longer than `limit`, such as `max_tokens=512`.

        Raises:
            ValueError: If all were.
        """
        if dropped == total:
            raise ValueError(f"{limit}: every example of {self.label} is longer. Raise it.")
        if dropped:
            rank_zero_info(f"{self.label}: dropped {dropped} of {total} examples longer than {limit}.")

    def _from_path(self, path: str) -> Any:
        local = Path(path).expanduser()
        if local.is_file():
            builder = BUILDERS.get(local.suffix)
            if builder is None:
                raise ValueError(f"path={path!r}: unsupported file type. Use {', '.join(BUILDERS)}.")
            files = {self.split.split("[")[0]: [str(local)]}  # any split name refers to this file
            if builder != "parquet" and (unknown := self.load_kwargs.keys() - {"sep"}):
                raise ValueError(
                    f"load_kwargs={sorted(unknown)}: not supported for {path}. Only sep is, for CSV files."
                )
            return self._load(builder, data_files=files) if builder == "parquet" else self._from_files(files)
        if not local.is_dir() and (local.suffix in BUILDERS or path.startswith((".", "/", "~"))):
            raise ValueError(f"path={path!r}: no such file or directory (relative to {Path.cwd()}). Fix the path.")
        if not local.is_dir():
            return self._load(path, name=self.name)
        if any((local / marker).exists() for marker in ("dataset_dict.json", "state.json")):
            stored = load_from_disk(str(local))
            return stored if isinstance(stored, DatasetDict) else self._part({self.split.split("[")[0]: stored})
        found = self._load(str(local), load_dataset_builder, name=self.name)
        files = {str(name): [str(file) for file in part] for name, part in (found.config.data_files or {}).items()}
        read = {Path(file) for part in files.values() for file in part}
        if ignored := sorted({file for file in local.resolve().iterdir() if file.suffix in BUILDERS} - read):
            rank_zero_warn(f"{path}: ignoring {', '.join(f.name for f in ignored)}. Set path to a file to use it.")
        kinds = {BUILDERS.get(file.suffix) for file in read}
        return self._from_files(files) if kinds in ({"json"}, {"csv"}) else self._load(str(local), name=self.name)

    def _from_files(self, files: Mapping[str, list[str]]) -> Any:
        """Returns the rows of a split of local JSON or CSV files.

        The readers of `datasets` infer types: "2024-01-01" becomes a date, "007" the number 7, and 2 becomes 2.0 if
        another example has a fraction. A reward function that compares answers would then reject correct ones.
        """
        sep = self.load_kwargs.get("sep", ",")
        if self.streaming and "[" in self.split:
            raise ValueError(f"split={self.split!r}: a stream of {self.label} has no slices. Set streaming=False.")
        if self.streaming:
            part = self._part(files)
            return IterableDataset.from_generator(read_files, gen_kwargs={"files": part, "sep": sep})
        if self.split in files:
            return list(read_files(files[self.split], sep))
        return self._part({split: list(read_files(part, sep)) for split, part in files.items()})

    def _part(self, splits: Mapping[str, Any]) -> Any:
        """Returns the rows of `split`, which may be a slice or a sum.

        Raises:
            ValueError: The split does not exist, or the slice is invalid.
        """
        if self.split in splits:
            return splits[self.split]
        try:
            slices = ReadInstruction.from_spec(self.split).to_absolute(
                {name: len(rows) for name, rows in splits.items()}
            )
        except (AssertionError, TypeError, ValueError) as error:
            names = ", ".join(splits)
            message = f"split={self.split!r}: {self.label} has {names}. Use one, or a slice such as train[:100]."
            raise ValueError(message) from error
        found = [(splits[each.splitname], range(each.from_, each.to)) for each in slices]
        if all(isinstance(rows, Dataset) for rows, _ in found):
            return concatenate_datasets([rows.select(picked) for rows, picked in found])
        return [rows[i] for rows, picked in found for i in picked]

    def _load(self, path: str, load: Callable[..., Any] = load_dataset, **kwargs: Any) -> Any:
        if load is load_dataset:
            kwargs |= {"split": self.split, "streaming": self.streaming}
        try:
            return load(path, **kwargs, **self.load_kwargs)
        except Exception as error:
            raise ValueError(f"path={self.path!r}, split={self.split!r}: {error}") from error


def read_files(files: Iterable[str], sep: str = ",") -> Iterator[dict[str, Any]]:
    """Iterates over the rows of JSONL, JSON, or CSV files. Errors name the file and the line."""
    for file in files:
        yield from (row for _, row in _entries(Path(file), sep))


def _entries(file: Path, sep: str = ",") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row)."""
    line = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            if file.suffix == ".csv":
                csv.field_size_limit(2**31 - 1)
                reader = csv.DictReader(text, delimiter=sep, strict=True)
                names = list(filter(None, reader.fieldnames or ()))  # spreadsheets export empty columns
                if len(names) > len(set(names)):
                    raise ValueError(f"the header {names} repeats a column")
                for row in reader:
                    line = reader.line_num
                    if None in row or None in row.values():
                        raise ValueError("has more or fewer cells than the header")
                    yield line, {name: cell or None for name, cell in row.items()}
                return
            whole = text.read(64).lstrip().startswith("[")
            text.seek(0)
            for line, part in enumerate([text.read()] if whole else text, 1):
                rows = [] if part.isspace() else json.loads(part)
                for row in rows if isinstance(rows, list) else [rows]:
                    if not isinstance(row, dict):
                        raise ValueError(f"{json.dumps(row)[:80]} is not an object")
                    yield line, row
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}. Save it as UTF-8.") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file}, line {line}: {error}. Fix or remove it.") from error


def with_progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Iterates over items and logs progress every ten seconds."""
    last = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            rank_zero_info(f"{label}: read {count:,} of {total:,} examples.")
        yield item


def columns_of(data: Any) -> list[str]:
    """Returns the columns of a dataset with a length, including those that only some rows have."""
    if isinstance(data, IterableDataset):
        raise ValueError("streaming=True: only prompts can be streamed, other data is read whole. Set streaming=False.")
    return list(getattr(data, "column_names", None) or dict.fromkeys(name for row in data for name in row))


@dataclass
class MediaSource(RowSource):
    """Dataset of examples that can contain images, videos, or audio. Accepts the arguments of `RowSource` and the
    following.

    Args:
        media_columns: Mapping of column names to "image", "video", or "audio". Each cell contains one item or a list.
            Defaults to the columns image, images, video, videos, audio, and audios, if the model supports them. {}
            ignores media.
        media_folder: Root of relative paths. Defaults to the directory of the data file, or the working directory.
        max_pixels: Maximum number of pixels. Larger images and frames are scaled down. Defaults to the limit of the
            model's processor.
        max_frames: Maximum number of evenly spaced frames per video.
        frame_rate: Frames per second to read from video files. Also the assumed rate of videos given as frames.
    """

    media_columns: dict[str, Literal["image", "video", "audio"]] | None = None
    media_folder: str | None = None
    max_pixels: int | None = None
    max_frames: int = 32
    frame_rate: float = 2.0

    def media_root(self) -> Path:
        if self.media_folder is not None:
            return Path(self.media_folder).expanduser()
        local = Path(self.path).expanduser() if self.path is not None else Path()
        return local.parent if local.is_file() else Path()


@dataclass
class Encoded:
    """An encoded prompt: text, tokens with all placeholders, model inputs, and media.

    `cuttable` is the number of leading tokens that truncation may remove, those before the first media item.
    """

    text: str
    token_ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=Media)
    cuttable: int = 0


def plain_rows(data: Any, columns: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Iterates over some columns of all rows, with media as bytes or paths. Reads batches if possible, for speed."""
    if not isinstance(data, Dataset):
        yield from map(entered, data)
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
    """Removes the empty keys that Arrow adds to a row's messages, tools, and template variables.

    Arrow gives all objects of a column the same keys and sets missing ones to None. Other columns keep None, which may
    have a meaning there.
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


def shuffled_order(num_rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a permutation of `range(num_rows)` that depends only on (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
