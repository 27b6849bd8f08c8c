"""What is written is there as a whole or not at all, is checked when read, and belongs to one run."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lightrl.checkpoints.files import (
    DamagedError,
    StorageError,
    append_lines,
    atomic_folder,
    atomic_write,
    clean_leftovers,
    link,
    partial_folder,
    publish_folder,
    remove,
    verify,
)
from lightrl.checkpoints.run_folder import FolderLock, checkpoints_in

ROOT = Path(__file__).resolve().parent.parent


def in_a_process(code: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


# ---- whole or not at all ---------------------------------------------------------------------------------------------


def test_a_file_that_fails_half_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"before")
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_the_file_before_and_a_leftover_that_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"before")
    code = "import os\nfrom lightrl.checkpoints.files import atomic_write\n"
    code += "with atomic_write('x.bin') as f:\n f.write(b'half'); f.flush(); os.kill(os.getpid(), 9)"
    assert in_a_process(code, tmp_path).wait(60) == -signal.SIGKILL
    assert (tmp_path / "x.bin").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2
    assert len(clean_leftovers(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("write", ["bytes", "torch"])
def test_a_full_disk_is_one_message_and_leaves_the_file_before(write: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; `torch.save` hides the reason behind an error of its own."""
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        message = "x.ckpt.*File too large.*previous version"
        with pytest.raises(StorageError, match=message), atomic_write(path) as file:
            torch.save(torch.zeros(10_000), file) if write == "torch" else file.write(b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_message_for_a_model_folder(tmp_path: Path) -> None:
    """`safetensors` raises an error of its own, which is no OSError; its error for a damaged file stays as it is."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match="model.*File too large"), atomic_folder(tmp_path / "model") as folder:
            save_file({"x": torch.zeros(10_000)}, folder / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (tmp_path / "damaged").write_bytes(b"damaged")
    with pytest.raises(SafetensorError), atomic_folder(tmp_path / "model"):
        safe_open(tmp_path / "damaged", "pt")


def test_a_folder_is_replaced_as_a_whole_and_what_others_put_there_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for names in (("a", "b"), ("b", "c")):
        with atomic_folder(target) as folder:
            for name in names:
                (folder / name).write_text(names[0])
        (target / "mine").write_text("mine")
    assert {path.name: path.read_text() for path in target.iterdir() if path.name != "SHA256SUMS"} == {
        "b": "b",
        "c": "b",
        "mine": "mine",
    }
    with pytest.raises(KeyError), atomic_folder(target) as folder:
        (folder / "b").write_text("new")
        raise KeyError
    assert (target / "b").read_text() == "b" and list(tmp_path.iterdir()) == [target]


def test_a_folder_whose_replacement_was_interrupted_comes_back(tmp_path: Path) -> None:
    for name in (".a.ckpt.lightrl.old", ".a.ckpt.shared.lightrl.partial", ".b.ckpt.lightrl.old", "b.ckpt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    clean_leftovers(tmp_path)
    assert {path.name: (path / "x").read_text() for path in tmp_path.iterdir()} == {
        "a.ckpt": ".a.ckpt.lightrl.old",
        "b.ckpt": "b.ckpt",
    }


def test_a_checkpoint_that_a_killed_run_was_replacing_is_found(tmp_path: Path) -> None:
    """`--ckpt_path last` looks for it before the run that resumes holds the directory."""
    (tmp_path / ".last.ckpt.lightrl.old").mkdir()
    assert checkpoints_in(tmp_path) == {tmp_path / "last.ckpt"}


def test_lines_are_appended_after_half_a_line_was_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, ["1", "2"])
    with path.open("a") as file:
        file.write('{"hal')
    append_lines(path, ["3"])
    assert path.read_text() == "1\n2\n3\n"


def test_half_an_emoji_is_written_as_in_json(tmp_path: Path) -> None:
    """A column of the user's rows may contain one, and a run must not end because of it."""
    line = json.dumps({"answer": "\ud83d \U0001f98a"}, ensure_ascii=False)
    append_lines(tmp_path / "a.jsonl", [line])
    with atomic_write(tmp_path / "b.jsonl", "w") as file:
        file.write(line + "\n")
    for name in ("a.jsonl", "b.jsonl"):
        assert (tmp_path / name).read_text() == '{"answer": "\\ud83d \U0001f98a"}\n'


# ---- checksums -------------------------------------------------------------------------------------------------------


def saved(path: Path, **options: Any) -> Path:
    with atomic_write(path, **options) as file:
        torch.save({"x": torch.arange(100.0)}, file)
    return path


def test_a_flipped_bit_a_cut_file_and_an_empty_one_are_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", checksum=True)
    verify(path)
    whole = path.read_bytes()
    place = whole.index(torch.arange(100.0).numpy().tobytes()) + 40
    for broken in (
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
        whole[: len(whole) // 2],
        b"",
        b"text",
    ):
        path.write_bytes(broken)
        with pytest.raises(DamagedError):
            verify(path)
    with pytest.raises(DamagedError, match="does not exist"):
        verify(tmp_path / "nosuch")


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_run_killed_at_any_rename_leaves_a_file_that_verifies(moment: int, tmp_path: Path) -> None:
    """The three: the list of both sums, the file, the list of the new one."""
    saved(tmp_path / "x.ckpt", checksum=True)
    code = f"""
import os
from lightrl.checkpoints.files import atomic_write
calls, replace = 0, os.replace
def replaced(*args):
    global calls
    calls += 1
    replace(*args)
    if calls == {moment}:
        os.kill(os.getpid(), 9)
os.replace = replaced
with atomic_write('x.ckpt', checksum=True) as f:
    f.write(b'new')
"""
    assert in_a_process(code, tmp_path).wait(60) == -signal.SIGKILL
    verify(tmp_path / "x.ckpt")
    assert ((tmp_path / "x.ckpt").read_bytes() == b"new") == (moment > 1)


def test_a_folder_with_a_changed_or_missing_file_is_found(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "part").mkdir()
        (folder / "part" / "a").write_text("a")
    verify(tmp_path / "f")
    (tmp_path / "f" / "part" / "a").write_text("b")
    with pytest.raises(DamagedError, match="part/a doesn't match"):
        verify(tmp_path / "f")
    (tmp_path / "f" / "part" / "a").unlink()
    with pytest.raises(DamagedError, match="part/a is missing"):
        verify(tmp_path / "f")


# ---- one run at a time -----------------------------------------------------------------------------------------------


HOLD = (
    "import time; from lightrl.checkpoints.run_folder import FolderLock as F; held = F('run'); "
    "print('held', flush=True); time.sleep(600)"
)


def test_a_second_run_is_rejected_by_name_until_the_first_is_gone(tmp_path: Path) -> None:
    first = in_a_process(HOLD, tmp_path)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"in use by process {first.pid} on "):
                FolderLock(tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # a backup reads the lock file, which keeps the lock
        FolderLock(tmp_path / "copy").release()
        with pytest.raises(ValueError, match=rf"in use by process {first.pid} on "):
            FolderLock(tmp_path / "run")
    finally:
        first.kill()
        first.wait()
    FolderLock(tmp_path / "run").release()  # taken over from the dead one


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_is_a_checkpoint_and_not_a_copy(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "rollout=1.ckpt", tmp_path / "last.ckpt"
    for path in (second, first):  # the name is taken
        if kind == "file":
            saved(path, checksum=True)
        else:
            partial_folder(path).mkdir()
            saved(partial_folder(path) / "0.distcp")
            publish_folder(partial_folder(path), path)
    link(first, second)
    verify(second)
    files = [path if kind == "file" else path / "0.distcp" for path in (first, second)]
    assert files[0].samefile(files[1])
    remove(first)
    verify(second)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".sha256") == ["last.ckpt"]


def test_a_link_into_a_directory_that_became_read_only_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "rollout=1.ckpt", tmp_path / "last.ckpt"
    saved(first, checksum=True)

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(StorageError, match=r"last\.ckpt"):
        link(first, second)
