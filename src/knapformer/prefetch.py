"""Prefetched steps: a thread loads, agrees and plans ahead while the current step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from knapformer.errors import ConfigurationError
from knapformer.execution.agreement import LocalInput, begin_step
from knapformer.execution.groups import BalancingGroup
from knapformer.execution.transport import all_gather
from knapformer.given.lengths import parse_local_lengths
from knapformer.loops import BATCH, END, STOP, Batches, Brought, is_over
from knapformer.step import Step

LEAVE_S = 5.0
"""How long a loop that is left waits for its thread, which may wait for other ranks."""


PlanStep: TypeAlias = Callable[[BalancingGroup, LocalInput, Mapping[str, Any]], Step]
"""Agrees and plans over a group, given what this rank brings and what must be the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that waits to be taken.

    Attributes:
        batch: of this rank.
        step: its plan; None where there is none.
        state: of the loader, when it had given this batch.
        error: raised in the place of the step.
        event: on accelerators, what the thread has copied to the device before it.
    """

    batch: Any = None
    step: Step | None = None
    state: Any = None
    error: BaseException | None = None
    event: Any = None


class Prefetch:
    """Iterates over ``(batch, step)``; ``Balancer.prefetch`` makes it. One iteration at a time.

    The loop ends on all ranks together: before the first step for which some rank's loader has no batch, or, with
    ``empty``, none has. What others have loaded for that step is not trained on, and is not counted in ``state_dict``.
    A loop that is left (``break``) must be left by every rank in the same step.
    """

    def __init__(
        self,
        group: BalancingGroup,
        plan_step: PlanStep,
        fingerprint: Callable[[str], Mapping[str, Any]],
        loader: Any,
        lengths_of: Callable[[Any], Any],
        *,
        ahead: int,
        conditioning_of: Callable[[Any], Mapping[str, Any]] | None,
        num_rows_of: Callable[[Any], int] | None,
        empty: Callable[[], Any] | None,
    ) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ConfigurationError(f"ahead must be an integer of at least 1, got {ahead!r}")
        self._loop_group, self._fingerprint, self._loader = group, fingerprint, loader
        self._lengths_of, self._conditioning_of, self._num_rows_of = lengths_of, conditioning_of, num_rows_of
        self.group, self.plan_step, self.ahead, self.empty = group.beside(), plan_step, ahead, empty
        self._state: Any = None
        self._running = False

    def __iter__(self) -> Iterator[tuple[Any, Step]]:
        """Every rank of the balancing group iterates, once at a time.

        Raises:
            RankError: a loader, or one of the functions, raised on some rank; on all ranks, in the step it was for.
            What ``Balancer.prepare`` raises: likewise.
        """
        if self._running:
            raise ConfigurationError("these steps are iterated over already, or were left by this rank alone")
        self._running, self._state = True, None
        sampler = _ahead_of(self._loader)
        began = None if sampler is None else sampler.state_dict(sampler.num_steps_done)
        has_ended = False
        # The loader is started here: torch's draws a seed from the global random state.
        thread = _Thread(self, self._loader, self._fingerprint("prefetch"))
        try:
            while (ready := thread.take()) is not None:
                if ready.error is not None:
                    raise ready.error
                assert ready.step is not None
                if ready.event is not None:
                    ready.event.wait()
                begin_step(self._loop_group, self._fingerprint("prefetched step"))
                ready.step.begin()
                self._state = ready.state
                yield ready.batch, ready.step
            has_ended = True
        finally:
            self._running = not thread.leave()
            if sampler is not None and not has_ended and not self._running:
                sampler.load_state_dict(began)  # it may have given the thread its last batch, and think it is done

    def state_dict(self) -> Any:
        """The loader's state after the last batch that was handed out; batches prefetched since are still to come.

        Raises:
            ConfigurationError: neither the loader nor its batch sampler has a ``state_dict``.
        """
        return _state_of(self._loader, 0) if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration go on after that batch. Every rank loads its own state.

        Raises:
            ConfigurationError: as ``state_dict``, or an iteration has begun.
        """
        if self._running:
            raise ConfigurationError("these steps are iterated over: load a state before that")
        _stateful(self._loader).load_state_dict(state)
        self._state = None

    def local_input(self, batch: Any, error: BaseException | None) -> LocalInput:
        """What this rank brings to a step, or why it can't; its errors are carried to all ranks."""
        try:
            rows = self._num_rows_of(batch) if self._num_rows_of and error is None else None
            conditioning = self._conditioning_of(batch) if self._conditioning_of and error is None else None
        except Exception as wrong:  # whatever it is, the other ranks wait
            rows, conditioning, error = None, None, wrong
        return LocalInput.collect(lambda: parse_local_lengths(self._lengths_of(batch)), rows, error, conditioning)


class _Thread:
    """Of one iteration. Its agreements have a group of their own, so a rank that is ready early joins them while the
    loop still runs an earlier step."""

    def __init__(self, owner: Prefetch, loader: Any, fingerprint: Mapping[str, Any]) -> None:
        self._owner, self._loader, self._fingerprint = owner, loader, fingerprint
        self._batches, self._state = Batches(loader, owner.empty), None
        self._ready: queue.Queue[Ready | None] = queue.Queue()
        self._room = threading.Semaphore(owner.ahead)
        self._left = threading.Event()
        self._is_stateful = _find_stateful(loader) is not None
        self._device = None
        if owner.group.device.type != "cpu":
            self._device = torch.accelerator.current_device_index()
        self._thread = threading.Thread(target=self._run, name="knapformer-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Ready | None:
        """The next step; None at the end."""
        ready = self._ready.get()
        self._room.release()
        return ready

    def leave(self) -> bool:
        """End the thread, and say whether it has ended: other ranks' must end in the same agreement."""
        self._left.set()
        self._room.release()
        self._thread.join(LEAVE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        num_batches = 0
        try:
            while True:
                self._room.acquire()
                num_batches += 1
                ready = self._next(num_batches)
                self._ready.put(ready)
                if ready is None or ready.error is not None:
                    return
        except BaseException as error:
            self._ready.put(Ready(error=error))

    def _next(self, num_batches: int) -> Ready | None:
        """Load and plan a step, with all ranks; None where one of them has come to its end."""
        owner, group = self._owner, self._owner.group
        brought = Brought(None, STOP) if self._left.is_set() else self._batches.take()
        if brought.status == BATCH and self._is_stateful:
            self._state = _state_of(self._loader, num_batches)
        statuses = all_gather(group, np.asarray([brought.status], np.int64))
        if is_over(statuses):
            return None
        has_batch = brought.status not in (END, STOP)
        local = owner.local_input(brought.batch, brought.failure) if has_batch else LocalInput({}, {})
        try:
            step = owner.plan_step(group, local, self._fingerprint)
        except Exception as error:
            return Ready(error=error)
        event = None
        if self._device is not None:
            event = torch.Event(group.device)
            event.record()
        return Ready(brought.batch, step, self._state, None, event)


def _find_stateful(loader: Any) -> Any:
    for owner in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return owner
    return None


def _stateful(loader: Any) -> Any:
    owner = _find_stateful(loader)
    if owner is None:
        raise ConfigurationError(f"neither {type(loader).__name__} nor its batch sampler has a state_dict")
    return owner


def _ahead_of(loader: Any) -> Any:
    """A ``BalancedBatchSampler`` whose batches the loader may have asked for before they are trained on."""
    owner = _find_stateful(loader)
    return owner if owner is not loader and hasattr(owner, "num_steps_done") else None


def _state_of(loader: Any, num_batches: int) -> Any:
    """After so many batches of this iteration."""
    sampler = _ahead_of(loader)
    return (
        _stateful(loader).state_dict() if sampler is None else sampler.state_dict(sampler.num_steps_done + num_batches)
    )
