"""Data files: values stay what they are in the file, and errors name the file and the line, or the example."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset, DatasetDict

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.rows import RowSource
from lightrl.data.templates import as_messages

GOOD = b'{"prompt":"1+1="}\n'
BROKEN = [
    ("rows.jsonl", GOOD + b'\n{"prompt":\n' + GOOD, "line 3: "),
    ("rows.jsonl", GOOD + b'"a"\n', "line 2: "),
    ("rows.jsonl", b"\n\n\n", "no rows"),
    ("rows.json", b"[\n{]", "line 2 "),
    ("rows.json", b'["a", "b"]', "not an object"),
    ("rows.parquet", GOOD, "Parquet"),
    ("rows.csv", b"prompt,answer\n1,2\n\n3,4,5\n", "line 4: "),
    ("rows.csv", b"prompt,answer\n1,2\n3\n", "line 3: "),
    ("rows.csv", b"prompt,answer\n", "no rows"),
    ("rows.csv", b"prompt,answer,answer\n1,2,3\n", "repeats a column"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as info:
        RowSource(path=str(tmp_path / name)).read()
    assert str(tmp_path / name) in str(info.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD),
        ("rows.jsonl", b'{"prompt":"a\\ud83d\\ude00"}\n' + '{"prompt":"\u2028"}\n'.encode()),
        ("rows.json", GOOD * 2),
        ("rows.json", b'[\n {"prompt": "1"},\n {"prompt": "2"}\n]'),
        ("rows.csv", b'prompt,answer\n"1,\n2",3\n"",5\n'),
    ],
)
def test_whole_files_of_every_form_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert len(RowSource(path=str(tmp_path / name)).read()) == 2


def test_a_broken_file_in_a_folder_or_a_stream_is_named(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD * 2 + b'{"prompt":\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: "):
        RowSource(path=str(tmp_path)).read()
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: "):
        stream = PromptSource(path=str(tmp_path / "b.jsonl"), streaming=True).load(tokenizer, shuffle=False)
        stream.batch(0, 3)


VALUES: list[Any] = [
    "2024-01-01",
    "007",
    2,
    2.5,
    None,
    True,
    123456789012345678901,
    ["007", 2, None],
    {"when": "2024-01-01", "other": None},
    [{"role": "user", "content": [{"type": "text", "text": "1.50"}]}],
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["rows.json", "folder"])
def test_values_of_json_stay_what_they_are(tmp_path: Path, name: str, streaming: bool) -> None:
    rows = [{"prompt": "1", "answer": value} for value in VALUES]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(lines)
    data = RowSource(path=str(tmp_path / name), streaming=streaming).read()
    found = [row["answer"] for row in data]
    assert found == VALUES and json.dumps(found) == json.dumps(VALUES)  # 2 equals 2.0, and True equals 1


@pytest.mark.parametrize("streaming", [False, True])
def test_cells_of_csv_are_text(tmp_path: Path, streaming: bool) -> None:
    cells = ["007", "1.50", "", "true", "None", "2024-01-01", '"a\n\nb"', '"c,d"', "x" * 200_000]
    wanted = ["007", "1.50", None, "true", "None", "2024-01-01", "a\n\nb", "c,d", "x" * 200_000]
    for sep, options in ((",", {}), (";", {"sep": ";"})):
        path = tmp_path / "rows.csv"
        path.write_text(f"prompt{sep}answer{sep}{sep}\n" + "".join(f"p{sep}{cell}{sep}{sep}\n" for cell in cells))
        data = RowSource(path=str(path), streaming=streaming, load_kwargs=options).read()
        assert [row["answer"] for row in data] == wanted


def test_arguments_that_a_local_file_would_ignore_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"data": [{"prompt": "1"}]}')
    with pytest.raises(ValueError, match="load_kwargs"):
        RowSource(path=str(tmp_path / "rows.json"), load_kwargs={"field": "data"}).read()


@pytest.mark.parametrize("stored", ["saved", "saved_splits", "folder", "folder/train.jsonl"])
def test_slices_and_sums_of_splits(tmp_path: Path, stored: str) -> None:
    """A slice that is ignored would evaluate on the training examples."""
    splits = {"train": [{"prompt": str(i)} for i in range(4)], "test": [{"prompt": "t"}]}
    made = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    made["train"].save_to_disk(str(tmp_path / "saved"))
    made.save_to_disk(str(tmp_path / "saved_splits"))
    (tmp_path / "folder").mkdir()
    for name, rows in splits.items():
        (tmp_path / "folder" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prompts(split: str) -> list[str]:
        return [row["prompt"] for row in RowSource(path=str(tmp_path / stored), split=split).read()]

    assert prompts("train[:2]") == ["0", "1"] and prompts("train[75%:]") == ["3"]
    assert prompts("train[:1]+train[-1:]") == ["0", "3"]
    if stored in ("saved_splits", "folder"):  # the others have one split
        assert prompts("train+test") == ["0", "1", "2", "3", "t"]
        with pytest.raises(ValueError, match="split='validation': .* has train, test"):
            prompts("validation")
    with pytest.raises(ValueError, match=r"split='train\[x\]'"):
        prompts("train[x]")


@pytest.mark.parametrize("rows", [lambda: ["1", "2"], lambda: pandas.DataFrame({"prompt": ["1"]})])
def test_rows_that_are_not_dictionaries_are_rejected(rows: Any) -> None:
    with pytest.raises(ValueError, match="not dictionaries"):
        RowSource(rows=rows).read()
    assert RowSource(rows=lambda: iter([{"prompt": "1"}])).read() == [{"prompt": "1"}]  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="limit=-1"):
        RowSource(rows=[{"prompt": "1"}], limit=-1).read()


def test_files_of_a_folder_may_differ_in_columns(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "2", "answer": 2.5, "hint": "007"}\n')
    prompts = PromptSource(path=str(tmp_path)).load(tokenizer, shuffle=False).batch(0, 2)
    assert prompts.columns == {"prompt": ["1", "2"], "answer": [2, 2.5], "hint": [None, "007"]}


def test_margins_of_a_csv_file_are_numbers(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected,margin\n1=,2=,3=,1\n1=,4=,5=,0.5\n")
    pairs = PreferenceSource(path=str(path), margin_column="margin").tokenized(tokenizer)
    assert [pair.margin for pair in pairs] == [1.0, 0.5]


TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}({{ m.role }}:{{ m.content }}){% endfor %}"
)
USER = {"role": "user", "content": "1"}
BAD_PROMPTS = [
    None,
    7,
    [],
    ["1"],
    [{"role": "user"}],
    [{"role": None, "content": "1"}],
    [{"role": "usr", "content": "1"}],
    [{"content": "1"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    "\ud800",
    [USER, USER],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_bad_prompt_is_named_before_training(tokenizer: Any, prompt: Any) -> None:
    tokenizer.chat_template = TURNS
    with pytest.raises(ValueError, match="list, row 2: "):
        PromptSource(rows=[{"prompt": [USER]}] * 2 + [{"prompt": prompt}]).load(tokenizer)


def test_what_is_wrong_with_a_prompt_is_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="nonempty list of messages"):
        as_messages(["1"])
    for message in ({"content": "1"}, {"role": "user", "content": 7}):
        with pytest.raises(ValueError, match="with role and content"):
            as_messages([message])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        PromptSource(rows=[{"prompt": "half an emoji: \ud83d"}]).load(tokenizer)


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path) -> None:
    """`datasets` reads the most frequent format of a folder."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(GOOD)
    with warnings.catch_warnings(action="error"):
        assert len(RowSource(path=str(tmp_path)).read()) == 2
    (tmp_path / "c.csv").write_text("prompt\n2+2=\n")
    with pytest.warns(UserWarning, match=r"ignoring c\.csv"):
        RowSource(path=str(tmp_path)).read()


def test_a_bad_row_of_a_file_is_named_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n\n" + GOOD + b'{"prompt":null}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2 \(line 5\): "):
        PromptSource(path=str(path)).load(tokenizer)
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2: "):
        PromptSource(path=str(path), streaming=True).load(tokenizer, shuffle=False).batch(0, 3)


@pytest.mark.parametrize(
    "change", [{"prompt": None}, {"chosen": None}, {"margin": "x"}, {"margin": None}, {"margin": float("nan")}]
)
def test_bad_pairs_are_named(tokenizer: Any, change: dict[str, Any]) -> None:
    good = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1.0}
    with pytest.raises(ValueError, match="list, row 1: "):
        PreferenceSource(rows=[good, {**good, **change}, good], margin_column="margin").tokenized(tokenizer)
