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
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}):
        accelerator = accelerate.Accelerator(cpu=True, **options)
    assert accelerator.num_processes == dist.get_world_size()
    return accelerator


def fsdp2_accelerator_of(blocks: list[str], **options: Any) -> Any:
    """As under ``accelerate launch --use_fsdp --fsdp_version 2``, on CPUs.

    accelerate offers FSDP on accelerators only. It is told that the ranks have some; tensors stay on the CPU all the
    same, and what shards, saves and clips them is what GPUs use.

    Args:
        blocks: names of the classes that are sharded by themselves.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "FSDP_VERSION": "2"}
    with mock.patch.dict(os.environ, launched):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=blocks
        )
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        accelerator = Accelerator(fsdp_plugin=plugin, **options)
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.num_processes == dist.get_world_size()
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
