"""Taking turns: work that waits for exchanges is written as a generator, and runs in turn with other such work.

A generator yields where it would wait. ``take_turns`` then goes on with the next one, so that one computes while the
exchange of another is under way. Autograd runs the nodes that were made last first: backward takes the same turns, the
other way round. All ranks must take turns in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]
"""Yields where it would wait, and returns its result."""


def take_turns(lanes: Sequence[Turns[T]]) -> list[T]:
    """Run all of them, each until it would wait, then the next; their results in the same order."""
    results: list[Any] = [None] * len(lanes)
    running = list(enumerate(lanes))
    while running:
        still_running = []
        for i, lane in running:
            try:
                next(lane)
            except StopIteration as end:
                results[i] = end.value
            else:
                still_running.append((i, lane))
        running = still_running
    return results
