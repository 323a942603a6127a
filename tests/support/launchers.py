"""What trainers put around a model: accelerate as under its launcher, and micro-steps of DDP and FSDP2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist


def accelerator_of(**options: Any) -> Any:
    """As under ``accelerate launch``, which sets these variables."""
    import accelerate

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}):
        accelerator = accelerate.Accelerator(cpu=True, **options)
    assert accelerator.num_processes == dist.get_world_size()
    return accelerator


@contextlib.contextmanager
def in_sync(model: Any, is_last: bool) -> Iterator[None]:
    """Gradients are averaged over ranks in the last micro-step only: of DDP, or of FSDP2."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
        return
    with contextlib.nullcontext() if is_last else model.no_sync():
        yield
