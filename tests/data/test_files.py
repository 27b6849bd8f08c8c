"""Broken data files and rows: one message with file, line and value, before anything is trained, and exit status 2."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.data.rows import RowError, RowSource
from lightrl.data.sft import SFTSource

GOOD = b'{"prompt":"1+1="}\n'
BROKEN = [
    ("rows.jsonl", GOOD + b'\n{"prompt":\n' + GOOD, r"rows\.jsonl, line 3: .*is not JSON .*correct it or drop it"),
    ("rows.jsonl", GOOD + b"\0\0\0\n", "line 2: .*is not JSON"),
    ("rows.jsonl", b"", "is empty: there are no rows"),
    ("rows.jsonl", b"\n\n\n", "blank lines alone"),
    ("rows.jsonl", GOOD + b"{}", r"line 2: \{\} has no columns"),
    ("rows.json", b"{}", r"rows\.json: \{\} has no columns"),
    ("rows.json", b"[]", "holds no rows"),
    ("rows.json", b"[\n{]", r"line 2: .*is not JSON .*array of objects"),
    ("rows.jsonl", GOOD + b'{"prompt":"\\ud83d"}\n', r"line 2: '\\ud83d' is half of a surrogate pair"),
    ("rows.jsonl", GOOD + b'{"prompt":"\xff"}\n', r"line 2: byte 12 is b'\\xff', which is no UTF-8.*iconv"),
    ("rows.jsonl", GOOD + b'{"a":1,"prompt":"1","a":2}\n', "line 2: the key 'a' stands twice"),
    ("rows.jsonl", GOOD + b'{"prompt":' + b"[" * 100_000, "line 2: nested too deeply"),
    ("rows.jsonl", GOOD + b'{"prompt":"1","n":' + b"9" * 5000 + b"}\n", "line 2: .*4300 digits"),
    ("rows.json", b'["a", "b"]', 'element 1: "a" is no row'),
    ("rows.jsonl", GOOD + b'"a"\n', 'line 2: "a" is no row'),
    ("rows.jsonl", GOOD.decode().encode("utf-16"), "is UTF-16 text"),
    ("rows.jsonl", b"PAR1" + b"x" * 20, r"is a Parquet file: name it rows\.parquet"),
    ("rows.jsonl", b"PK\x03\x04xxxx", "a ZIP archive.*unpack it"),
    ("rows.jsonl", gzip.compress(GOOD * 1000, mtime=0)[:40], "after line 0: .*EOFError"),
    ("rows.parquet", b"PAR1" + b"x" * 20 + b"PAR1", "is a broken Parquet file"),
    ("rows.parquet", GOOD, "is no Parquet file: it begins with .*wrong name"),
    ("rows.csv", b"prompt,answer\n1,2\n\n3,4,5\n", "line 4: 3 cells, the header has 2 .*'3,4,5'"),
    ("rows.csv", b"prompt,answer\n1,2\n3\n", "line 3: 1 cells, the header has 2"),
    ("rows.csv", b'prompt,answer\n"1,2\n3,4\n', "line 3: .*quoted cell"),
    ("rows.csv", b"prompt,prompt\n1,2\n", "two columns are called 'prompt'"),
    ("rows.csv", b"prompt,answer\n", "a header alone"),
    ("rows.csv", b"prompt\n\xff\n", "line 2: byte 1 is .*UTF-8"),
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
        ("rows.jsonl", gzip.compress(GOOD * 2, mtime=0)),
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
    (tmp_path / "b.jsonl").write_bytes(GOOD + b"{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: "):
        RowSource(path=str(tmp_path)).read()
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: "):
        stream = PromptSource(path=str(tmp_path / "b.jsonl"), streaming=True).load(tokenizer, shuffle=False)
        stream.batch(0, 2)


def test_files_of_a_folder_are_looked_at_before_a_library_reads_them(tmp_path: Path) -> None:
    """pyarrow's reader ends the process on a line of null among objects."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b'null\n{}\n{"prompt": "1+1="}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: "):
        RowSource(path=str(tmp_path)).read()


def test_a_broken_saved_data_set_is_named(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "1"}]).save_to_disk(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="saved.*cannot be read.*Save it again"):
        RowSource(path=str(tmp_path / "saved")).read()


CHAT = "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}){% endfor %}"
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'user' and loop.index % 2 == 0 %}{{ raise_exception('roles must take "
    "turns') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
USER = {"role": "user", "content": "1"}
BAD_PROMPTS = [
    (None, "must be a string or a list of messages"),
    (7, "got 7 of type int"),
    ("", "is an empty string"),
    ([], "not empty"),
    (["1"], "A message must be a dictionary with role and content, got '1'"),
    ([{"role": "user"}], "role and content"),
    ([{"role": None, "content": "1"}], "role and content"),
    ([{"role": "usr", "content": "1"}], "the role 'usr': roles are assistant, "),
    ([{"role": "user", "content": 5}], "content must be a string or a list of blocks, got 5"),
    ([{"role": "user", "content": ["x"]}], "content block .* got 'x'"),
    ([{"role": "user", "content": [{"type": "sound"}]}], "content block"),
    ([{"role": "user", "content": [{"type": "text"}]}], "text block must hold a text"),
    ("\ud800", "half of a surrogate pair"),
    ([{"role": "user", "content": "a\udfff"}], "half of a surrogate pair"),
    ([USER, USER], "cannot render this conversation .user, user.: roles must take turns"),
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
    with pytest.raises(RowError, match="no row is left: 1 of 1 rows cannot be used"):
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
    with pytest.raises(RowError, match="row 1 is 'b' of type str"):
        RowSource(rows=[{"a": 1}, "b"]).read()  # type: ignore[list-item]


def test_a_broken_file_ends_a_run_with_status_two_and_one_message(tmp_path: Path, root: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD + b"{\n")
    actor = {"path": str(root / "configs/quickstart/model"), "random_init": True}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}
    model = {
        "class_path": "lightrl.algorithms.SFTLightningModule",
        "init_args": {"actor": actor, "optimizer": optimizer},
    }
    data = {"class_path": "lightrl.data.SFTDataModule", "init_args": {"train": {"path": str(tmp_path / "rows.jsonl")}}}
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    config = {"model": model, "data": data, "trainer": trainer}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-c", "from lightrl.cli import main; main()", "fit", "--config", "run.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"error: {tmp_path / 'rows.jsonl'}, line 2: " in done.stderr
