"""How bytes go from rank to rank: sends and receives between those pairs that have something for one another.

PyTorch's ``all_to_all_single`` makes every rank wait for every other: on gloo by design, on NCCL because it sends empty
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


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

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """(num_bytes or more,) uint8 of any content."""
        if device.type == "cpu" and self._free:
            self._free.sort(key=Tensor.numel)
            at = next((i for i, buffer in enumerate(self._free) if buffer.numel() >= num_bytes), 0)
            buffer = self._free.pop(at)
            if buffer.numel() >= num_bytes:
                return buffer
        # What is born in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Let the next exchange use what ``take`` gave."""
        if buffer.device.type == "cpu":
            self._free.append(buffer)


class Waits(Protocol):
    """A message under way, such as a ``torch.distributed.Work``."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """What carries messages; tests and benchmarks have others than a process group."""

    def launch(self, received: Tensor, sent: Tensor, messages: Messages) -> Sequence[Waits]:
        """Begin an exchange; every rank of the group calls it, in the same order as its other exchanges.

        Args:
            received, sent: flat uint8; they must be left alone until all messages are done.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """With whom, and how much.

    Attributes:
        peers: ranks of the group, not this one.
        bytes_from, bytes_to: bytes that come from each of them, and that go to it.
    """

    peers: Sequence[int]
    bytes_from: Sequence[int]
    bytes_to: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class GroupTransport:
    """Messages over a process group, which on NCCL must have run a collective of the whole group before."""

    group: dist.ProcessGroup

    def launch(self, received: Tensor, sent: Tensor, messages: Messages) -> Sequence[Waits]:
        """Every rank of the group calls it, in the same order as its other exchanges."""
        return send_and_receive(received, sent, messages, self.group)


def send_and_receive(received: Tensor, sent: Tensor, messages: Messages, group: dist.ProcessGroup) -> list[dist.Work]:
    """Launch an exchange; every rank of ``group`` calls it, in the same order as its other exchanges.

    Args:
        received, sent: flat uint8; they must be left alone until the works are done.
        messages: with whom.
    """
    taken, put = sent.split(list(messages.bytes_to)), received.split(list(messages.bytes_from))
    if sent.device.type != "cpu":
        return _in_one_batch(taken, put, messages.peers, group)
    works = []
    for peer, part in zip(messages.peers, taken, strict=True):
        if part.numel():
            works.append(dist.isend(part, group=group, group_dst=peer))
    for peer, part in zip(messages.peers, put, strict=True):
        if part.numel():
            works.append(dist.irecv(part, group=group, group_src=peer))
    return [work for work in works if work is not None]


def _in_one_batch(
    taken: Sequence[Tensor], put: Sequence[Tensor], peers: Sequence[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    """NCCL runs the messages of a batch at once; one by one, two ranks that both send first would wait forever."""
    operations = []
    for peer, sent, received in zip(peers, taken, put, strict=True):
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=peer))
    return dist.batch_isend_irecv(operations) if operations else []


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Over which ranks exchanges go.

    Attributes:
        transport: carries messages; None where there is one rank only.
        rank: this rank.
        meter: counts, where wanted.
        scratch: buffers of exchanges on the CPU.
    """

    transport: Transport | None
    rank: int
    meter: Meter | None = None
    scratch: Scratch = field(default_factory=Scratch)

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, rank: int, meter: Meter | None = None) -> Channel:
        """Over a process group."""
        return cls(None if group is None else GroupTransport(group), rank, meter)
