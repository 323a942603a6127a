"""The C library's heap, where a CPU is timed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``, from its malloc.h."""


def keep_freed_memory() -> bool:
    """Have this process keep memory that it frees, from now on, as accelerators' allocators do.

    By default glibc hands large blocks back to the system at some frees and not at others. What then takes them anew
    pays a page fault for every 4 KiB: up to a tenth of a training step's time, in some steps.

    Returns:
        Whether it will; False with another C library than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
