"""Exchanges on a device: where the units lie that are taken from a tensor, and put into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from knapformer.execution.devices import to_device
from knapformer.schedules.tokens import Blocks, Exchange, starts_of

MIN_RUN_UNITS = 32
"""On the CPU, copies of whole runs replace an index where runs have as many units on average."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Some units of a flat tensor (units, width), in order.

    Attributes:
        count: how many.
        runs: their starts and counts, where they are few and long.
        index: (count,) int64, where they are not.
        span: start and count, where they are one piece, which then need not be copied to be sent or received.
    """

    count: int
    runs: tuple[tuple[int, int], ...] | None
    index: Tensor | None
    span: tuple[int, int] | None = None

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> Units:
        count = blocks.num_units
        start, inner = blocks.start, blocks.inner
        are_runs = bool(((blocks.outer == 1) & (blocks.inner_stride == 1)).all())
        is_span = are_runs and np.array_equal(start[1:], start[:-1] + inner[:-1])
        span = (int(start[0]) if len(start) else 0, count) if is_span else None
        if device.type == "cpu" and len(inner) * MIN_RUN_UNITS <= count and are_runs:
            return cls(count, tuple(zip(start.tolist(), inner.tolist(), strict=True)), None, span)
        return cls(count, None, expand(blocks, device), span)

    def split(self, counts: Sequence[int]) -> list[Units]:
        """The first ``counts[0]`` of them, and so on; runs end where parts do."""
        if self.index is not None:
            return [Units(len(part), None, part) for part in self.index.split(list(counts))]
        parts, runs = [], iter(self.runs or ())
        for count in counts:
            own: list[tuple[int, int]] = []
            while sum(n for _, n in own) < count:
                own.append(next(runs))
            parts.append(Units(count, tuple(own), None))
        return parts

    def bytes_of(self, x: Tensor) -> Tensor | None:
        """The units of ``x`` (units, width) as flat uint8 of the same memory, where they are one piece."""
        if self.span is None or not x.is_contiguous():
            return None
        (start, count), width = self.span, x.shape[1]
        # as_strided, because a single number may have any stride.
        return x.as_strided((count * width,), (1,), x.storage_offset() + start * width).view(torch.uint8)

    def take(self, x: Tensor, out: Tensor) -> None:
        """Copy the units of ``x`` into ``out`` (count, width)."""
        if self.index is not None:
            torch.index_select(x, 0, self.index, out=out)
        elif self.runs:
            torch.cat([x.narrow(0, start, count) for start, count in self.runs], out=out)

    def put(self, part: Tensor, out: Tensor) -> None:
        """Copy ``part`` (count, width) to the units of ``out``."""
        if self.index is not None:
            out.index_copy_(0, self.index, part)
            return
        at = 0
        for start, count in self.runs or ():
            out.narrow(0, start, count).copy_(part.narrow(0, at, count))
            at += count

    def add(self, part: Tensor, out: Tensor) -> None:
        """Add ``part`` (count, width) to the units of ``out``; no unit occurs twice."""
        if self.index is not None:
            out.index_add_(0, self.index, part.to(out.dtype))
            return
        at = 0
        for start, count in self.runs or ():
            out.narrow(0, start, count).add_(part.narrow(0, at, count))
            at += count


def move(x: Tensor, taken: Units, out: Tensor, given: Units) -> None:
    """Copy units of one tensor to units of another, as many."""
    sources, targets = taken.runs or (), given.runs or ()
    if [count for _, count in sources] == [count for _, count in targets] and taken.index is given.index is None:
        for (source, count), (target, _) in zip(sources, targets, strict=True):
            out.narrow(0, target, count).copy_(x.narrow(0, source, count))
        return
    part = x.new_empty(taken.count, x.shape[1])
    taken.take(x, part)
    given.put(part, out)


@dataclass(frozen=True, eq=False)
class Route:
    """An exchange on a device.

    Attributes:
        send, receive, keep_from, keep_to: see ``knapformer.schedules.tokens.Exchange``.
        send_counts, receive_counts: units to and from each rank.
    """

    send: Units
    send_counts: tuple[int, ...]
    receive: Units
    receive_counts: tuple[int, ...]
    keep_from: Units
    keep_to: Units
    num_in: int
    num_out: int
    is_local: bool
    has_copies: bool
    adds_up: bool

    @classmethod
    def of(cls, schedule: Exchange, device: torch.device) -> Route:
        return cls(
            Units.of(schedule.send, device),
            tuple(schedule.send_counts.tolist()),
            Units.of(schedule.receive, device),
            tuple(schedule.receive_counts.tolist()),
            Units.of(schedule.keep_from, device),
            Units.of(schedule.keep_to, device),
            schedule.num_in,
            schedule.num_out,
            schedule.is_local,
            schedule.has_copies,
            schedule.adds_up,
        )

    @cached_property
    def reversed(self) -> Route:
        """The route that brings the output's units back; see ``knapformer.schedules.tokens.Exchange.reversed``."""
        return Route(
            self.receive,
            self.receive_counts,
            self.send,
            self.send_counts,
            self.keep_to,
            self.keep_from,
            self.num_out,
            self.num_in,
            self.is_local,
            has_copies=self.adds_up,
            adds_up=self.has_copies,
        )


def expand(blocks: Blocks, device: torch.device) -> Tensor:
    """(units,) int64 index of every unit of the blocks; an accelerator computes it from the blocks' columns."""
    block = np.repeat(np.arange(len(blocks.outer)), blocks.outer)
    outer = np.arange(len(block)) - np.repeat(starts_of(blocks.outer), blocks.outer)
    counts, stride = blocks.inner[block], blocks.inner_stride[block]
    base = blocks.start[block] + outer * blocks.outer_stride[block] - starts_of(counts) * stride
    if device.type == "cpu":
        step = stride[0] if len(stride) and (stride == stride[0]).all() else np.repeat(stride, counts)
        return torch.from_numpy(np.repeat(base, counts) + np.arange(blocks.num_units) * step)
    return expand_there(to_device(np.stack([base, stride, counts]), device), blocks.num_units)


def expand_there(table: Tensor, num_units: int) -> Tensor:
    """(units,) int64 from (3, runs): where a run would start if it began with unit 0, its stride, and its units."""
    run = torch.repeat_interleave(table[2], output_size=num_units)
    unit = torch.arange(num_units, device=table.device)
    return table[0].index_select(0, run).addcmul_(unit, table[1].index_select(0, run))
