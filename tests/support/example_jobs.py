"""What the tests of the examples run of them on each of two gloo ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretrained(rank: int, _world_size: int, folders: list[str | None]) -> dict[str, Any]:
    """What the shards of the first folder's weights are, the bytes that making them took, and the first losses."""
    flux = example("flux_fsdp2")
    with MemTracker() as memory:
        model = flux.build(folders[0], "cpu")
    weights = {name: x.full_tensor() for name, x in model.state_dict().items()}
    local = sum(p.to_local().numel() for p in model.parameters())
    return {
        "peak": memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"],
        "local": local,
        "dtypes": {p.dtype for p in model.parameters()},
        "weights": weights if rank == 0 else None,
        "losses": [printed(flux, folder) for folder in folders],
    }


def printed(flux: Any, folder: str | None) -> str:
    text = io.StringIO()
    with mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(text):
        flux.train(folder, steps=1)
    return text.getvalue()


def saved_again(rank: int, world_size: int, folder: str) -> None:
    """Folders that the accelerate example saves: after training, after going on for no step, and before training."""
    lora = example("flux_lora_accelerate")
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    variables["LOCAL_WORLD_SIZE"] = str(world_size)
    path = Path(folder)
    with mock.patch.object(dist, "destroy_process_group"), mock.patch.dict(os.environ, variables):
        lora.train(None, 2, path / "trained")
        dist.barrier()
        if rank == 0:
            shutil.copytree(path / "trained", path / "again")
        dist.barrier()
        lora.train(None, 0, path / "again", True)
        lora.train(None, 0, path / "untrained")
