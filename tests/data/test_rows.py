"""Rows from files, folders, memory and functions, and what is said when they are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from lightrl.data.rows import RowSource

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]


def made_by_function() -> Dataset:
    return Dataset.from_list(ROWS)


def write(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    data = Dataset.from_list(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        data.to_parquet(str(path))
    elif kind == "csv":
        data.to_csv(str(path))
    elif kind == "saved":
        data.save_to_disk(str(path))
    elif kind == "saved_splits":
        DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        data.to_json(str(path / "train.jsonl"))
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv", "saved", "saved_splits", "folder"])
def test_every_kind_of_path_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    data = RowSource(path=str(write(kind, tmp_path))).read()
    assert len(data) == 5
    assert [row["prompt"] for row in data] == ["0+1=", "1+1=", "2+1=", "3+1=", "4+1="]


@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS), made_by_function, lambda: ROWS])
def test_rows_in_memory_and_from_functions(rows: Any) -> None:
    data = RowSource(rows=rows, limit=2).read()
    assert [data[i]["answer"] for i in range(len(data))] == ["1", "2"]


def test_streaming_gives_an_iterable_and_honours_limit(tmp_path: Path) -> None:
    stream = RowSource(path=str(write("jsonl", tmp_path)), streaming=True, limit=2).read()
    assert not hasattr(stream, "__len__")
    assert [row["answer"] for row in stream] == ["1", "2"]


@pytest.mark.parametrize("path", ["missing.jsonl", "/no/such/folder", "no-such-owner/no-such-set"])
def test_a_missing_file_or_data_set_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path):
        RowSource(path=path).read()


def test_splits_that_would_be_ignored_are_rejected(tmp_path: Path) -> None:
    path = str(write("jsonl", tmp_path))
    for source in ({"rows": ROWS}, {"rows": made_by_function}, {"path": path, "streaming": True}):
        with pytest.raises(ValueError, match="split='train\\[:2\\]'"):  # the rest may be the evaluation set
            RowSource(**source, split="train[:2]").read()  # type: ignore[arg-type]
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])})
    assert len(RowSource(rows=lambda: splits, split="test").read()) == 2


def test_no_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match="no rows"):
        RowSource(rows=list).read()
    with pytest.raises(ValueError, match="exactly one of path and rows"):
        RowSource(path="a", rows=ROWS)
