"""Freed memory is kept where asked for, and not otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from knapformer.measure.heap import keep_freed_memory

COUNT_FAULTS = """
import resource, sys
import numpy as np
from knapformer.measure.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
np.ones(8_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(8_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(argument: str) -> int:
    """Of making and freeing 64 MB five times, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, argument], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_kept_memory_needs_no_page_faults() -> None:
    assert page_faults("keep") < 100
    assert page_faults("return") > 5 * 15 * 4, "at least one fault for every huge page, and mostly one for every 4 KiB"


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert not keep_freed_memory()
