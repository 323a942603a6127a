"""Ranks that stay alive between jobs: starting a process costs seconds, a small job a tenth of one."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from launch import join_ranks, rank_context, rank_stacks

START_S = 120.0
"""How long ranks may take to start and to meet."""

GRACE_S = 5.0
"""How long the other ranks have, after one has failed, to fail with a message of their own."""


class RankFailureError(Exception):
    """A rank raised, died or did not answer; the text has each rank's traceback or stack."""


class RankPool:
    """Gloo ranks that run one job after another. After a failure it is of no more use.

    Args:
        function: what a job is: ``function(rank, world_size, state, item)``; ``state`` is a dictionary of the rank's
            own that lives as long as the pool.
        world_size: ranks.
        timeout_s: after which a job counts as hung.
        preload: further modules that are slow to import.
    """

    def __init__(
        self, function: Callable[..., Any], world_size: int, *, timeout_s: float, preload: Sequence[str] = ()
    ) -> None:
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        context = rank_context(preload)
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self._folder.name, function, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._ranks.append(process)
        self._answers(START_S)

    def run(self, item: Any) -> list[Any]:
        """What each rank's function gives for ``item``.

        Raises:
            RankFailureError: a rank raised, died, or has not answered in time. The pool is closed.
        """
        for pipe in self._pipes:
            pipe.send(item)
        return self._answers(self.timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        answers: dict[int, tuple[Any, str]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            waiting = {self._pipes[r]: r for r in range(len(self._ranks)) if r not in answers}
            for pipe in wait(list(waiting), timeout=0.2):
                rank = waiting[pipe]  # type: ignore[index]  # wait() is typed for sockets too
                answers[rank] = self._receive(rank)
                if answers[rank][1]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: failure for rank, (_, failure) in sorted(answers.items()) if failure}
        if len(answers) < len(self._ranks) or failures:
            raise RankFailureError(self._what_happened(answers, failures, timeout_s))
        return [answers[rank][0] for rank in range(len(self._ranks))]

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
        for process, pipe in zip(self._ranks, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._folder.cleanup()

    def _receive(self, rank: int) -> tuple[Any, str]:
        try:
            answer: tuple[Any, str] = self._pipes[rank].recv()
        except EOFError:
            self._ranks[rank].join(timeout=GRACE_S)
            return None, f"died with exit code {self._ranks[rank].exitcode}"
        return answer

    def _what_happened(self, answers: dict[int, Any], failures: dict[int, str], timeout_s: float) -> str:
        lines = [f"--- rank {rank} raised\n{failure}" for rank, failure in failures.items()]
        silent = [rank for rank in range(len(self._ranks)) if rank not in answers]
        if silent:
            waited = "" if failures else f" within {timeout_s:g} s"
            lines.append(f"ranks {silent} did not answer{waited}\n{rank_stacks(self._ranks, Path(self._folder.name))}")
        self.close()
        return "\n".join(lines)


def _serve(rank: int, world_size: int, folder: str, function: Callable[..., Any], pipe: Connection) -> None:
    state: dict[Any, Any] = {}
    with open(f"{folder}/{rank}.stack", "w") as stack:
        join_ranks(rank, world_size, folder, "gloo", stack)
        pipe.send(("ready", ""))
        while True:
            try:
                item = pipe.recv()
            except EOFError:
                return
            try:
                answer = function(rank, world_size, state, item), ""
            except Exception:
                answer = None, traceback.format_exc()
            pipe.send(answer)
