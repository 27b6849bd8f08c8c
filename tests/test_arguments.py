"""Checks of arguments, import paths, and optional packages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightrl.compat.arguments import bearer_token, imported, require_packages


def test_a_file_that_fails_is_run_again_after_a_fix(tmp_path: Path) -> None:
    (file := tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="broken.py.*ZeroDivisionError"):
        imported("reward", f"{file}:f")
    file.write_text("f = 1\n")
    assert imported("reward", f"{file}:f") == 1


def test_a_file_that_many_threads_import_is_run_once(tmp_path: Path) -> None:
    (file := tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)\nfound = []\n")
    with ThreadPoolExecutor(4) as threads:
        lists = list(threads.map(lambda _: imported("factory:", f"{file}:found"), range(4)))
    assert all(one is lists[0] for one in lists)


def test_missing_packages_are_rejected_with_the_command_that_installs_them() -> None:
    require_packages("Judge", "rewards", "json", "re")
    with pytest.raises(ValueError, match=r"Judge: .*no_such_package.* pip install 'lightrl-llm\[rewards\]'\."):
        require_packages("Judge", "rewards", "json", "no_such_package")


def test_a_token_that_no_header_can_hold_is_not_shown() -> None:
    assert bearer_token("key", "") is None and bearer_token("key", "sk-1") == "sk-1"
    with pytest.raises(ValueError, match="^key") as error:
        bearer_token("key", "hunter2\n")
    assert "hunter2" not in str(error.value)
