"""How bytes go from rank to rank: sends and receives between those pairs that have something for one another.

PyTorch's ``all_to_all_single`` makes every rank wait for every other: on gloo by design, on NCCL because it sends empty
parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.errors import RankError
from knapformer.execution.calls import Call, Calls, Waiting
from knapformer.execution.marks import Marks
from knapformer.execution.telling import waited_in_vain


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
        call: which call they belong to, where ranks tell calls apart.
    """

    peers: Sequence[int]
    bytes_from: Sequence[int]
    bytes_to: Sequence[int]
    call: Call | None = None

    def tags(self, num_bytes: Sequence[int]) -> list[int]:
        """For each peer's message; 0 where calls are not told apart."""
        return [0 if self.call is None else self.call.tag(n) for n in num_bytes]

    def parts(self, received: Tensor, sent: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What goes to each peer, and where what comes from it is put."""
        return sent.split(list(self.bytes_to)), received.split(list(self.bytes_from))


@dataclass(frozen=True, slots=True, eq=False)
class GroupTransport:
    """Messages over a process group, which on NCCL must have run a collective of the whole group before.

    Attributes:
        group: the process group.
        marks: what tells messages of calls apart where they can carry no tags.
    """

    group: dist.ProcessGroup
    marks: Marks | None = None

    def launch(self, received: Tensor, sent: Tensor, messages: Messages) -> Sequence[Waits]:
        """Every rank of the group calls it, in the same order as its other exchanges."""
        if self.marks is not None and messages.call is not None:
            return _in_one_batch(received, sent, messages, self.group, self.marks)
        return send_and_receive(received, sent, messages, self.group)


def send_and_receive(received: Tensor, sent: Tensor, messages: Messages, group: dist.ProcessGroup) -> Sequence[Waits]:
    """Launch an exchange; every rank of ``group`` calls it, in the same order as its other exchanges.

    Args:
        received, sent: flat uint8; they must be left alone until the works are done.
        messages: with whom.
    """
    if sent.device.type != "cpu":
        return _in_one_batch(received, sent, messages, group, None)
    taken, put = messages.parts(received, sent)
    works = []
    for peer, part, tag in zip(messages.peers, taken, messages.tags(messages.bytes_to), strict=True):
        if part.numel():
            works.append(dist.isend(part, group=group, group_dst=peer, tag=tag))
    for peer, part, tag in zip(messages.peers, put, messages.tags(messages.bytes_from), strict=True):
        if part.numel():
            works.append(dist.irecv(part, group=group, group_src=peer, tag=tag))
    return [work for work in works if work is not None]


def _in_one_batch(
    received: Tensor, sent: Tensor, messages: Messages, group: dist.ProcessGroup, marks: Marks | None
) -> Sequence[Waits]:
    """NCCL runs the messages of a batch at once; one by one, two ranks that both send first would wait forever.

    Every rank of ``group`` calls it. Each message has a mark beside it where ``marks`` are given, on all ranks.
    """
    taken, put = messages.parts(received, sent)
    to = [i for i, part in enumerate(taken) if part.numel()]
    by = [i for i, part in enumerate(put) if part.numel()]
    outgoing, incoming = [(i, taken[i]) for i in to], [(i, put[i]) for i in by]
    marked = None
    if marks is not None and (to or by):
        said, expected = messages.tags(messages.bytes_to), messages.tags(messages.bytes_from)
        marked = marks.of([said[i] for i in to], [expected[i] for i in by], received)
        outgoing += zip(to, marked.sent.unbind(), strict=True)
        incoming += zip(by, marked.arrived.unbind(), strict=True)
    peers = messages.peers
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peers[i]) for i, x in outgoing]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peers[i]) for i, x in incoming]
    works: Sequence[Waits] = dist.batch_isend_irecv(operations) if operations else []
    return works if marked is None else [*works, marked]


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Over which ranks exchanges go.

    Attributes:
        transport: carries messages; None where there is one rank only.
        rank: this rank.
        meter: counts, where wanted.
        scratch: buffers of exchanges on the CPU.
        calls: tells calls apart, where wanted.
    """

    transport: Transport | None
    rank: int
    meter: Meter | None = None
    scratch: Scratch = field(default_factory=Scratch)
    calls: Calls | None = None

    @classmethod
    def over(
        cls, group: dist.ProcessGroup | None, rank: int, meter: Meter | None = None, calls: Calls | None = None
    ) -> Channel:
        """Over a process group."""
        marks = None if calls is None else calls.marks
        return cls(None if group is None else GroupTransport(group, marks), rank, meter, calls=calls)

    def wait(self, works: Sequence[Waits], call: Call | None, peers: Sequence[int]) -> None:
        """Until an exchange is through.

        Raises:
            KnapFormerError: see ``Calls.wait``; where calls are not compared, a ``RankError``.
        """
        if self.calls is not None and call is not None:
            self.calls.wait(works, Waiting(call, peers))
            return
        began = time.monotonic()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} {waited_in_vain('an exchange', peers, began, error)}") from error


NO_TAG = 0x7FFFFFFE
"""Of a receive that nothing is ever sent for."""


def end_waits(group: dist.ProcessGroup) -> None:
    """End everything that this rank waits for in a gloo group, in another thread: it then raises. No collective.

    A receive that times out ends all of them, and the group's connections. Where a peer has closed its own already, a
    receive from it is refused at once, which ends nothing else; hence one peer after another.
    """
    for peer in range(dist.get_world_size(group)):
        if peer == dist.get_rank(group):
            continue
        try:
            work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=NO_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return


def combined(
    numbers: Sequence[int],
    members: Sequence[int],
    calls: Calls,
    call: Call,
    tag: Callable[[int], int],
    group: dist.ProcessGroup,
) -> list[int]:
    """The bitwise or of the first number of all members, and the largest of each other one.

    Every rank of ``members`` calls it, and no other. It takes a message to and from one other member in each of
    log₂(members) rounds, on the host.

    Args:
        numbers: this rank's.
        members: ranks of ``group``, this one among them; the same on all of them.
        calls: this rank's.
        call: in which they do it.
        tag: of the messages of each round.
        group: gloo.
    """
    found, me, size = list(numbers), members.index(calls.rank), len(members)
    step = 1
    while step < size:
        to, by = members[(me + step) % size], members[(me - step) % size]
        own, other = torch.tensor(found), torch.empty(len(found), dtype=torch.int64)
        waiting = Waiting(call, [to] if to == by else sorted([to, by]))
        try:
            works = [
                dist.irecv(other, group=group, group_src=by, tag=tag(step)),
                dist.isend(own, group=group, group_dst=to, tag=tag(step)),
            ]
        except RuntimeError as error:  # the group's connections are gone
            calls.explain(error, waiting)
        calls.wait(works, waiting)
        theirs = other.tolist()
        found = [found[0] | theirs[0], *map(max, found[1:], theirs[1:])]
        step *= 2
    return found


FIXED = 8
"""Numbers in a gathered message whose size all ranks know: all of them are alike, whatever a rank takes one for."""


class Members(Protocol):
    """Ranks that gather something; see ``knapformer.execution.groups.BalancingGroup``."""

    @property
    def control(self) -> dist.ProcessGroup | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def calls(self) -> Calls | None: ...


def gather_text(group: Members, text: bytes) -> list[bytes]:
    """Every rank's text, in order of rank. Every rank of the group calls it."""
    sizes = all_gather(group, np.asarray([len(text)], np.int64))[:, 0].tolist()
    padded = np.frombuffer(text.ljust(-(-len(text) // 8) * 8), np.int64)
    gathered = all_gather(group, padded, [-(-size // 8) for size in sizes])
    return [own.tobytes()[:size] for own, size in zip(gathered, sizes, strict=True)]


def all_gather(group: Members, numbers: np.ndarray, counts: list[int] | None = None) -> Any:
    """(N, n) where all ranks bring n numbers, at most ``FIXED``; else a list of N arrays of ``counts`` numbers.

    Every rank of the group calls it.
    """
    if group.control is None:
        return numbers[None] if counts is None else [numbers]
    longest = FIXED if counts is None else max(counts)
    own = torch.zeros(longest, dtype=torch.int64)
    own[: len(numbers)] = torch.from_numpy(np.array(numbers, np.int64))
    table = torch.empty(group.size, longest, dtype=torch.int64)
    if longest:
        _gather_into(table, own, group)
    rows = table.numpy()
    if counts is None:
        return rows[:, : len(numbers)]
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _gather_into(table: torch.Tensor, own: torch.Tensor, group: Members) -> None:
    """Every rank of the group calls it."""
    # The name of torch 2.13; before, and with a warning since, it is all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    others = [rank for rank in range(group.size) if rank != group.rank]
    if group.calls is None:
        began = time.monotonic()
        try:
            gather(table.view(-1), own, group=group.control)
        except RuntimeError as error:
            raise RankError(f"rank {group.rank} {waited_in_vain('a gather', others, began, error)}") from error
        return
    waiting = Waiting(group.calls.gathering, others)
    try:
        work = gather(table.view(-1), own, group=group.control, async_op=True)
    except RuntimeError as error:  # the group's connections are gone
        group.calls.explain(error, waiting)
    group.calls.wait([work], waiting)
