"""Measure a run's peak memory: by the allocator on CUDA, elsewhere by following every tensor that is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that ``run`` held at once, beyond what was there before.

    On the CPU these are the bytes of live tensors; what a kernel needs inside, and fragmentation, are not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveBytes() as live:
        run()
    peak: int = live.peak
    return peak


class _LiveBytes(TorchDispatchMode):
    """Counts storages from when an operation first returns them until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, which mypy takes for ours
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_iter((args, kwargs)):
            if isinstance(x, Tensor):
                self._follow(x.untyped_storage(), is_new=False)
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._follow(x.untyped_storage(), is_new=True)
        return result

    def _follow(self, storage: Any, *, is_new: bool) -> None:
        """A storage that an operation is given first was there before."""
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes() if is_new else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        self.known.discard(key)
