"""a process that trains -> its memory allocator keeps what was freed.

glibc gives every freed array above 32 MB, and the end of its heap, back to the system, and takes
fresh pages for the next one. A training step frees and takes the same arrays again and again: page
faults were 22 to 29 % of its CPU time on a virtual machine, and 0.3 % with this.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of mallopt(3)."""
NEVER = -1


def keep_freed_memory() -> None:
    """From now on this process reuses freed memory and returns none before it ends; without glibc
    nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, NEVER)
