"""A process whose offspring ends with it, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NEW_MOUNTS, NEW_PIDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
DIE, ADOPT, PRIVATE = 1, 36, 1 << 18 | 1 << 14  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER; MS_PRIVATE | MS_REC


def libc_call(function: str, *arguments: Any) -> None:
    """Calls the C library.

    Raises:
        OSError: it failed.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    """Has this process killed when the one that forked it ends."""
    libc_call("prctl", DIE, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind."""
    libc_call("prctl", ADOPT, 1, 0, 0, 0)


def contained(work: Callable[[bool], int]) -> int:
    """The status of `work`, run in a process that ends with this one.

    Where namespaces may be made it is the first of process numbers and mounts of its own, so that all that it started
    ends with it, whatever it left behind; else that holds for what calls `die_with_parent`.

    Args:
        work: is told whether there are namespaces.
    """
    isolated = False
    with suppress(OSError):
        libc_call("unshare", NEW_MOUNTS | NEW_PIDS)
        libc_call("mount", None, b"/", None, PRIVATE, None)
        isolated = True
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent()
            if isolated:
                libc_call("mount", b"proc", b"/proc", b"proc", 0, None)
            status = work(isolated)
        except BaseException:  # an interrupt too: nobody is above it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other's to end by
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
