"""How long a rank itself computes in a step, waiting for others excluded."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

PROFILE_EVERY = 4
"""On CUDA every fourth step is profiled for busy time, and left out of the step times."""


class BusyClock(Protocol):
    """``start`` before a step, ``stop`` after it: the seconds that this rank computed."""

    def start(self) -> None: ...

    def stop(self) -> float: ...


class ThreadClock:
    """CPU time of the calling thread.

    On the CPU both passes run in the thread that calls them, while gloo sends and receives in threads of its own and
    the caller sleeps. Packing and unpacking of exchanges counts as computing.
    """

    def start(self) -> None:
        self._began = time.thread_time()

    def stop(self) -> float:
        return time.thread_time() - self._began


class KernelClock:
    """Device time of all kernels but NCCL's, by torch's profiler. It slows the step that it measures."""

    def start(self) -> None:
        self._profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.__enter__()

    def stop(self) -> float:
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        events = self._profile.key_averages()
        return 1e-6 * sum(float(e.self_device_time_total) for e in events if not e.key.startswith("nccl"))


def clock_of_step(step_index: int, device: torch.device) -> tuple[BusyClock | None, bool]:
    """The clock of one step, if it has one, and whether the step's wall time counts."""
    if device.type != "cuda":
        return ThreadClock(), True
    if step_index % PROFILE_EVERY == PROFILE_EVERY - 1:
        return KernelClock(), False
    return None, True
