"""Values of JSON and CSV files reach the rows as they stand in the file, and columns that mix kinds are refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.preferences import PreferenceSource
from lightrl.data.rows import RowSource
from lightrl.rewards import ExactAnswer

DEEP: Any = 1
for _ in range(51):
    DEEP = [DEEP]

JSON_COLUMNS: list[list[Any]] = [
    ["2024-01-01", "2024-01-02"],
    ["007", "7", None],
    ["1e5", "10:30"],
    [2, 2, 2.5],
    [485.602722, 3],
    [2, None],
    [1.5, 2.5],
    [True, False],
    [123456789012345678901, 2],
    [["2024-01-01", "007"], ["x"]],
    [{"when": "2024-01-01"}, {"value": 0.1, "other": None}],
    ["plain", [{"role": "user", "content": "2024-01-01"}]],
    [[{"role": "user", "content": "1"}], [{"role": "user", "content": [{"type": "text", "text": "007"}]}]],
    [None, None],
    [[], {}],
]


def read(path: Path, streaming: bool = False, **kwargs: Any) -> list[Any]:
    return [row["answer"] for row in RowSource(path=str(path), streaming=streaming, **kwargs).read()]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return found == wanted and json.dumps(found) == json.dumps(wanted)  # 2 is 2.0, and True is 1


@pytest.mark.parametrize("values", JSON_COLUMNS)
@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_json_stay_what_they_are(tmp_path: Path, values: list[Any], streaming: bool) -> None:
    rows = [{"prompt": "1", "answer": value} for value in values]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(lines.encode()))
    for name in ("rows.jsonl", "rows.json", "packed.jsonl"):
        assert same(read(tmp_path / name, streaming), values), name


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["007", "8"], ["007", "8"]),
        (["1.50", "2.5"], ["1.50", "2.5"]),
        (["2", "", "3"], [2, None, 3]),
        (["2", "2.5"], [2, 2.5]),
        (["1.5", "", "-0.25"], [1.5, None, -0.25]),
        (["true", "False"], ["true", "False"]),
        (["None", "NA", "nan", "null"], ["None", "NA", "nan", "null"]),
        (["2024-01-01", "1e5"], ["2024-01-01", "1e5"]),
        (["12345678901234567890123", "2"], ["12345678901234567890123", "2"]),
        (['"a\n\nb"', '"c,d"'], ["a\n\nb", "c,d"]),
        (["x" * 200_000, "2"], ["x" * 200_000, "2"]),
        (["inf", "1.5"], ["inf", "1.5"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_cells_of_csv_are_text_unless_all_are_plain_numbers(
    tmp_path: Path, cells: list[str], wanted: list[Any], streaming: bool
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"p,{cell}\n" for cell in cells))
    assert same(read(tmp_path / "rows.csv", streaming), wanted)
    (tmp_path / "other.csv").write_text("prompt;answer\n" + "".join(f"p;{cell}\n" for cell in cells))
    assert same(read(tmp_path / "other.csv", streaming, load_kwargs={"sep": ";"}), wanted)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_files_of_a_folder_have_columns_in_common(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"answer": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"answer": 2.5, "hint": "007"}\n')
    assert same(read(tmp_path, streaming), [2, 2.5])
    assert [row["hint"] for row in RowSource(path=str(tmp_path), streaming=streaming).read()] == [None, "007"]
    (tmp_path / "b.jsonl").write_text('{"answer": "007"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1, column 'answer'|a\.jsonl, line 1, column 'answer'"):
        read(tmp_path, streaming)


def test_csv_files_of_a_folder_need_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1,7\n")
    (tmp_path / "b.csv").write_text("answer,prompt\n007,1\n")
    assert sorted(read(tmp_path)) == ["007", "7"]
    (tmp_path / "b.csv").write_text("prompt,anwser\n1,7\n")
    with pytest.raises(ValueError, match=r"b\.csv has the columns \['prompt', 'anwser'\].*same columns"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ('"007"', "7", r'column \'answer\': 7 is no text, and "007" \(.*line 1\) is.*as text, here "7"'),
        ("true", '"x"', r'line 1, column \'answer\': true is no text, and "x" \(.*line 2\)'),
        ('"2"', "NaN", "NaN is no text"),
        ('"2"', "123456789012345678901", "123456789012345678901 is no text"),
        ("1e999", "2", "line 1: the number 1e999 is beyond what a float holds; write it as text"),
        ("2", json.dumps(DEEP), r"line 2, column 'answer': nested more than 50 levels deep"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_no_type_holds_are_refused(
    tmp_path: Path, text: str, other: str, message: str, streaming: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"answer": {text}}}\n{{"answer": {other}}}\n')
    with pytest.raises(ValueError, match=message) as info:
        read(path, streaming)
    assert str(info.value).startswith(str(path)) and "\n" not in str(info.value)


def test_a_right_answer_is_right_beside_fractions(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n1+1=,2\n5/2=,2.5\n?,\n")
    assert ExactAnswer()(completions=["2", "2.5", "2"], answer=read(path)) == [1.0, 1.0, None]


def test_margins_of_a_csv_file_are_numbers(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected,margin\n1,2,3,1\n1,4,5,0.5\n")
    with pytest.raises(ValueError, match="completion must be a string"):
        PreferenceSource(path=str(path), margin_column="margin").tokenized(tokenizer)
    path.write_text("prompt,chosen,rejected,margin\n1=,2=,3=,1\n1=,4=,5=,0.5\n")
    pairs = PreferenceSource(path=str(path), margin_column="margin").tokenized(tokenizer)
    assert [pair.margin for pair in pairs] == [1.0, 0.5]


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for number, text in enumerate(["a", "b"]):
        path.write_text(f'{{"answer": "{text}"}}\n')
        os.utime(path, (number, number))
        assert read(path) == [text]


@pytest.mark.parametrize("make", ["empty", "adir.jsonl"])
def test_a_folder_without_files_is_named(tmp_path: Path, make: str) -> None:
    (tmp_path / make).mkdir()
    with pytest.raises(ValueError, match="no file in this folder"):
        RowSource(path=str(tmp_path / make)).read()


def test_a_path_that_is_too_long_is_one_message() -> None:
    with pytest.raises(ValueError, match=r"path='xxx.*: OSError: .*too long"):
        RowSource(path="x" * 300 + ".jsonl").read()
