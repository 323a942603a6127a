"""Loops over loaders of unequal length: what a rank brings to the next step, and when all ranks' loops are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from knapformer.errors import KnapFormerError
from knapformer.execution.agreement import agree
from knapformer.execution.calls import Description
from knapformer.execution.groups import BalancingGroup
from knapformer.execution.telling import carried

BATCH, END, STOP, FAILED, EMPTY = 0, 1, 2, 3, 4
"""What a rank brings to the next step: a batch; the news that its loader or its loop has ended, or has failed; or a
batch without samples, because its loader has ended and it waits for the others'."""

JOIN = Description("join")


class Brought(NamedTuple):
    """What this rank's loader has for the next step.

    Attributes:
        batch: None where there is none.
        status: one of the numbers above.
        failure: what the loader raised.
    """

    batch: Any
    status: int
    failure: Exception | None = None


class Batches:
    """One iteration over a loader, and after its end over batches without samples, where ``empty`` makes them."""

    def __init__(self, loader: Any, empty: Callable[[], Any] | None) -> None:
        self._batches, self._empty, self._has_ended = iter(loader), empty, False

    def take(self) -> Brought:
        """The next batch; what the loader raises is carried to all ranks."""
        try:
            if not self._has_ended:
                try:
                    return Brought(next(self._batches), BATCH)
                except StopIteration:
                    self._has_ended = True
            return Brought(None, END) if self._empty is None else Brought(self._empty(), EMPTY)
        except Exception as failure:
            return Brought(None, FAILED, failure)


def is_over(statuses: np.ndarray) -> bool:
    """Whether the loops of all ranks end here, by what each of them brings."""
    if (statuses == FAILED).any():
        return False  # the error is raised in the step's place
    return bool(((statuses == END) | (statuses == STOP)).any() or (statuses == EMPTY).all())


def joined(
    group: BalancingGroup, fingerprint: Callable[[], Mapping[str, Any]], loader: Any, empty: Callable[[], Any] | None
) -> Iterator[Any]:
    """See ``knapformer.Balancer.join``. Every rank of the group iterates."""
    batches = Batches(loader, empty)
    while True:
        brought = batches.take()
        if group.calls is not None:
            group.calls.outside(JOIN)
        error = None if brought.failure is None else carried(brought.failure)
        try:
            statuses = agree(group, fingerprint(), [], error, brought.status)
        except KnapFormerError as shared:
            raise shared from brought.failure
        if is_over(np.asarray(statuses)):
            return
        yield brought.batch
