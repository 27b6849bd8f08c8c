"""Rows from files, folders, memory and functions, and what is said when they are not there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from lightrl.data.prompts import prompt_source
from lightrl.data.rows import RowSource, require_columns, shuffled_order

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


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "folder"])
def test_files_that_gzip_compressed_are_read_by_their_names(kind: str, streaming: bool, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    for file in [path] if path.is_file() else list(path.iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    source = RowSource(path=str(path if path.is_dir() else tmp_path / f"{path.name}.gz"), streaming=streaming)
    rows = [dict(row) for row in source.read()]
    assert [row["prompt"] for row in rows] == ["0+1=", "1+1=", "2+1=", "3+1=", "4+1="]
    assert source.where(3).endswith("(line 4)") == (kind == "jsonl" and not streaming)


def test_the_whole_file_system_is_no_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in ("/", "//", "/tmp/.."):
        with pytest.raises(ValueError, match=rf"^path='{path}': holds all there is on this machine; name the folder"):
            RowSource(path=path).read()

    def gone(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/proc/1147")

    monkeypatch.setattr(Path, "rglob", gone)
    with pytest.raises(
        ValueError, match=r"^path='.*': this folder cannot be looked through: FileNotFoundError: .*1147"
    ):
        RowSource(path=str(tmp_path)).read()


@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS), made_by_function, lambda: ROWS])
def test_rows_in_memory_and_from_functions(rows: Any) -> None:
    data = RowSource(rows=rows, limit=2).read()
    assert [data[i]["answer"] for i in range(len(data))] == ["1", "2"]


def test_load_kwargs_reach_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt;answer\n1+1=;2\n")
    assert RowSource(path=str(path), load_kwargs={"sep": ";"}).read()[0]["prompt"] == "1+1="
    assert RowSource(path=str(path)).read().column_names == ["prompt;answer"]


def test_splits_of_saved_data_and_slices_of_files(tmp_path: Path) -> None:
    assert len(RowSource(path=str(write("saved_splits", tmp_path)), split="test").read()) == 1
    assert [row["answer"] for row in RowSource(path=str(write("jsonl", tmp_path)), split="train[1:3]").read()] == [
        "2",
        "3",
    ]
    with pytest.raises(ValueError, match=r"split='dev'.*\['train', 'test'\]"):
        RowSource(path=str(tmp_path / "rows.saved_splits"), split="dev").read()


def test_streaming_gives_an_iterable_and_honours_limit(tmp_path: Path) -> None:
    stream = RowSource(path=str(write("jsonl", tmp_path)), streaming=True, limit=2).read()
    assert not hasattr(stream, "__len__")
    assert [row["answer"] for row in stream] == ["1", "2"]


@pytest.mark.parametrize("path", ["missing.jsonl", "./nowhere", "/no/such/folder", "a/b/c"])
def test_a_missing_file_is_named(path: str) -> None:
    with pytest.raises(ValueError, match="there is no such file or folder") as error:
        RowSource(path=path).read()
    assert path in str(error.value)


def test_a_hub_name_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ValueError, match=r"no-such-owner/no-such-set.*neither a file or folder here nor on the hub"):
        RowSource(path="no-such-owner/no-such-set").read()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_cache_that_cannot_be_written_is_told_from_a_missing_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    with pytest.raises(ValueError, match=r"the cache of `datasets`, '.*file/datasets', cannot be used: .*HF_HOME"):
        RowSource(path=str(write(kind, tmp_path))).read()


def test_an_unknown_kind_of_file_lists_the_known_ones(tmp_path: Path) -> None:
    for name in ("rows.xlsx", "rows.parquet.gz", "rows.gz"):
        (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match=r"unknown kind of file.*\.jsonl.*\.gz, too"):
            RowSource(path=str(tmp_path / name)).read()


def test_equal_columns_of_a_parquet_file_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, names=["prompt", "answer", "prompt"]), path)
    with pytest.raises(ValueError, match=r"rows\.parquet: two columns are called 'prompt'"):
        RowSource(path=str(path)).read()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rows", [[], Dataset.from_list([]), list])
def test_an_empty_data_set_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        RowSource(rows=rows).read()


@pytest.mark.parametrize("rows", [[], Dataset.from_list([])])
def test_no_rows_are_refused_before_anything_is_read(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"RowSource: rows=\[\] has no rows"):
        RowSource(rows=rows)
    with pytest.raises(ValueError, match=r"eval_prompts.easy=\[\] has no rows"):
        prompt_source(rows, "eval_prompts.easy")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="exactly one of path and rows, not neither"):
        RowSource()
    with pytest.raises(ValueError, match="exactly one of path and rows"):
        RowSource(path="a", rows=ROWS)
    with pytest.raises(ValueError, match="limit=0"):
        RowSource(rows=ROWS, limit=0)
    with pytest.raises(ValueError, match="expected a list of dictionaries or a Dataset, got int"):
        RowSource(rows=lambda: 3).read()


def test_missing_columns_list_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"prompt_column='question': here has no such column; it has \['a', 'b'\]"):
        require_columns(["a", "b"], ["question"], "here", "prompt_column")


def test_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    order = shuffled_order(50, 3, 2)
    assert sorted(order) == list(range(50))
    assert (order == shuffled_order(50, 3, 2)).all()
    assert (order != shuffled_order(50, 3, 1)).any()
    assert (order != shuffled_order(50, 4, 2)).any()
