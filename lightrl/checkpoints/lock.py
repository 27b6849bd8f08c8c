"""Keeps a folder to one run at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from pathlib import Path

from lightrl.checkpoints.files import writing
from lightrl.checkpoints.redaction import redact_text

LOCK = ".lightrl.lock"


class FolderLock:
    """Holds a folder for one run. The system releases the lock when the process ends.

    Args:
        folder: Made if it is missing. `.lightrl.lock` in it names the run that holds it.

    Attributes:
        sure: The file system has locks, so that no run of another host is in the folder.

    Raises:
        ValueError: Another run holds the folder; the message names its process.
        StorageError: The folder is read-only.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / LOCK
        self.sure = True
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            if holder.startswith(f"process {os.getpid()} "):
                holder = f"another run of this process ({os.getpid()})"
            self._file.close()
            raise ValueError(
                f"{str(path.parent)!r} is in use by {holder}: two runs in one folder would mix their metrics and "
                "checkpoints. Wait for that run, end it, or use another folder (--run_dir, dirpath, the logger's name)."
            ) from None
        except OSError as error:
            self.sure = False
            print(f"Cannot lock {folder} ({error}). Make sure that no other run writes there.", file=sys.stderr)
        self._file.truncate(0)
        command = json.dumps(redact_text(" ".join(sys.argv)))
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} ({command})\n")
        self._file.flush()

    def release(self) -> None:
        """Lets go. The file stays, empty: another process may be about to lock it."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()
