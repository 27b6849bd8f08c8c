"""Rows of a data set: from a file, a folder, the hub, memory or a function, under one name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk

__all__ = ["RowSource", "require_columns", "shuffled_order"]

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class RowSource:
    """Where rows come from. Exactly one of `path` and `rows` is given.

    Args:
        path: a JSON, JSONL, Parquet or CSV file; a folder of such files or one written by `Dataset.save_to_disk`; or
            the name of a data set on the hub, such as "openai/gsm8k".
        rows: a list of dictionaries, a `datasets.Dataset`, or a function or configurable object without arguments that
            returns one of them; YAML names a function by its import path and an object by `class_path`.
        name: configuration of a hub data set, such as "main".
        split: which split to take; slices such as "train[:100]" are understood.
        limit: only the first so many rows of the split, before any shuffling; None is all.
        streaming: read a hub data set or file as a stream, row by row, without downloading or converting it first. A
            stream has no length and no random access: see `PromptSet` for what that costs.
        load_kwargs: further arguments of `datasets.load_dataset`, such as `revision`.
    """

    path: str | None = None
    rows: Callable[[], Any] | list[dict[str, Any]] | None = None
    name: str | None = None
    split: str = "train"
    limit: int | None = None
    streaming: bool = False
    load_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.rows is None):
            given = "neither" if self.path is None else f"path={self.path!r} and rows"
            raise ValueError(f"{type(self).__name__}: give exactly one of path and rows, not {given}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"{type(self).__name__}.limit={self.limit}: must be at least 1, or None for all rows.")

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

    def _from_rows(self) -> Any:
        data = self.rows() if callable(self.rows) else self.rows
        if isinstance(data, IterableDataset | IterableDatasetDict):
            return data
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(
                f"rows={self.label}: expected a list of dictionaries or a Dataset, got {type(data).__name__}."
            )
        return data

    def _from_path(self, path: str) -> Any:
        local = Path(path).expanduser()
        if local.is_file():
            builder = _BUILDERS.get(local.suffix.lower())
            if builder is None:
                raise ValueError(f"path={path!r}: unknown kind of file; known are {', '.join(_BUILDERS)}.")
            files = {self.split.split("[")[0]: str(local)}  # whatever split is asked for is this file
            return self._load_dataset(builder, data_files=files)
        if local.is_dir():
            if any((local / marker).exists() for marker in ("dataset_dict.json", "state.json")):
                return load_from_disk(str(local))
            return self._load_dataset(str(local), name=self.name)
        if local.suffix.lower() in _BUILDERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ValueError(f"path={path!r}: there is no such file or folder (looked from {Path.cwd()}).")
        return self._load_dataset(path, name=self.name)

    def _load_dataset(self, builder: str, **kwargs: Any) -> Any:
        try:
            return load_dataset(builder, split=self.split, streaming=self.streaming, **kwargs, **self.load_kwargs)
        except (FileNotFoundError, ConnectionError) as error:
            raise ValueError(
                f"path={self.path!r}: neither a file or folder here nor on the hub (or no network)."
            ) from error


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
