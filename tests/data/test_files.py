"""Data files: values stay what they are in the file, and a broken file is one message with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.data.rows import RowError, RowSource
from lightrl.data.sft import SFTSource

GOOD = b'{"prompt":"1+1="}\n'
BROKEN = [
    ("rows.jsonl", GOOD + b'\n{"prompt":\n' + GOOD, "line 3: "),
    ("rows.jsonl", GOOD + b"\0\0\0\n", "line 2: "),
    ("rows.jsonl", GOOD + b"{}", "line 2: "),
    ("rows.jsonl", GOOD + b'"a"\n', "line 2: "),
    ("rows.jsonl", GOOD + b'{"prompt":"\xff"}\n', "line 2: "),
    ("rows.jsonl", GOOD + b'{"prompt":' + b"[" * 100_000, "line 2: "),
    ("rows.jsonl", gzip.compress(GOOD * 1000, mtime=0)[:40], "line 0: EOFError"),
    ("rows.jsonl", b"\n\n\n", "no rows"),
    ("rows.json", b"[]", "no rows"),
    ("rows.json", b"[\n{]", "line 2: "),
    ("rows.json", b'["a", "b"]', "not an example"),
    ("rows.parquet", GOOD, "Parquet"),
    ("rows.csv", b"prompt,answer\n1,2\n\n3,4,5\n", "line 4: "),
    ("rows.csv", b"prompt,answer\n1,2\n3\n", "line 3: "),
    ("rows.csv", b'prompt,answer\n"1,2\n3,4\n', "line 3: "),
    ("rows.csv", b"prompt,prompt\n1,2\n", "line 1: "),
    ("rows.csv", b"prompt,answer\n", "no rows"),
    ("rows.csv", b"prompt\n\xff\n", "rows.csv, line"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_one_message_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as info:
        RowSource(path=str(tmp_path / name)).read()
    assert str(tmp_path / name) in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", GOOD + b"\r\n" + GOOD),
        ("rows.jsonl", b"\xef\xbb\xbf" + GOOD * 2),
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
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: JSONDecodeError"):
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
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "packed.jsonl.gz", "folder"])
def test_values_of_json_stay_what_they_are(tmp_path: Path, name: str, streaming: bool) -> None:
    rows = [{"prompt": "1", "answer": value} for value in VALUES]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
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
        path.write_text(f"prompt{sep}answer\n" + "".join(f"p{sep}{cell}\n" for cell in cells))
        data = RowSource(path=str(path), streaming=streaming, load_kwargs=options).read()
        assert [row["answer"] for row in data] == wanted


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_may_differ_in_columns(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"answer": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"answer": 2.5, "hint": "007"}\n')
    data = RowSource(path=str(tmp_path), streaming=streaming).read()
    assert [(row["answer"], row.get("hint")) for row in data] == [(2, None), (2.5, "007")]
    assert streaming or data.column_names == ["answer", "hint"]


def test_margins_of_a_csv_file_are_numbers(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected,margin\n1=,2=,3=,1\n1=,4=,5=,0.5\n")
    pairs = PreferenceSource(path=str(path), margin_column="margin").tokenized(tokenizer)
    assert [pair.margin for pair in pairs] == [1.0, 0.5]
    path.write_text("prompt,chosen,rejected,margin\n1=,2=,3=,much\n")
    with pytest.raises(ValueError, match="margin='much'"):
        PreferenceSource(path=str(path), margin_column="margin").tokenized(tokenizer)


CHAT = "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}){% endfor %}"
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'user' and loop.index % 2 == 0 %}{{ raise_exception('roles must take "
    "turns') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
USER = {"role": "user", "content": "1"}
BAD_PROMPTS = [
    (None, "must be a string or a nonempty list"),
    (7, "got 7"),
    ("", "is an empty string"),
    ([], "nonempty list"),
    (["1"], "A message must be a dictionary with role and content, got '1'"),
    ([{"role": "user"}], "role and content"),
    ([{"role": None, "content": "1"}], "role and content"),
    ([{"role": "usr", "content": "1"}], "role='usr': .* Use one of assistant, "),
    ([{"role": "user", "content": 5}], "content must be a string or a list of blocks, got 5"),
    ([{"role": "user", "content": ["x"]}], "content block .* got 'x'"),
    ([{"role": "user", "content": [{"type": "sound"}]}], "content block"),
    ([{"role": "user", "content": [{"type": "text"}]}], "text block must contain a text"),
    ("\ud800", "unpaired surrogate"),
    ([{"role": "user", "content": "a\udfff"}], "unpaired surrogate"),
    ([USER, USER], "can't render this conversation .user, user.: roles must take turns"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_found_before_training_or_dropped_and_counted(
    tokenizer: Any, prompt: Any, message: str
) -> None:
    tokenizer.chat_template = TURNS
    rows = [{"prompt": [USER]}] * 2 + [{"prompt": prompt}]
    with pytest.raises(RowError, match=f"list, row 2, column 'prompt': .*{message}"):
        PromptSource(rows=rows).load(tokenizer)
    for limit in (None, 5):
        prompts = PromptSource(rows=rows, on_bad_row="drop", max_prompt_tokens=limit).load(tokenizer)
        assert len(prompts) == 2 and prompts.counts["dropped"] == 1
    with pytest.raises(RowError, match="no example is left: 1 of 1 examples are invalid"):
        PromptSource(rows=rows[2:], on_bad_row="drop").load(tokenizer)


def test_a_bad_row_of_a_file_is_named_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n\n" + GOOD + b'{"prompt":null}\n')
    with pytest.raises(RowError, match=r"rows\.jsonl, row 2 \(line 5\), column 'prompt': .*got None"):
        PromptSource(path=str(path)).load(tokenizer)


def test_a_role_that_the_template_names_is_one(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT + "{# ipython #}"
    rows = [{"prompt": [{"role": "ipython", "content": "1"}]}]
    assert PromptSource(rows=rows).load(tokenizer).batch(0, 1).texts == ["(ipython:1)"]


def test_bad_rows_of_a_stream_are_an_error_or_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt":"1"}\n{"prompt":""}\n{"prompt":"2"}\n')
    stream = PromptSource(path=str(path), streaming=True).load(tokenizer, shuffle=False)
    with pytest.raises(RowError, match="row 1, column 'prompt': the prompt is an empty string"):
        stream.batch(0, 3)
    stream = PromptSource(path=str(path), streaming=True, on_bad_row="drop").load(tokenizer, shuffle=False)
    assert stream.batch(0, 4).texts == ["1", "2", "1", "2"]
    assert stream.counts["dropped"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "completion": "2"}, "row 1: "),
        ({"prompt": "1", "completion": None}, "row 1: the completion must be a string"),
        ({"prompt": "1", "completion": [None]}, "row 1: A message must be"),
        ({"prompt": "1", "completion": "\ud800"}, "row 1: .*surrogate"),
        ({"prompt": 3, "completion": "2"}, "row 1: "),
    ],
)
def test_bad_supervised_rows_are_named_or_dropped(tokenizer: Any, row: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "1", "completion": "2"}, row]
    with pytest.raises(RowError, match=message):
        SFTSource(rows=rows).tokenized(tokenizer)
    assert len(SFTSource(rows=rows, on_bad_row="drop").tokenized(tokenizer)) == 1


@pytest.mark.parametrize("messages", [None, "text", [], [5], [{"role": "assistant", "content": "1"}]])
def test_bad_conversations_are_named(tokenizer: Any, messages: Any) -> None:
    with pytest.raises(RowError, match="list, row 0: "):
        SFTSource(rows=[{"m": messages}], messages_column="m").tokenized(tokenizer)


@pytest.mark.parametrize(
    "change",
    [{"prompt": None}, {"chosen": None}, {"rejected": 5}, {"margin": "x"}, {"margin": None}, {"margin": 10**400}],
)
def test_bad_pairs_are_named_or_dropped(tokenizer: Any, change: dict[str, Any]) -> None:
    good = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1.0}
    rows = [good, {**good, **change}, good]
    with pytest.raises(RowError, match="list, row 1: "):
        PreferenceSource(rows=rows, margin_column="margin").tokenized(tokenizer)
    assert len(PreferenceSource(rows=rows, margin_column="margin", on_bad_row="drop").tokenized(tokenizer)) == 2


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "1"}]
    for bad in (
        {"media_folder": str(tmp_path / "nowhere")},
        {"on_bad_row": "skip"},
        {"max_frames": None},
        {"frame_rate": float("nan")},
    ):
        with pytest.raises(ValueError, match=rf"PromptSource\.{next(iter(bad))}="):
            PromptSource(rows=rows, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PromptMixture.weights"):
        PromptMixture([PromptSource(rows=rows)], weights=[float("nan")])
    with pytest.raises(RowError, match="row 1 is 'b'"):
        RowSource(rows=[{"a": 1}, "b"]).read()  # type: ignore[list-item]
