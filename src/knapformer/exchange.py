"""The one token all-to-all, with autograd: routing, conditioning and attention all go through it.

An exchange is launched by ``start`` and ends in ``finish``, so that other work can run in between; ``exchange`` does
both. Rows travel as bytes of their own dtype: nothing is promoted, and exactly the rows that change rank are moved.

In backward, gradients take the reversed exchange, also launched at one point and awaited at another. Non-reentrant
checkpointing recomputes a region from the first saved tensor that is unpacked until the last one that was saved; a rank
without heads would start and stop elsewhere than the others, and their collectives would not match. Therefore each
exchange saves an empty tensor after its collective and unpacks it before its backward collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from knapformer.schedule import Blocks, Exchange


@dataclass(slots=True)
class Meter:
    """What exchanges cost this rank since it was made or ``clear``-ed. Give one to a ``Balancer`` to have it count.

    Attributes:
        seconds: wall time in launching, waiting, packing and unpacking; on CUDA this is time of the host.
        bytes_sent: bytes that left this rank, forward and backward.
        num_collectives: all-to-alls.
    """

    seconds: float = 0.0
    bytes_sent: int = 0
    num_collectives: int = 0

    def clear(self) -> None:
        self.seconds, self.bytes_sent, self.num_collectives = 0.0, 0, 0


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Over which ranks exchanges go.

    Attributes:
        group: process group; None where there is one rank only.
        rank: this rank in it.
        meter: counts, where wanted.
    """

    group: dist.ProcessGroup | None
    rank: int
    meter: Meter | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """An exchange as index tensors on a device.

    Attributes:
        send, receive, keep_from, keep_to: (units,) int64; see ``knapformer.schedule.Exchange``.
        send_counts, receive_counts: units to and from each rank.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    receive: Tensor
    receive_counts: tuple[int, ...]
    keep_from: Tensor
    keep_to: Tensor
    num_in: int
    num_out: int
    is_local: bool
    has_copies: bool
    adds_up: bool

    @classmethod
    def of(cls, schedule: Exchange, device: torch.device) -> Route:
        return cls(
            expand(schedule.send, device),
            tuple(schedule.send_counts.tolist()),
            expand(schedule.receive, device),
            tuple(schedule.receive_counts.tolist()),
            expand(schedule.keep_from, device),
            expand(schedule.keep_to, device),
            schedule.num_in,
            schedule.num_out,
            schedule.is_local,
            schedule.has_copies,
            schedule.adds_up,
        )

    def reversed(self) -> Route:
        """The route that brings the output's units back; see ``knapformer.schedule.Exchange.reversed``."""
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
    """(units,) int64 index of every unit of the blocks, computed on ``device``."""
    columns = [torch.from_numpy(c) for c in (blocks.start, blocks.outer_stride, blocks.inner, blocks.inner_stride)]
    sizes = torch.from_numpy(blocks.sizes)
    first = torch.cumsum(sizes, 0) - sizes
    table = torch.stack([*columns, first]).to(device, non_blocking=True)
    block = torch.repeat_interleave(sizes.to(device, non_blocking=True), output_size=blocks.num_units)
    start, outer_stride, inner, inner_stride, first = table.index_select(1, block)
    unit = torch.arange(blocks.num_units, device=device) - first
    outer = torch.div(unit, inner, rounding_mode="floor")
    return start + outer * outer_stride + (unit - outer * inner) * inner_stride


@dataclass(slots=True, eq=False)
class Pending:
    """An exchange under way; ``finish`` ends it."""

    routes: Sequence[Route]
    channel: Channel
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    needs_grad: tuple[bool, ...] = ()
    token: Tensor | None = None
    flight: _Flight | None = None
    backward_flight: _Flight | None = None


def exchange(tensors: Sequence[Tensor], routes: Sequence[Route], channel: Channel) -> tuple[Tensor, ...]:
    """Exchange tensors of one dtype, each by its own route, in one collective.

    Every rank of ``channel.group`` calls it, with as many tensors of the same dtypes and widths, and the same of them
    requiring gradients. Unless the routes are local, forward and backward issue one all-to-all each.

    Args:
        tensors: each (units, width).
        routes: one for each tensor.

    Returns:
        Each (units of the route's output, width).
    """
    return finish(start(tensors, routes, channel))


def start(tensors: Sequence[Tensor], routes: Sequence[Route], channel: Channel) -> Pending:
    """Launch an exchange; every rank of ``channel.group`` calls it, and ``finish`` after it."""
    pending = Pending(routes, channel)
    pending.token = _Start.apply(pending, *tensors)
    return pending


def finish(pending: Pending) -> tuple[Tensor, ...]:
    """The tensors of an exchange that was launched."""
    # A token that stayed with ``pending`` would close a cycle through its graph, and keep that alive.
    token, pending.token = pending.token, None
    outputs: tuple[Tensor, ...] = _Finish.apply(pending, token)
    return outputs


class _Start(Function):
    """Launches the exchange. An empty token ties ``_Finish`` to it in the graph; data goes through ``pending``."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> Tensor:
        pending.needs_grad = tuple(ctx.needs_input_grad[1:])
        pending.shapes = [tuple(x.shape) for x in tensors]
        ctx.pending = pending
        pending.flight = _Flight.launch(tensors, pending.routes, pending.channel)
        token = tensors[0].new_empty(0)
        if not any(pending.needs_grad):
            ctx.mark_non_differentiable(token)
        return token

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        pending: Pending = ctx.pending
        flight, pending.backward_flight = pending.backward_flight, None
        assert flight is not None
        found = iter(flight.land())
        return None, *(next(found) if needed else None for needed in pending.needs_grad)


class _Finish(Function):
    """Waits for the exchange and unpacks it; in backward, launches the reversed one."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, token: Tensor) -> tuple[Tensor, ...]:
        flight, pending.flight = pending.flight, None
        assert flight is not None
        outputs = flight.land()
        ctx.pending = pending
        ctx.save_for_backward(token.new_empty(0))
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, pending.needs_grad, strict=True) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (empty,) = ctx.saved_tensors
        pending: Pending = ctx.pending
        chosen = [i for i, needed in enumerate(pending.needs_grad) if needed]
        routes = [pending.routes[i].reversed() for i in chosen]
        pending.backward_flight = _Flight.launch([gradients[i] for i in chosen], routes, pending.channel)
        return None, empty


@dataclass(slots=True, eq=False)
class _Flight:
    """Buffers and handle of one collective."""

    tensors: Sequence[Tensor]
    routes: Sequence[Route]
    channel: Channel
    received: Tensor | None
    sent: Tensor | None
    work: Any

    @classmethod
    def launch(cls, tensors: Sequence[Tensor], routes: Sequence[Route], channel: Channel) -> _Flight:
        """Every rank of the group calls it: one all-to-all, unless no rank sends anything."""
        began = time.perf_counter()
        if channel.group is None or all(route.is_local for route in routes):
            return cls(tensors, routes, channel, None, None, None)
        sent = _pack(tensors, routes)
        widths = [x.shape[1] * x.element_size() for x in tensors]
        splits = [
            [sum(n * w for n, w in zip(counts, widths, strict=True)) for counts in zip(*table, strict=True)]
            for table in ([r.send_counts for r in routes], [r.receive_counts for r in routes])
        ]
        received, work = all_to_all(sent, *splits, channel.group)
        if channel.meter is not None:
            channel.meter.bytes_sent += sum(splits[0])
            channel.meter.num_collectives += 1
            channel.meter.seconds += time.perf_counter() - began
        return cls(tensors, routes, channel, received, sent, work)

    def land(self) -> tuple[Tensor, ...]:
        """Wait, and unpack."""
        began = time.perf_counter()
        if self.work is not None:
            self.work.wait()
        outputs = _unpack(self)
        if self.channel.meter is not None and self.work is not None:
            self.channel.meter.seconds += time.perf_counter() - began
        return outputs


def all_to_all(
    sent: Tensor, bytes_to: list[int], bytes_from: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    """Launch the collective; every rank of ``group`` calls it.

    Args:
        sent: flat, what goes to each rank after another; it must not change until the work is done.
        bytes_to, bytes_from: (N,) bytes of it to each rank, and that come from each.

    Returns:
        A fresh flat tensor of the same dtype, and the work that fills it.
    """
    received = sent.new_empty(sum(bytes_from) // sent.element_size())
    work = dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        output_split_sizes=bytes_from,
        input_split_sizes=bytes_to,
        group=group,
        async_op=True,
    )
    return received, work


def _pack(tensors: Sequence[Tensor], routes: Sequence[Route]) -> Tensor:
    """The units that leave, flat: by destination, and for each destination tensor after tensor."""
    numel = sum(len(route.send) * x.shape[1] for x, route in zip(tensors, routes, strict=True))
    flat = tensors[0].new_empty(numel)
    at, taken = 0, [0] * len(tensors)
    for rank in range(len(routes[0].send_counts)) if len(tensors) > 1 else (None,):
        for i, (x, route) in enumerate(zip(tensors, routes, strict=True)):
            count = len(route.send) if rank is None else route.send_counts[rank]
            if count:
                part = flat[at : at + count * x.shape[1]].view(count, x.shape[1])
                torch.index_select(x, 0, route.send[taken[i] : taken[i] + count], out=part)
                at, taken[i] = at + part.numel(), taken[i] + count
    return flat


def _unpack(flight: _Flight) -> tuple[Tensor, ...]:
    """Put what arrived, and what stayed, where it goes; sums are made in order of rank, in float32 at least."""
    outputs = [_new_output(x, route) for x, route in zip(flight.tensors, flight.routes, strict=True)]
    at, taken = 0, [0] * len(outputs)
    for rank in range(len(flight.routes[0].receive_counts)):
        for i, (x, out, route) in enumerate(zip(flight.tensors, outputs, flight.routes, strict=True)):
            if rank == flight.channel.rank and len(route.keep_to):
                _put(out, route.keep_to, x.index_select(0, route.keep_from), route)
            count = route.receive_counts[rank]
            if count and flight.received is not None:
                part = flight.received[at : at + count * x.shape[1]].view(count, x.shape[1])
                _put(out, route.receive[taken[i] : taken[i] + count], part, route)
                at, taken[i] = at + part.numel(), taken[i] + count
    return tuple(out.to(x.dtype) for x, out in zip(flight.tensors, outputs, strict=True))


def _new_output(x: Tensor, route: Route) -> Tensor:
    if route.adds_up:
        return x.new_zeros(route.num_out, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(route.num_out, x.shape[1])


def _put(out: Tensor, index: Tensor, part: Tensor, route: Route) -> None:
    """Units from one rank never meet: within one call an index occurs once, so sums have one order."""
    if route.adds_up:
        out.index_add_(0, index, part.to(out.dtype))
    else:
        out.index_copy_(0, index, part)
