"""Start the ranks of a training comparison, or join those that torchrun started."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from knapformer import errors
from knapformer.demo.config import TrainConfig
from knapformer.demo.results import SCHEMA, summarize
from knapformer.demo.train import run_rank
from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.execution.groups import BalancingGroup, wait_for_all
from knapformer.measure.environment import environment, usable_cores
from knapformer.measure.heap import keep_freed_memory

TIMEOUT = timedelta(minutes=10)
"""After this a rank gives up waiting for another one."""

MOST_CPU_RANKS = 8

MOST_STARTED = 256
"""Processes on one machine."""


def default_num_ranks() -> int:
    """All GPUs, or as many ranks as cores, 2 at least and 8 at most."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, min(MOST_CPU_RANKS, usable_cores()))


def given_num_ranks() -> int | None:
    """The ranks that torchrun started, of which this process is one; None where it did not."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def run_comparison(config: TrainConfig, *, num_ranks: int | None = None) -> dict[str, Any] | None:
    """Train and compare. Under torchrun every rank calls it; otherwise it starts the ranks and waits for them.

    Args:
        config: what to run.
        num_ranks: processes to start; ``default_num_ranks()`` if None.

    Returns:
        The results file's content; under torchrun None on all ranks but the first.

    Raises:
        ConfigurationError: ``num_ranks`` is given and torchrun has already started ranks, or there are too few GPUs.
        KnapFormerError: what a rank raised.
    """
    given = given_num_ranks()
    if given is not None:
        if num_ranks not in (None, given):
            raise ConfigurationError(f"torchrun started {given} ranks, but {num_ranks} are asked for")
        config.check_ranks(given)
        return _rank(int(os.environ["RANK"]), given, "env://", config)
    num_ranks = default_num_ranks() if num_ranks is None else num_ranks
    if num_ranks < 1:
        raise ConfigurationError(f"needs at least one rank, got {num_ranks}")
    if num_ranks > MOST_STARTED:
        raise ConfigurationError(
            f"{MOST_STARTED} ranks at most are started on one machine, got {num_ranks}: use torchrun"
        )
    config.check_ranks(num_ranks)
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        raise ConfigurationError(f"{num_ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(
            _spawned, (num_ranks, folder, config), nprocs=num_ranks, join=False, start_method="spawn"
        )
        # A rank that fails ends the others; torch would say so on stderr, beside the error itself.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        try:
            while not ranks.join():
                pass
        except ProcessExitedException:
            raise _failure(Path(folder)) from None
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return result


def _spawned(rank: int, num_ranks: int, folder: str, config: TrainConfig) -> None:
    try:
        result = _rank(rank, num_ranks, f"file://{folder}/store", config)
    except (KnapFormerError, OSError) as error:
        (Path(folder) / f"error-{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
        sys.exit(2)
    if result is not None:
        (Path(folder) / "result.json").write_text(json.dumps(result))


def _failure(folder: Path) -> Exception:
    """What a rank raised; the ranks that were ended because of it say nothing."""
    for file in sorted(folder.glob("error-*.json")):
        kind, message = json.loads(file.read_text())
        return getattr(errors, kind, KnapFormerError)(message)
    return KnapFormerError("a rank died without a word; out of memory?")


def _rank(rank: int, num_ranks: int, init_method: str, config: TrainConfig) -> dict[str, Any] | None:
    """This process's part; the results on the first rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
        keep_freed_memory()
        backend = "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        group = BalancingGroup.create()
        with _progress_bars() if rank == 0 else nullcontext(_silent) as progress:
            raw = run_rank(config, group, ranks_per_node=ranks_per_node, progress=progress)
        # Without the barrier, gloo's threads sometimes abort a rank that leaves while another still talks to it.
        wait_for_all(group)
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return None
    result = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": config.to_dict(),
        "num_ranks": num_ranks,
        "environment": environment(),
        **raw,
    }
    return {**result, "summary": summarize(result)}


class _progress_bars:  # noqa: N801
    """A bar for each task, made when the task is first heard of."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        self.bars.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def update(self, name: str, done: int, total: int) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, total=total)
        self.bars.update(self.tasks[name], completed=done)


def _silent(_name: str, _done: int, _total: int) -> None:
    """Ranks after the first show nothing."""
