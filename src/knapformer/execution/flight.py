"""One exchange from launch to landing, without autograd: pack, send and receive, unpack."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from knapformer.execution.calls import Call, Waiting
from knapformer.execution.routes import AnyRoute, JointRoute, Route, move
from knapformer.execution.transport import Channel, Messages, Waits


def launch(tensors: Sequence[Tensor], route: AnyRoute, channel: Channel, call: Call | None = None) -> Flight:
    """Begin an exchange; every rank of the channel calls it. Nothing is sent where the route is local.

    Args:
        tensors: (units, width) of one dtype and width.
        call: which one it is, where the channel tells calls apart.
    """
    began = time.perf_counter()
    if call is not None and channel.calls is not None and route.peers:
        channel.calls.transcript.unfinished.append(call)
    if isinstance(route, JointRoute):
        flight: Flight = JointFlight(tensors, route, channel)
    else:
        flight = SingleFlight(tensors, route, channel)
    flight.call = call
    flight.take_off(is_alone=channel.transport is None or route.is_local)
    flight.count(began)
    return flight


class Flight(ABC):
    """Buffers and messages of one exchange.

    Args:
        tensors, route, channel: see ``launch``.
    """

    def __init__(self, tensors: Sequence[Tensor], route: AnyRoute, channel: Channel) -> None:
        self.channel = channel
        self.dtype, self.device, self.width = tensors[0].dtype, tensors[0].device, tensors[0].shape[1]
        self.unit_bytes = self.width * self.dtype.itemsize
        self.peers = route.peers
        self.bytes_to = [count * self.unit_bytes for count in route.send_counts]
        self.bytes_from = [count * self.unit_bytes for count in route.receive_counts]
        self.buffers: list[Tensor] = []
        self.works: Sequence[Waits] | None = None
        self.call: Call | None = None

    @abstractmethod
    def take_off(self, *, is_alone: bool) -> None:
        """Pack, and send unless no rank does."""

    @abstractmethod
    def unpack(self) -> tuple[Tensor, ...]:
        """The outputs, once everything has arrived."""

    def land(self) -> tuple[Tensor, ...]:
        """Wait, and unpack."""
        began = time.perf_counter()
        if self.works:
            self.channel.wait(self.works, self.call, self.peers)
        outputs = self.unpack()
        for buffer in self.buffers:
            self.channel.scratch.give_back(buffer)
        self.buffers = []
        self.count(began)
        return outputs

    def buffer(self, num_bytes: int) -> Tensor:
        """Scratch until the flight has landed."""
        buffer = self.channel.scratch.take(num_bytes, self.device)
        self.buffers.append(buffer)
        return buffer[:num_bytes]

    def as_units(self, part: Tensor, count: int) -> Tensor:
        """Bytes as (count, width) of the tensors' dtype."""
        return part.view(self.dtype).view(count, self.width)

    def send(self, received: Tensor, sent: Tensor) -> None:
        """Every rank of the channel calls it, unless the route is local."""
        transport, meter = self.channel.transport, self.channel.meter
        assert transport is not None
        messages = Messages(self.peers, self.bytes_from, self.bytes_to, self.call)
        try:
            self.works = transport.launch(received, sent, messages)
        except RuntimeError as error:  # the group's connections are gone
            if self.channel.calls is None or self.call is None:
                raise
            self.channel.calls.explain(error, Waiting(self.call, self.peers))
        if meter is not None:
            meter.bytes_sent += sent.numel()
            meter.num_exchanges += 1

    def count(self, began: float) -> None:
        """Add the time since ``began`` to the meter."""
        if self.channel.meter is not None and self.works is not None:
            self.channel.meter.seconds += time.perf_counter() - began


class SingleFlight(Flight):
    """Of one tensor: what lies in one piece goes from and to the tensor itself, the rest through buffers."""

    def __init__(self, tensors: Sequence[Tensor], route: Route, channel: Channel) -> None:
        super().__init__(tensors, route, channel)
        (self.x,) = tensors
        self.route = route
        self.out = self.x.new_empty(route.num_out, self.x.shape[1])
        self.received: Tensor | None = None

    def take_off(self, *, is_alone: bool) -> None:
        if not is_alone:
            sent, received = self.route.send.bytes_of(self.x), self.route.receive.bytes_of(self.out)
            if sent is None:
                sent = self.buffer(sum(self.bytes_to))
                self.route.send.take(self.x, self.as_units(sent, self.route.send.count))
            if received is None:
                received = self.received = self.buffer(sum(self.bytes_from))
            self.send(received, sent)
        move(self.x, self.route.keep_from, self.out, self.route.keep_to)  # while the rest is under way

    def unpack(self) -> tuple[Tensor, ...]:
        if self.received is not None:
            self.route.receive.put(self.as_units(self.received, self.route.receive.count), self.out)
        return (self.out,)


class JointFlight(Flight):
    """Of several tensors through one buffer: one gather packs them, and one unpacks them."""

    def __init__(self, tensors: Sequence[Tensor], route: JointRoute, channel: Channel) -> None:
        super().__init__(tensors, route, channel)
        self.tensors: Sequence[Tensor] | None = tensors
        self.route = route

    def take_off(self, *, is_alone: bool) -> None:
        num_sent, num_received, num_kept = sum(self.bytes_to), sum(self.bytes_from), self.route.num_kept
        kept = num_kept * self.unit_bytes
        whole = self.buffer(num_sent + kept + num_received)
        if self.route.is_reversed:
            received, _, sent = whole.split([num_received, kept, num_sent])
            packed, self.arrived = whole[num_received:], whole[: num_received + kept]
        else:
            sent, _, received = whole.split([num_sent, kept, num_received])
            packed, self.arrived = whole[: num_sent + kept], whole[num_sent:]
        assert self.tensors is not None
        self.route.taken.pack(self.tensors, self.as_units(packed, self.route.taken.num_positions))
        self.tensors = None  # they are packed, and need not live until the rest has arrived
        if not is_alone:
            self.send(received, sent)

    def unpack(self) -> tuple[Tensor, ...]:
        return self.route.given.unpack(self.as_units(self.arrived, self.route.given.num_positions))
