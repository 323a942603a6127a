"""Process groups, and what ranks agree on before any token moves.

Agreement goes over a CPU group of its own, so that it neither waits for the device nor gets between the collectives of
a step that runs meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from knapformer.errors import (
    ConfigurationError,
    KnapFormerError,
)
from knapformer.execution.agreement import agree
from knapformer.execution.calls import Calls, Description
from knapformer.execution.marks import Marks
from knapformer.execution.transport import all_gather, gather_text
from knapformer.execution.watch import Watch

FIXED = 8
"""Numbers in a message whose size all ranks know: all such messages are alike, whatever a rank takes them for."""


@dataclass(frozen=True, slots=True, eq=False)
class BalancingGroup:
    """The ranks that plan together.

    Attributes:
        data: process group that tokens travel over, connected; None for a single rank without torch.distributed.
        control: gloo group of the same ranks for lengths and digests.
        rank: this rank in the group.
        size: ranks of the group.
        offset: rank, in the group that was given, of this group's rank 0.
        device: where tokens live: the CPU for gloo, else the accelerator.
        timeout: of the groups that are made here, and of every other wait.
        calls: what this rank has called, where calls are compared.
    """

    data: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    rank: int
    size: int
    offset: int
    device: torch.device
    timeout: timedelta = default_pg_timeout
    calls: Calls | None = None

    @property
    def world_ranks(self) -> list[int]:
        """Of each of its ranks, that in the default group."""
        return [0] if self.control is None else list(dist.get_process_group_ranks(self.control))

    def watched(self) -> BalancingGroup:
        """The same group, with the calls of a new balancer noted and compared from here on. Not a collective."""
        if self.data is None or self.control is None or self.size == 1:
            return self
        watch = Watch(dist.distributed_c10d._get_default_store(), self.timeout)
        is_gloo = dist.get_backend(self.data) == "gloo"
        groups = [self.control, self.data] if is_gloo else [self.control]
        marks = None if is_gloo else Marks()
        calls = Calls(self.control.group_name, self.rank, self.world_ranks, watch, groups, marks)
        watch.begin(calls)
        return replace(self, calls=calls)

    def beside(self) -> BalancingGroup:
        """The same ranks with a control group of its own, for agreements beside those of this one; calls are not noted.
        Every rank of the group calls it."""
        if self.control is None:
            return self
        control = subgroup(self.control, [range(self.size)], "gloo", self.timeout)
        return replace(self, control=control, calls=None)

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        size: int | None = None,
        error: KnapFormerError | None = None,
        timeout: timedelta | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> BalancingGroup:
        """Make the groups. Every rank of ``group`` calls it, once, in the same order as other group creations.

        Args:
            group: whose ranks balance; the default group if None. Without torch.distributed this is one rank alone.
            size: ranks of a balancing group, where several of them share ``group``; consecutive ranks belong together.
            error: what is wrong with this rank's configuration; then ``size`` may be anything.
            timeout: see ``knapformer.Balancer``.
            configuration: what else all ranks of ``group`` must have in common.

        Raises:
            ConfigurationError: ``group`` is not a multiple of ``size``.
            KnapFormerError: ``error`` of the lowest rank that has one; on all ranks.
            DisagreementError: ranks have other sizes, or another configuration; on all ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if error is not None:
                raise error
            _check_multiple(1, size)
            return cls(None, None, 0, 1, 0, torch.device("cpu"))
        data = dist.group.WORLD if group is None else group
        assert data is not None
        device = torch.device("cpu") if dist.get_backend(data) == "gloo" else torch.accelerator.current_accelerator()
        rank, world_size = dist.get_rank(data), dist.get_world_size(data)
        timeout = _default_timeout() if timeout is None else timeout
        control = subgroup(data, [range(world_size)], "gloo", timeout)
        everyone = cls(data, control, rank, world_size, 0, device or torch.device("cpu"), timeout)
        return everyone._part(size, error, configuration or {})

    def _part(
        self, size: int | None, error: KnapFormerError | None, configuration: Mapping[str, Any]
    ) -> BalancingGroup:
        """The balancing group of this rank, where all ranks of this group agree on its size."""
        try:
            size = _check_multiple(self.size, size)
        except ConfigurationError as wrong_size:
            size, error = 0, error or wrong_size
        agree(self, {"ranks_in_a_balancing_group": size, **configuration}, [], error)
        assert self.data is not None
        if size == self.size:
            return replace(self, data=self._connected())
        offset = self.rank // size * size
        parts = [range(first, first + size) for first in range(0, self.size, size)]
        data = subgroup(self.data, parts, timeout=self.timeout)
        control = subgroup(self.data, parts, "gloo", self.timeout)
        return replace(self, data=data, control=control, rank=self.rank - offset, size=size, offset=offset)

    def _connected(self) -> dist.ProcessGroup | None:
        """The data group of all ranks, ready for sends and receives between any of them. Every rank of it calls this.

        NCCL runs what one communicator is given one after another, and FSDP uses the default group's; exchanges that
        may overlap with it need a communicator of their own. On gloo a disagreement ends a group's connections, which
        must be no other's. An NCCL group that the user gave is taken as it is.
        """
        if self.data is None:
            return None
        if self.data is dist.group.WORLD or self.device.type == "cpu":
            return subgroup(self.data, [range(self.size)], timeout=self.timeout)
        _connect(self.data)
        return self.data


def subgroup(
    group: dist.ProcessGroup,
    parts: Sequence[Sequence[int]],
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """The process group of this rank's part. Every rank of ``group`` calls it, with the same parts.

    Ranks name a new group by how many they have made. Of the default group, every rank therefore makes the groups of
    all parts, its own or not. Of another group only members can make theirs, and must have made equally many before.

    Args:
        group: what is divided.
        parts: ranks of ``group``, each rank in one part.
        backend: of the new groups; by default that of the default group.
        timeout: of the new groups; by default the backend's.
    """
    own = next(i for i, part in enumerate(parts) if dist.get_rank(group) in part)
    members = [[dist.get_global_rank(group, rank) for rank in part] for part in parts]
    if group is dist.group.WORLD:
        made: dist.ProcessGroup = [dist.new_group(ranks, timeout, backend) for ranks in members][own]
    else:
        made = dist.new_group(members[own], timeout, backend, use_local_synchronization=True)
    if dist.get_backend(made) != "gloo":
        _connect(made)
    return made


def _default_timeout() -> timedelta:
    """The default group's, as ``init_process_group`` was given it: new groups have the backend's instead."""
    group = dist.group.WORLD
    assert group is not None
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return min((own._timeout for own in options if own is not None), default=default_pg_timeout)


def _connect(group: dist.ProcessGroup) -> None:
    """One collective of the whole group, without which NCCL allows no sends between some of its ranks. Every rank of
    the group calls it."""
    dist.all_reduce(torch.zeros(1, device=torch.accelerator.current_accelerator()), group=group)


def _check_multiple(world_size: int, size: int | None) -> int:
    size = world_size if size is None else size
    if size < 1 or world_size % size:
        raise ConfigurationError(f"a world of {world_size} ranks is not a multiple of the {size} ranks of the topology")
    return size


def gather_values(group: BalancingGroup, value: Any) -> list[Any]:
    """Every rank's value, in order of rank. Every rank of the group calls it.

    Args:
        value: anything that JSON holds.
    """
    _note(group, "gather_values")
    return [json.loads(text) for text in gather_text(group, json.dumps(value).encode())]


def wait_for_all(group: BalancingGroup) -> None:
    """Return once every rank of the group has called this. It does not wait for devices."""
    _note(group, "wait_for_all")
    all_gather(group, np.zeros(1, np.int64))


def _note(group: BalancingGroup, what: str) -> None:
    if group.calls is not None:
        group.calls.outside(Description(what))
