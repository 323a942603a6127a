"""The one token all-to-all, with autograd: routing, conditioning and attention all go through it.

It consists of sends and receives between those pairs of ranks that have something for one another. PyTorch's
``all_to_all_single`` makes every rank wait for every other: on gloo by design, on NCCL because it sends empty parts.

An exchange is launched by ``start`` and ends in ``finish``, so that other work can run in between; ``exchange`` does
both. Rows travel as bytes of their own dtype: nothing is promoted, and exactly the rows that change rank are moved.

In backward, gradients take the reversed exchange, also launched at one point and awaited at another. Non-reentrant
checkpointing recomputes a region from the first saved tensor that is unpacked until the last one that was saved; a rank
without heads would start and stop elsewhere than the others, and sends would meet other receives. Therefore each
exchange saves an empty tensor after its end and unpacks it before its backward exchange.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.execution.routes import Route, Units, move


@dataclass(slots=True)
class Meter:
    """What exchanges cost this rank since it was made or ``clear``-ed. Give one to a ``Balancer`` to have it count.

    Attributes:
        seconds: wall time in launching, waiting, packing and unpacking; on CUDA this is time of the host.
        bytes_sent: bytes that left this rank, forward and backward.
        num_exchanges: those in which some rank sent something.
    """

    seconds: float = 0.0
    bytes_sent: int = 0
    num_exchanges: int = 0

    def clear(self) -> None:
        self.seconds, self.bytes_sent, self.num_exchanges = 0.0, 0, 0


class Scratch:
    """Buffers of exchanges on the CPU, kept for the next one: page faults in fresh memory cost more than the copies.

    It keeps as many buffers as were in use at once, for as long as the ``Balancer`` lives. Accelerators' allocators
    keep memory themselves.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int, like: Tensor) -> Tensor:
        """(num_bytes,) uint8 of any content on the device of ``like``."""
        if like.device.type != "cpu":
            return like.new_empty(num_bytes, dtype=torch.uint8)
        self._free.sort(key=Tensor.numel)
        at = next((i for i, buffer in enumerate(self._free) if buffer.numel() >= num_bytes), 0)
        buffer = self._free.pop(at) if self._free else like.new_empty(0, dtype=torch.uint8)
        buffer = buffer if buffer.numel() >= num_bytes else like.new_empty(num_bytes, dtype=torch.uint8)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Let the next exchange use what ``take`` gave."""
        if buffer.device.type == "cpu":
            self._free.append(buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Over which ranks exchanges go.

    Attributes:
        group: process group; None where there is one rank only.
        rank: this rank in it.
        meter: counts, where wanted.
        scratch: buffers of exchanges on the CPU.
    """

    group: dist.ProcessGroup | None
    rank: int
    meter: Meter | None = None
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(slots=True, eq=False)
class Pending:
    """An exchange under way; ``finish`` ends it."""

    routes: Sequence[Route]
    channel: Channel
    needs_grad: tuple[bool, ...] = ()
    token: Tensor | None = None
    flight: _Flight | None = None
    backward_flight: _Flight | None = None


def exchange(tensors: Sequence[Tensor], routes: Sequence[Route], channel: Channel) -> tuple[Tensor, ...]:
    """Exchange tensors of one dtype, each by its own route, at once.

    Every rank of ``channel.group`` calls it, with as many tensors of the same dtypes and widths, and the same of them
    requiring gradients. It waits only for ranks that send this one something, or receive from it.

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
        ctx.pending = pending
        pending.flight = _Flight.launch(tensors, pending.routes, pending.channel)
        token = tensors[0].new_empty(0)
        if not any(pending.needs_grad):
            ctx.mark_non_differentiable(token)
        return token

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (empty,) = ctx.saved_tensors
        pending: Pending = ctx.pending
        chosen = [i for i, needed in enumerate(pending.needs_grad) if needed]
        routes = [pending.routes[i].reversed for i in chosen]
        pending.backward_flight = _Flight.launch([gradients[i] for i in chosen], routes, pending.channel)
        return None, empty


@dataclass(slots=True, eq=False)
class _Flight:
    """Outputs, buffers and handles of one exchange; what lies in one piece goes from and to the tensors themselves."""

    tensors: Sequence[Tensor]
    routes: Sequence[Route]
    channel: Channel
    outputs: list[Tensor]
    buffers: list[Tensor] = field(default_factory=list)
    received: Tensor | None = None
    works: list[dist.Work] | None = None

    @classmethod
    def launch(cls, tensors: Sequence[Tensor], routes: Sequence[Route], channel: Channel) -> _Flight:
        """Every rank of the group calls it. Nothing is sent where the routes are local."""
        began = time.perf_counter()
        flight = cls(tensors, routes, channel, [_new_output(x, r) for x, r in zip(tensors, routes, strict=True)])
        if channel.group is not None and not all(route.is_local for route in routes):
            flight._send(channel.group)
        for x, out, route in zip(tensors, flight.outputs, routes, strict=True):
            if not route.adds_up:  # while the rest is under way
                move(x, route.keep_from, out, route.keep_to)
        flight._count(began)
        return flight

    def _send(self, group: dist.ProcessGroup) -> None:
        widths = [x.shape[1] * x.element_size() for x in self.tensors]
        bytes_to, bytes_from = (
            [sum(n * w for n, w in zip(counts, widths, strict=True)) for counts in zip(*table, strict=True)]
            for table in ([r.send_counts for r in self.routes], [r.receive_counts for r in self.routes])
        )
        sent, received = self._in_place()
        if sent is None:
            sent = self._buffer(sum(bytes_to))
            _pack(self.tensors, self.routes, sent.view(self.tensors[0].dtype))
        if received is None:
            received = self._buffer(sum(bytes_from))
            self.received = received.view(self.tensors[0].dtype)
        self.works = send_and_receive(received, sent, bytes_from, bytes_to, group)
        meter = self.channel.meter
        if meter is not None:
            meter.bytes_sent += sum(bytes_to)
            meter.num_exchanges += 1

    def _in_place(self) -> tuple[Tensor | None, Tensor | None]:
        """What can be sent from the only tensor, and received into the only output, without a copy."""
        if len(self.tensors) > 1:
            return None, None
        (x,), (out,), (route,) = self.tensors, self.outputs, self.routes
        return route.send.bytes_of(x), None if route.adds_up else route.receive.bytes_of(out)

    def _buffer(self, num_bytes: int) -> Tensor:
        buffer = self.channel.scratch.take(num_bytes, self.tensors[0])
        self.buffers.append(buffer)
        return buffer[:num_bytes]

    def land(self) -> tuple[Tensor, ...]:
        """Wait, and unpack; sums are made in order of rank, in float32 at least."""
        began = time.perf_counter()
        if self.works is not None:
            for work in self.works:
                work.wait()
            if self.received is not None:
                _unpack(self, self.received)
            for buffer in self.buffers:
                self.channel.scratch.give_back(buffer)
        else:
            for x, out, route in zip(self.tensors, self.outputs, self.routes, strict=True):
                if route.adds_up:
                    _add_kept(x, out, route)
        self._count(began)
        return tuple(out.to(x.dtype) for x, out in zip(self.tensors, self.outputs, strict=True))

    def _count(self, began: float) -> None:
        if self.channel.meter is not None and self.works is not None:
            self.channel.meter.seconds += time.perf_counter() - began


def send_and_receive(
    received: Tensor, sent: Tensor, bytes_from: Sequence[int], bytes_to: Sequence[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Launch an exchange; every rank of ``group`` calls it, in the same order as its other exchanges.

    NCCL must have run a collective of the whole group before: see ``knapformer.execution.groups``.

    Args:
        received, sent: flat uint8; they must be left alone until the works are done.
        bytes_from, bytes_to: (N,) bytes that come from each rank, and that go to it; none for this rank itself.
    """
    operations = []
    for rank, (put, take) in enumerate(zip(received.split(list(bytes_from)), sent.split(list(bytes_to)), strict=True)):
        if not put.numel() and not take.numel():
            continue
        peer = dist.get_global_rank(group, rank)
        if take.numel():
            operations.append(dist.P2POp(dist.isend, take, peer, group))
        if put.numel():
            operations.append(dist.P2POp(dist.irecv, put, peer, group))
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _pack(tensors: Sequence[Tensor], routes: Sequence[Route], flat: Tensor) -> None:
    """Copy the units that leave into ``flat``: by destination, and for each destination tensor after tensor."""
    if len(tensors) == 1:
        routes[0].send.take(tensors[0], flat.view(routes[0].send.count, tensors[0].shape[1]))
        return
    for _, i, units, part in _parts(flat, [r.send.split(r.send_counts) for r in routes], tensors):
        if units.count:
            units.take(tensors[i], part)


def _unpack(flight: _Flight, flat: Tensor) -> None:
    """Put what arrived where it goes."""
    routes, outputs = flight.routes, flight.outputs
    if len(outputs) == 1 and not routes[0].adds_up:
        routes[0].receive.put(flat.view(routes[0].receive.count, outputs[0].shape[1]), outputs[0])
        return
    for rank, i, units, part in _parts(flat, [r.receive.split(r.receive_counts) for r in routes], outputs):
        if routes[i].adds_up and rank == flight.channel.rank:
            _add_kept(flight.tensors[i], outputs[i], routes[i])
        elif units.count:
            (units.add if routes[i].adds_up else units.put)(part, outputs[i])


def _add_kept(x: Tensor, out: Tensor, route: Route) -> None:
    part = x.new_empty(route.keep_from.count, x.shape[1])
    route.keep_from.take(x, part)
    route.keep_to.add(part, out)


def _parts(
    flat: Tensor, units: Sequence[Sequence[Units]], tensors: Sequence[Tensor]
) -> Iterator[tuple[int, int, Units, Tensor]]:
    """(rank, tensor, its units, their (count, width) part of ``flat``), in the order in which they lie in ``flat``."""
    at = 0
    for rank, by_tensor in enumerate(zip(*units, strict=True)):
        for i, own in enumerate(by_tensor):
            width = tensors[i].shape[1]
            yield rank, i, own, flat[at : at + own.count * width].view(own.count, width)
            at += own.count * width


def _new_output(x: Tensor, route: Route) -> Tensor:
    if route.adds_up:
        return x.new_zeros(route.num_out, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(route.num_out, x.shape[1])
