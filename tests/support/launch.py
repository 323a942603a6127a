"""Run a function on several gloo ranks, with a hard timeout that kills them and shows each rank's stack."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass
class Outcome:
    """How one rank ended: ``value`` is what the function returned; ``failure`` a traceback, where it raised."""

    value: Any = None
    error: BaseException | None = None
    failure: str = ""
    exitcode: int | None = None


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    preload: Sequence[str] = (),
    backend: str = "gloo",
) -> list[Any]:
    """``function(rank, world_size, *args)`` on every rank; their results in order of rank.

    Raises:
        AssertionError: a rank raised or hung; with each rank's traceback or stack.
    """
    outcomes = try_ranks(function, world_size, *args, timeout_s=timeout_s, preload=preload, backend=backend)
    failures = [f"rank {r}: {o.failure}" for r, o in enumerate(outcomes) if o.failure or o.exitcode]
    assert not failures, "\n".join(failures)
    return [outcome.value for outcome in outcomes]


def try_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    preload: Sequence[str] = (),
    backend: str = "gloo",
) -> list[Outcome]:
    """As ``run_ranks``, but ranks may fail: how each of them ended. A rank that hangs still fails the test.

    Args:
        preload: further modules that are slow to import.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = rank_context(preload)
        ranks = [
            context.Process(target=_rank_main, args=(r, world_size, name, backend, function, args))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        hung = _join(ranks, timeout_s)
        stacks = rank_stacks(ranks, folder) if hung else ""
        for process in ranks:
            process.kill()
            process.join()
        assert not hung, f"ranks {hung} did not end in {timeout_s} s\n{stacks}"
        return [_outcome(folder / f"{r}.pickle", process) for r, process in enumerate(ranks)]


def rank_context(preload: Sequence[str]) -> Any:
    """Ranks are forked from one server that has imported torch already: that import takes seconds of each rank.

    The server starts once for all tests; what a later test wants preloaded is then imported by its ranks.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.utils.checkpoint", "knapformer", *preload])
    return context


def _join(ranks: Sequence[Any], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(process.is_alive() for process in ranks):
            return []
        time.sleep(0.05)
    return [r for r, process in enumerate(ranks) if process.is_alive()]


def rank_stacks(ranks: Sequence[Any], folder: Path) -> str:
    """Where each rank is now, as it writes it itself."""
    for process in ranks:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(os.pidfd_open(process.pid), signal.SIGUSR1)
    time.sleep(1.0)
    files = [folder / f"{r}.stack" for r in range(len(ranks))]
    return "\n".join(f"--- rank {r}\n{f.read_text() if f.exists() else '(none)'}" for r, f in enumerate(files))


def _outcome(file: Path, process: Any) -> Outcome:
    if not file.exists():
        return Outcome(failure=f"died with exit code {process.exitcode}", exitcode=process.exitcode)
    outcome: Outcome = pickle.loads(file.read_bytes())
    outcome.exitcode = process.exitcode
    return outcome


def _rank_main(
    rank: int, world_size: int, folder: str, backend: str, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    with open(f"{folder}/{rank}.stack", "w") as stack:
        join_ranks(rank, world_size, folder, backend, stack)
        try:
            outcome = Outcome(value=function(rank, world_size, *args))
        except Exception as error:
            outcome = Outcome(error=error, failure=traceback.format_exc())
        Path(f"{folder}/{rank}.pickle").write_bytes(pickle.dumps(outcome))
        if not outcome.failure:
            # Without the barrier, gloo's threads sometimes abort a rank that leaves while another still talks to it.
            dist.barrier()
            dist.destroy_process_group()


def join_ranks(rank: int, world_size: int, folder: str, backend: str, stack: IO[str]) -> None:
    """Make this process one of the ranks that meet in ``folder``; on SIGUSR1 it writes its threads' stacks.

    Every rank calls it.
    """
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    if backend != "gloo":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
