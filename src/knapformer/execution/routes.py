"""Exchanges on a device: where the units lie that are taken from a tensor, and put into one.

A ``Route`` moves one tensor: rows in one piece are not copied, and rows that stay are moved while the rest is under
way. A ``JointRoute`` moves several of one width through one buffer, with one gather before and one after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from knapformer.execution.devices import to_device
from knapformer.schedules.joint import JointExchange
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
    """An exchange of one tensor on a device: rows that lie in one piece go from and to the tensors themselves.

    Attributes:
        peers: ranks that something is exchanged with.
        send, receive, keep_from, keep_to, num_in, num_out, is_local: see ``knapformer.schedules.tokens.Exchange``.
        send_counts, receive_counts: units to and from each peer.
        joint: the same exchange through one buffer, by which sums come back where the exchange makes copies.
    """

    peers: tuple[int, ...]
    send: Units
    send_counts: tuple[int, ...]
    receive: Units
    receive_counts: tuple[int, ...]
    keep_from: Units
    keep_to: Units
    num_in: int
    num_out: int
    is_local: bool
    joint: JointRoute | None = None

    @classmethod
    def of(cls, schedule: Exchange, device: torch.device) -> Route:
        return cls(
            tuple(schedule.peers.tolist()),
            Units.of(schedule.send, device),
            tuple(schedule.send_counts.tolist()),
            Units.of(schedule.receive, device),
            tuple(schedule.receive_counts.tolist()),
            Units.of(schedule.keep_from, device),
            Units.of(schedule.keep_to, device),
            schedule.num_in,
            schedule.num_out,
            schedule.is_local,
            JointRoute.of(JointExchange.of([schedule]), device) if schedule.has_copies else None,
        )

    @cached_property
    def reversed(self) -> Route | JointRoute:
        """What brings the output's units back; see ``knapformer.schedules.tokens.Exchange.reversed``."""
        if self.joint is not None:
            return self.joint.reversed
        return Route(
            self.peers,
            self.receive,
            self.receive_counts,
            self.send,
            self.send_counts,
            self.keep_to,
            self.keep_from,
            self.num_out,
            self.num_in,
            self.is_local,
        )


@dataclass(frozen=True, eq=False)
class Region:
    """Units of tensors in two regions of the buffer of a joint exchange.

    Attributes:
        source: (positions,) int64, the unit that lies at each position; units of all tensors, one after another.
        nums: units of each tensor.
        has_copies: a unit may lie at several positions, or at none.
        own: the positions of the middle region, which of the others are lower ranks': ``(first, last, lower)``.
    """

    source: Tensor
    nums: tuple[int, ...]
    has_copies: bool
    own: tuple[int, int, int]

    @property
    def num_positions(self) -> int:
        """Of both regions."""
        return self.source.shape[0]

    @cached_property
    def positions(self) -> Tensor:
        """(positions,) int64, where each unit lies, by unit; positions of one unit in order of rank."""
        with torch.inference_mode(False):
            if self.has_copies:
                first, last, lower = self.own
                order = torch.arange(len(self.source), device=self.source.device)
                others = torch.cat([order[:first], order[last:]])
                by_rank = torch.cat([others[:lower], order[first:last], others[lower:]])
                return by_rank[torch.argsort(self.source[by_rank], stable=True)]
            positions = torch.empty_like(self.source)
            positions[self.source] = torch.arange(len(self.source), device=self.source.device)
            return positions

    @cached_property
    def units(self) -> Tensor:
        """(positions,) the units of ``positions``: ascending."""
        with torch.inference_mode(False):
            return self.source[self.positions]

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Fill the two regions, ``buffer`` (positions, width), with units of the tensors (units, width): one gather."""
        torch.index_select(torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0], 0, self.source, out=buffer)

    def unpack(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors; what lies at several positions is summed in order of rank, in float32 at least."""
        found = buffer.index_select(0, self.positions)
        if self.has_copies:
            found = sum_runs(found, self.units, sum(self.nums))
        return found.split(list(self.nums)) if len(self.nums) > 1 else (found,)


@dataclass(frozen=True, eq=False)
class JointRoute:
    """An exchange of several tensors of one width on a device, with one gather to pack them and one to unpack them.

    Attributes:
        peers: ranks that something is exchanged with.
        send_counts, receive_counts: units to and from each of them.
        taken, given: the units of the inputs in the first two regions of the buffer, of the outputs in the last two;
            see ``knapformer.schedules.joint``.
        num_kept: units of the middle region.
        is_reversed: what leaves lies in the last region, and what arrives in the first one.
    """

    peers: tuple[int, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    taken: Region
    given: Region
    num_kept: int
    is_local: bool
    is_reversed: bool = False

    @classmethod
    def of(cls, schedule: JointExchange, device: torch.device) -> JointRoute:
        kept, (sent_lower, received_lower) = schedule.num_kept, schedule.lower
        num_sent = int(schedule.send_counts.sum())
        taken = expand(schedule.taken, device), schedule.nums_in, schedule.has_copies
        given = expand(schedule.given, device), schedule.nums_out, False
        return cls(
            tuple(schedule.peers.tolist()),
            tuple(schedule.send_counts.tolist()),
            tuple(schedule.receive_counts.tolist()),
            Region(*taken, (num_sent, num_sent + kept, sent_lower)),
            Region(*given, (0, kept, received_lower)),
            kept,
            schedule.is_local,
        )

    @cached_property
    def reversed(self) -> JointRoute:
        """What brings the outputs' units back."""
        return JointRoute(
            self.peers,
            self.receive_counts,
            self.send_counts,
            self.given,
            self.taken,
            self.num_kept,
            self.is_local,
            not self.is_reversed,
        )

    @property
    def num_in(self) -> int:
        """Units of all inputs."""
        return sum(self.taken.nums)

    @property
    def num_out(self) -> int:
        """Units of all outputs."""
        return sum(self.given.nums)


AnyRoute = Route | JointRoute


def sum_runs(found: Tensor, units: Tensor, num_units: int) -> Tensor:
    """(num_units, width) sums of the rows of each unit, one after another, in float32 at least; 0 where it has none.

    Args:
        found: (rows, width).
        units: (rows,) ascending.
    """
    wide = found.to(torch.promote_types(found.dtype, torch.float32))
    if found.device.type != "cpu":
        return sum_segments(wide, units, num_units).to(found.dtype)
    return wide.new_zeros(num_units, wide.shape[1]).index_add_(0, units, wide).to(found.dtype)


def sum_segments(rows: Tensor, units: Tensor, num_units: int) -> Tensor:
    """The same for CUDA, where ``index_add`` is a race between threads; here one thread adds the rows of a unit."""
    counts = torch.zeros(num_units, dtype=torch.int64, device=units.device)
    counts.scatter_add_(0, units, torch.ones_like(units))
    return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, initial=0, unsafe=True)


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
