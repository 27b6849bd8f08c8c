"""Help and messages of the command line, as a newcomer sees them."""

from __future__ import annotations

import logging
import warnings

import pytest

from lightrl.cli import main
from lightrl.cli.console import LOGGERS, quiet


def test_noise_of_dependencies_is_hidden_and_real_warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet(resumes=True)
        try:
            warnings.warn_explicit("old", FutureWarning, "x.py", 1, module="huggingface_hub.utils")
            warnings.warn("Checkpoint directory x exists and is not empty.", stacklevel=1)
            warnings.warn_explicit("real", UserWarning, "x.py", 2, module="torch.nn")
            warnings.warn_explicit("own", FutureWarning, "x.py", 3, module="rewards")
            log = logging.getLogger("huggingface_hub.utils._http")
            log.warning("Retrying in 1s [Retry 1/5].")
            logging.getLogger("transformers.tokenization_utils_base").warning("Token indices sequence length is longer")
            log.warning("Rate limited. Waiting 9s before retry [Retry 1/5].")
        finally:
            for name in LOGGERS:
                logging.getLogger(name).filters.clear()
    assert [str(each.message) for each in seen] == ["real", "own"]
    assert "Rate limited" in caplog.text and "Retrying in" not in caplog.text
    assert "Token indices" not in caplog.text


@pytest.mark.parametrize(("command", "options"), [("fit", 10), ("predict", 7)])
def test_help_of_a_run_begins_with_what_people_set(
    command: str, options: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"usage: lightrl {command} --config FILE.yaml [--OPTION VALUE ...]"
    common = lines[3 : lines.index("", 3)]
    assert len(common) == options and all(line.startswith("  --") for line in common)
    assert sum("[--trainer." in line for line in lines) == 0
