"""Process groups, and what ranks agree on before any token moves.

Agreement goes over a CPU group of its own, so that it neither waits for the device nor gets between the collectives of
a step that runs meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from knapformer.errors import (
    CapacityError,
    ConfigurationError,
    DisagreementError,
    KnapFormerError,
    LengthsError,
    PlanError,
    RankError,
)
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths

_ERRORS = (RankError, LengthsError, ConfigurationError, CapacityError, PlanError)


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
        timeout: of the groups that are made here.
    """

    data: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    rank: int
    size: int
    offset: int
    device: torch.device
    timeout: timedelta | None = None

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        size: int | None = None,
        error: KnapFormerError | None = None,
        timeout: timedelta | None = None,
    ) -> BalancingGroup:
        """Make the groups. Every rank of ``group`` calls it, once, in the same order as other group creations.

        Args:
            group: whose ranks balance; the default group if None. Without torch.distributed this is one rank alone.
            size: ranks of a balancing group, where several of them share ``group``; consecutive ranks belong together.
            error: what is wrong with this rank's configuration; then ``size`` may be anything.
            timeout: see ``knapformer.Balancer``.

        Raises:
            ConfigurationError: ``group`` is not a multiple of ``size``.
            KnapFormerError: ``error`` of the lowest rank that has one; on all ranks.
            DisagreementError: ranks have other sizes; on all ranks.
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
        control = subgroup(data, [range(world_size)], "gloo", timeout)
        everyone = cls(data, control, rank, world_size, 0, device or torch.device("cpu"), timeout)
        return everyone._part(size, error)

    def _part(self, size: int | None, error: KnapFormerError | None) -> BalancingGroup:
        """The balancing group of this rank, where all ranks of this group agree on its size."""
        try:
            size = _check_multiple(self.size, size)
        except ConfigurationError as wrong_size:
            size, error = 0, error or wrong_size
        _agree(self, {"ranks_in_a_balancing_group": size}, [], error)
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
        may overlap with it need a communicator of their own. A group that the user gave is taken as it is.
        """
        if self.device.type == "cpu" or self.data is None:
            return self.data
        if self.data is dist.group.WORLD:
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


def _connect(group: dist.ProcessGroup) -> None:
    """One collective of the whole group, without which NCCL allows no sends between some of its ranks. Every rank of
    the group calls it."""
    dist.all_reduce(torch.zeros(1, device=torch.accelerator.current_accelerator()), group=group)


def _check_multiple(world_size: int, size: int | None) -> int:
    size = world_size if size is None else size
    if size < 1 or world_size % size:
        raise ConfigurationError(f"a world of {world_size} ranks is not a multiple of the {size} ranks of the topology")
    return size


@dataclass(frozen=True, slots=True)
class LocalInput:
    """What one rank brings to a step.

    Attributes:
        streams: tokens of each local sequence, by stream; ``{"": …}`` where streams have no names.
        conditioning: rows of ragged conditioning of each local sequence, by name.
        error: what went wrong on this rank instead.
    """

    streams: Mapping[str, IntArray]
    conditioning: Mapping[str, IntArray]
    error: KnapFormerError | None = None

    @classmethod
    def collect(
        cls,
        parse: Callable[[], dict[str, IntArray]],
        num_rows: int | None,
        error: BaseException | None,
        conditioning: Mapping[str, Any] | None,
    ) -> LocalInput:
        """Everything that can be wrong on this rank alone, as an error that is carried to all ranks.

        Args:
            parse: gives the streams, or raises.
            num_rows, error, conditioning: see ``knapformer.Balancer.prepare``.
        """
        try:
            if error is not None:
                raise RankError(f"{type(error).__name__}: {error}")
            streams = parse()
            num_tokens = sum(int(part.sum()) for part in streams.values())
            if num_rows is not None and num_tokens != num_rows:
                raise LengthsError(f"the lengths sum to {num_tokens} tokens, the tensors have {num_rows} rows")
            count = len(next(iter(streams.values())))
            rows = parse_local_lengths(conditioning) if conditioning else {}
            for name, part in rows.items():
                if len(part) != count:
                    raise LengthsError(f"conditioning {name!r} lists {len(part)} sequences, the lengths {count}")
            return cls(streams, rows)
        except Exception as failure:  # whatever it is, the other ranks wait
            return cls({}, {}, carried(failure))


def carried(error: Exception) -> KnapFormerError:
    """As an error that can be raised on other ranks."""
    return error if isinstance(error, KnapFormerError) else RankError(f"{type(error).__name__}: {error}")


def gather_inputs(
    group: BalancingGroup, local: LocalInput, configuration: Mapping[str, Any]
) -> tuple[Lengths, dict[str, IntArray]]:
    """The lengths, and ragged conditioning rows (S,), of all ranks. Every rank of the group calls it.

    Raises:
        KnapFormerError: of the type and with the text of the lowest rank's error, on all ranks, naming that rank.
        DisagreementError: ranks run other configurations or versions, or name other streams; on all ranks.
    """
    columns = [*local.streams.values(), *local.conditioning.values()]
    numbers = np.concatenate(columns) if columns and local.error is None else np.zeros(0, np.int64)
    names = [list(local.streams), list(local.conditioning)] if local.error is None else []
    counts = _agree(group, configuration, names, local.error, len(numbers))
    gathered = _all_gather(group, numbers, counts)
    tables = [own.reshape(len(columns), -1) for own in gathered]
    num_streams = len(local.streams)
    lengths = Lengths.from_streams([table[:num_streams] for table in tables], tuple(local.streams))
    rows = np.concatenate([table[num_streams:] for table in tables], axis=1)
    return lengths, dict(zip(local.conditioning, rows, strict=True))


def _agree(
    group: BalancingGroup,
    configuration: Mapping[str, Any],
    names: list[list[str]],
    error: KnapFormerError | None,
    number: int = 0,
) -> list[int]:
    """``number`` of every rank, where no rank has an error and all have the same configuration and names."""
    header = [_hash(configuration), _hash(names), int(error is not None), number]
    headers = _all_gather(group, np.asarray(header, np.int64))
    if headers[:, 2].any() or (headers[:, :2] != headers[0, :2]).any():
        content = {"configuration": configuration, "names": names, "error": _error_dict(error)}
        raise _disagreement(group, json.dumps(content, default=_plain).encode())
    numbers: list[int] = headers[:, 3].tolist()
    return numbers


def agree_on_plan(group: BalancingGroup, digest: bytes | None, error: KnapFormerError | None) -> None:
    """Check that all ranks made the same plan. Every rank of the group calls it.

    Args:
        digest: 32 bytes of this rank's plan; None where planning failed.
        error: why it failed.

    Raises:
        KnapFormerError: planning failed on a rank; the same on all ranks.
        DisagreementError: the plans differ; on all ranks.
    """
    own = np.frombuffer(digest or bytes(32), np.int64)
    table = _all_gather(group, np.append(own, int(error is not None)))
    if table[:, -1].any():
        text = json.dumps({"error": _error_dict(error)}).encode()
        raise _disagreement(group, text)
    differing = np.flatnonzero((table != table[0]).any(axis=1))
    if len(differing):
        raise DisagreementError(f"rank {differing[0]} made another plan than rank 0 from the same lengths")


def _disagreement(group: BalancingGroup, text: bytes) -> KnapFormerError:
    """Every rank's own words, gathered, as the one error that all ranks raise."""
    said = [json.loads(words) for words in _gather_text(group, text)]
    for rank, words in enumerate(said):
        if words["error"] is not None:
            kind = next((e for e in _ERRORS if e.__name__ == words["error"][0]), RankError)
            same = all(other["error"] == words["error"] for other in said)
            return kind(words["error"][1] if same and kind is not RankError else f"rank {rank}: {words['error'][1]}")
    for rank, words in enumerate(said):
        for key, value in words["configuration"].items():
            if value != said[0]["configuration"].get(key):
                return DisagreementError(
                    f"rank {rank} has {key} {value!r}, rank 0 has {said[0]['configuration'].get(key)!r}"
                )
        if words["names"] != said[0]["names"]:
            return DisagreementError(
                f"rank {rank} names streams and conditioning {words['names']}, rank 0 {said[0]['names']}"
            )
    return DisagreementError("ranks disagree, but say the same: a hash collision")


def gather_values(group: BalancingGroup, value: Any) -> list[Any]:
    """Every rank's value, in order of rank. Every rank of the group calls it.

    Args:
        value: anything that JSON holds.
    """
    return [json.loads(text) for text in _gather_text(group, json.dumps(value).encode())]


def wait_for_all(group: BalancingGroup) -> None:
    """Return once every rank of the group has called this. It does not wait for devices."""
    _all_gather(group, np.zeros(1, np.int64))


def _gather_text(group: BalancingGroup, text: bytes) -> list[bytes]:
    sizes = _all_gather(group, np.asarray([len(text)], np.int64))[:, 0].tolist()
    padded = np.frombuffer(text.ljust(-(-len(text) // 8) * 8), np.int64)
    gathered = _all_gather(group, padded, [-(-size // 8) for size in sizes])
    return [own.tobytes()[:size] for own, size in zip(gathered, sizes, strict=True)]


def _all_gather(group: BalancingGroup, numbers: np.ndarray, counts: list[int] | None = None) -> Any:
    """(N, n) where all ranks bring n numbers; else a list of N arrays of ``counts`` numbers."""
    if group.control is None:
        return numbers[None] if counts is None else [numbers]
    longest = len(numbers) if counts is None else max(counts)
    own = torch.zeros(longest, dtype=torch.int64)
    own[: len(numbers)] = torch.from_numpy(np.array(numbers, np.int64))
    table = torch.empty(group.size, longest, dtype=torch.int64)
    if longest:
        # The name of torch 2.13; before, and with a warning since, it is all_gather_into_tensor.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(table.view(-1), own, group=group.control)
    rows = table.numpy()
    return rows if counts is None else [row[:count] for row, count in zip(rows, counts, strict=True)]


def _error_dict(error: KnapFormerError | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _hash(content: Any) -> int:
    """63 bits that are the same on every machine."""
    return (
        int.from_bytes(
            hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).digest()[:8], "little"
        )
        >> 1
    )


def _plain(value: Any) -> Any:
    """What JSON holds of anything else; a rank that could not say what it has would leave the others waiting."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
