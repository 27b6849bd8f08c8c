"""Dataset examples from a file, a directory, the Hugging Face Hub, memory, or a function, and their media columns."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.files import (
    BUILDERS,
    BrokenFileError,
    iterate_files,
    nth_line,
    one_line,
    read_files,
    suffix_of,
    with_progress,
)
from lightrl.records import Media

# For the command line: tries text first, otherwise a quoted "007" would become a number.
Text = str | Any
Row = dict[str, str | list[dict[str, Text]] | list[Text] | dict[str, Text] | Any]


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


class RowError(ValueError):
    """An invalid example, such as a column of a wrong type, a conversation without roles, or an empty prompt."""


class MediaError(RowError):
    """A missing, broken, or unsupported media item."""


@dataclass
class RowSource:
    """Dataset of examples. Set exactly one of `path` and `rows`.

    Args:
        path: JSONL, JSON, CSV (optionally gzipped), or Parquet file, a directory of such files or from
            `Dataset.save_to_disk`, or a dataset ID on the Hugging Face Hub, such as "openai/gsm8k". Values of local
            JSON files keep their types. Cells of local CSV files are strings, or None if empty.
        rows: List of dictionaries, a `datasets.Dataset`, or a callable without arguments that returns one of them. In
            YAML, use the import path of a function or the `class_path` of an object.
        name: Config of a Hub dataset, such as "main".
        split: Split, or a slice such as "train[:100]".
        limit: Maximum number of examples, taken from the start before shuffling. Defaults to all.
        streaming: Whether to read examples one by one, without downloading the dataset first. A stream has no length
            and no random access. See `PromptSet` for the limitations.
        load_kwargs: Additional arguments of `datasets.load_dataset`, such as `revision`.
        on_bad_row: How to handle invalid examples, such as a conversation without roles or an empty prompt. "error"
            stops and reports file, row, and value. "drop" skips and counts them. All examples are checked before
            training, and those of a stream when they are read.
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
            raise ValueError(f"{type(self).__name__}: got {given}. Set exactly one of path and rows.")
        if isinstance(self.rows, list | Dataset) and len(self.rows) == 0:
            raise ValueError(f"{type(self).__name__}.rows=[]: there are no examples. Add at least one.")
        at_least(f"{type(self).__name__}.limit", self.limit, 1, or_none="for all rows")
        one_of(f"{type(self).__name__}.on_bad_row", self.on_bad_row, "error", "drop")

    @property
    def label(self) -> str:
        """Name of this source in error messages."""
        return self.path if self.path is not None else getattr(self.rows, "__name__", type(self.rows).__name__)

    def read(self) -> Any:
        """Loads the examples as a sequence of dictionaries or an `IterableDataset`.

        Raises:
            ValueError: If the file or dataset does not exist, is invalid, or is empty.
        """
        data = self._from_path(self.path) if self.path is not None else self._from_rows()
        if isinstance(data, DatasetDict | IterableDatasetDict):
            if self.split not in data:
                raise ValueError(f"split={self.split!r}: no such split in {self.label}. Use one of {list(data)}.")
            data = data[self.split]
        if isinstance(data, IterableDataset):
            return data if self.limit is None else data.take(self.limit)
        if len(data) == 0:
            raise ValueError(f"split={self.split!r}: {self.label} has no rows. Check the file and the split.")
        return data if self.limit is None else selected(data, range(min(self.limit, len(data))))

    def where(self, row: int) -> str:
        """Returns the location of an example for error messages: source, row, and the line of a JSONL file."""
        local = None if self.path is None else Path(self.path).expanduser()
        line = None
        if local is not None and local.is_file() and "[" not in self.split and not self.streaming:
            line = nth_line(local, row)
        return f"{self.label}, row {row}" + ("" if line is None else f" (line {line})")

    def drops(self, error: ValueError) -> bool:
        """Returns whether to drop an example with this error instead of raising it."""
        return self.on_bad_row == "drop"

    def good_rows(self, data: Any, columns: Iterable[str], check: Callable[[Mapping[str, Any]], None]) -> Sequence[int]:
        """Returns the indices of the valid examples.

        Args:
            data: Examples from `read`, with a length.
            columns: Columns that `check` reads.
            check: Function that raises a `ValueError` for an invalid example.

        Raises:
            RowError: If an example is invalid with `on_bad_row="error"`, or all are invalid.
        """
        bad: dict[int, str] = {}
        for number, row in enumerate(plain_rows(data, columns)):
            try:
                check(row)
            except ValueError as error:
                if not self.drops(error):
                    kind = type(error) if isinstance(error, RowError) else RowError
                    raise kind(f"{self.where(number)}{error}") from error
                bad[number] = str(error)
        if not bad:
            return range(len(data))
        first = next(iter(bad))
        message = f"{len(bad)} of {len(data)} examples are invalid; the first: {self.where(first)}{bad[first]}"
        if len(bad) == len(data):
            raise RowError(f"no example is left: {message}")
        rank_zero_warn(f"Dropped: {message}")
        return [number for number in range(len(data)) if number not in bad]

    def usable_rows(
        self, arguments: Iterable[str], check: Callable[[Mapping[str, Any]], None], optional: Iterable[str] = ()
    ) -> tuple[Any, Sequence[int]]:
        """Loads all examples and the indices of the valid ones, for training in whole passes.

        Args:
            arguments: Arguments of this source that name columns. Skips those that are None.
            check: See `good_rows`.
            optional: Columns that `check` reads if they exist.

        Raises:
            ValueError: If the dataset has no length or lacks a column.
        """
        data = self.read()
        if isinstance(data, IterableDataset):
            raise ValueError(
                f"streaming=True: training in whole passes needs a length, which {self.label} lacks. Set streaming: "
                "false."
            )
        named = {argument: column for argument in arguments if (column := getattr(self, argument)) is not None}
        columns = columns_of(data)
        for argument, column in named.items():
            require_columns(columns, [column], self.label, argument)
        return data, self.good_rows(data, [*named.values(), *optional], check)

    def stream_rows(self, data: IterableDataset) -> Iterator[dict[str, Any]]:
        """Iterates over a stream. Errors report the number of examples read."""
        count = 0
        try:
            for row in data:
                yield entered(row)
                count += 1
        except BrokenFileError:
            raise
        except Exception as error:
            raise ValueError(f"{self.label}: reading failed after {count} examples: {one_line(error)}") from error

    def _from_rows(self) -> Any:
        data: Any = self.rows() if callable(self.rows) else self.rows
        if isinstance(data, IterableDataset | IterableDatasetDict | DatasetDict):
            return data
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(
                f"rows={self.label}: got a {type(data).__name__}. Return a list of dictionaries or a Dataset."
            )
        if not isinstance(data, Dataset):
            for number in range(len(data)):
                if not isinstance(data[number], Mapping):
                    raise RowError(
                        f"rows={self.label}: row {number} is {str(data[number])[:80]!r}. Make each row a dictionary."
                    )
        return data

    def _from_path(self, path: str) -> Any:
        local = Path(path).expanduser()
        if local.is_file():
            builder = BUILDERS.get(suffix_of(local))
            if builder is None:
                raise ValueError(
                    f"path={path!r}: unsupported file type. Use {', '.join(BUILDERS)}, or gzipped text files."
                )
            files = {self.split.split("[")[0]: [str(local)]}  # any split name refers to this file
            if builder != "parquet" and self._reads_itself:
                return self._from_files(files)
            return self._load(builder, data_files=files)
        if local.is_dir():
            if any((local / marker).exists() for marker in ("dataset_dict.json", "state.json")):
                with self._named_errors():
                    return load_from_disk(str(local))
            with self._named_errors():
                found = load_dataset_builder(str(local), name=self.name, **self.load_kwargs)
            files = {name: [str(file) for file in part] for name, part in (found.config.data_files or {}).items()}
            plain = found.config.features is None and not getattr(found.config, "field", None)
            kinds = {BUILDERS.get(suffix_of(file)) for part in files.values() for file in part}
            if plain and kinds in ({"json"}, {"csv"}) and self._reads_itself:
                return self._from_files(files)
            return self._load(str(local), name=self.name)
        if suffix_of(local) in BUILDERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ValueError(f"path={path!r}: no such file or directory (relative to {Path.cwd()}). Fix the path.")
        return self._load(path, name=self.name)

    @property
    def _reads_itself(self) -> bool:
        return set(self.load_kwargs) <= {"sep", "delimiter"}

    def _from_files(self, files: Mapping[str, list[str]]) -> Any:
        """Returns the rows of a split of local JSON or CSV files."""
        sep = next(iter(self.load_kwargs.values()), ",")
        name = self.split.split("[")[0]
        if name not in files and "+" not in name:
            raise ValueError(f"split={self.split!r}: no such split in {self.label}. Use one of {list(files)}.")
        if self.streaming:
            if name != self.split:
                raise ValueError(f"split={self.split!r}: streams don't support slices. Set limit, or streaming: false.")
            return IterableDataset.from_generator(iterate_files, gen_kwargs={"files": files[name], "sep": sep})
        if name == self.split:
            return read_files(files[name], sep)
        found = {split: read_files(part, sep) for split, part in files.items()}
        lengths = {split: len(part) for split, part in found.items()}
        parts = ReadInstruction.from_spec(self.split).to_absolute(lengths)
        chosen = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
        return chosen[0] if len(chosen) == 1 else [row for part in chosen for row in part]

    def _load(self, builder: str, **kwargs: Any) -> Any:
        with self._named_errors():
            return load_dataset(builder, split=self.split, streaming=self.streaming, **kwargs, **self.load_kwargs)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Converts the errors of `datasets` to a `ValueError`."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"path={self.path!r}, split={self.split!r}: can't be read as a local path or from the Hub: "
                f"{one_line(error)}. Check the name, the network, and that HF_HOME is writable."
            ) from error


def columns_of(data: Any) -> list[str]:
    """Returns the columns of a dataset with a length, including those that only some rows have."""
    return list(getattr(data, "column_names", None) or dict.fromkeys(name for row in data for name in row))


def selected(data: Any, numbers: Iterable[int]) -> Any:
    """Returns the rows with these indices."""
    return data.select(numbers) if hasattr(data, "select") else [data[number] for number in numbers]


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
        on_media_error: How to handle examples with media that is missing, broken, or doesn't match the prompt. "error"
            stops the run and reports the example. "drop" uses the next example, and `PromptSet.counts` counts it.
    """

    media_columns: dict[str, Literal["image", "video", "audio"]] | None = None
    media_folder: str | None = None
    max_pixels: int | None = None
    max_frames: int = 32
    frame_rate: float = 2.0
    on_media_error: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for column, kind in (self.media_columns or {}).items():
            one_of(f"{name}.media_columns[{column!r}]", kind, *KINDS)
        for argument in ("max_pixels", "max_frames", "frame_rate"):
            value = getattr(self, argument)
            if value is None and argument == "max_pixels":
                continue
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}.{argument}={value}: must be above 0. Set a positive number.")
        if self.media_folder is not None and not Path(self.media_folder).expanduser().is_dir():
            raise ValueError(
                f"{name}.media_folder={self.media_folder!r}: no such directory (relative to {Path.cwd()}). Create it."
            )
        one_of(f"{name}.on_media_error", self.on_media_error, "error", "drop")

    def drops(self, error: ValueError) -> bool:
        """Applies `on_media_error` to media errors and `on_bad_row` to all others."""
        return self.on_media_error == "drop" if isinstance(error, MediaError) else super().drops(error)

    def read_row(self, data: Any, number: int) -> dict[str, Any]:
        """Reads an example. `datasets` decodes its media.

        Raises:
            MediaError: If the media can't be decoded.
        """
        if not isinstance(data, Dataset):
            return entered(data[number])
        from lightrl.rewards.encoding import open_image

        try:
            for picture in _pictures(data, number):
                open_image(picture).close()  # rejects non-images before `datasets` opens them
            row = data[number]
        except Exception as error:  # PIL raises many error types for broken files
            raise MediaError(f"{self.where(number)}: {one_line(error)}") from error
        return entered(row)

    def media_root(self) -> Path:
        """Returns the root of relative paths."""
        if self.media_folder is not None:
            return Path(self.media_folder).expanduser()
        local = Path(self.path).expanduser() if self.path is not None else Path()
        return local.parent if local.is_file() else Path()


def _pictures(data: Dataset, number: int) -> Iterator[Any]:
    """Yields a row's image files that `datasets` has not decoded, as buffers or paths."""
    kinds = {name: getattr(feature, "feature", feature) for name, feature in data.features.items()}  # also of lists
    names = [name for name, kind in kinds.items() if isinstance(kind, Image)]
    rows = data.select_columns(names).with_format("arrow")[number : number + 1].to_pylist() if names else []
    for found in (found for row in rows for found in row.values()):
        for value in found if isinstance(found, list) else [found]:
            if value is not None and value["bytes"] is not None:
                yield io.BytesIO(value["bytes"])
            elif value is not None and Path(value["path"]).is_file():
                yield value["path"]


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
        yield from (entered(data[number]) for number in with_progress(range(len(data)), "Check"))
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


def require_columns(columns: Iterable[str], wanted: Iterable[str], label: str, argument: str) -> None:
    """Raises a `ValueError` if the dataset `label` lacks a column. `argument` is the argument that names the column."""
    have = list(columns)
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ValueError(f"{argument}={missing[0]!r}: {label} has no such column. Use one of {have}.")


def shuffled_order(num_rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a permutation of `range(num_rows)` that depends only on (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
