"""A step in the words of the published KnapFormer package: bags, chunks, and dictionaries by id. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from knapformer.errors import ConfigurationError
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan

LINEAR_FLOPS = 24.0
ATTENTION_FLOPS = 4.0
"""Of a layer: 24·L·d² and 4·L²·d (arXiv 2508.06001)."""


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """Where everything goes in one step of one balancing group.

    Sequence and chunk ids count through the balancing group in order of rank, bag ids through its bags. GPU ids are
    world ranks. Every sequence has as many chunks as its bag has ranks, empty ones among them; chunk i is held by
    rank i of the bag. Workloads are FLOPs of a layer's forward pass, attention weighted by γ.

    Attributes:
        balance_gpu_ids: the ranks of the balancing group.
        bag_id2gpu_ids, gpu_id2bag_id: the bags.
        seq_id2seq_len, seq_id2seq_workload: each sequence.
        gpu_id2seq_ids, gpu_id2seq_lens, gpu_id2seq_workloads: the sequences that each rank loaded.
        gpu_id2chunk_ids, gpu_id2chunk_lens: the chunks that each rank holds.
        balance_chunk_id2gpu_id, balance_chunk_id2chunk_len, chunk_id2seq_id: each chunk.
        seq_id2assigned_bag_id: the bag of each sequence.
        gpu_id2total_workload, balance_gpu_id2total_workload: each rank's work without and with balancing.
        per_gpu_capacity: mean work per rank.
    """

    balance_gpu_ids: list[int]
    bag_id2gpu_ids: dict[int, list[int]]
    gpu_id2bag_id: dict[int, int]
    seq_id2seq_len: dict[int, int]
    seq_id2seq_workload: dict[int, float]
    gpu_id2seq_ids: dict[int, list[int]]
    gpu_id2seq_lens: dict[int, list[int]]
    gpu_id2seq_workloads: dict[int, list[float]]
    gpu_id2chunk_ids: dict[int, list[int]]
    gpu_id2chunk_lens: dict[int, list[int]]
    balance_chunk_id2gpu_id: dict[int, int]
    balance_chunk_id2chunk_len: dict[int, int]
    chunk_id2seq_id: dict[int, int]
    seq_id2assigned_bag_id: dict[int, int]
    gpu_id2total_workload: dict[int, float]
    balance_gpu_id2total_workload: dict[int, float]
    per_gpu_capacity: float

    @classmethod
    def of(cls, plan: Plan, lengths: Lengths, topology: Topology, *, gamma: float, width: int) -> RoutingPlan:
        """Read a ``bags`` plan.

        Args:
            plan: of the planner ``bags`` for ``topology``.
            lengths: of the balancing group.
            gamma: weight of attention.
            width: channels of a token.
        """
        gpus = [plan.group_offset + rank for rank in range(plan.world_size)]
        bags = _bags(topology, gpus)
        bag_of = {gpu: bag for bag, members in bags.items() for gpu in members}
        chunks, assigned = _chunks(plan, bags, bag_of)
        work = workloads(lengths.tokens.tolist(), gamma, width)
        local = {gpu: list(range(lengths.offsets[r], lengths.offsets[r + 1])) for r, gpu in enumerate(gpus)}
        held = {gpu: [i for i, (_, holder, _) in enumerate(chunks) if holder == gpu] for gpu in gpus}
        shared = {sequence: work[sequence] / len(bags[bag]) for sequence, bag in assigned.items()}
        return cls(
            balance_gpu_ids=gpus,
            bag_id2gpu_ids=bags,
            gpu_id2bag_id=bag_of,
            seq_id2seq_len=dict(enumerate(lengths.tokens.tolist())),
            seq_id2seq_workload=dict(enumerate(work)),
            gpu_id2seq_ids=local,
            gpu_id2seq_lens={gpu: lengths.tokens[ids].tolist() for gpu, ids in local.items()},
            gpu_id2seq_workloads={gpu: [work[i] for i in ids] for gpu, ids in local.items()},
            gpu_id2chunk_ids=held,
            gpu_id2chunk_lens={gpu: [chunks[i][2] for i in ids] for gpu, ids in held.items()},
            balance_chunk_id2gpu_id={i: holder for i, (_, holder, _) in enumerate(chunks)},
            balance_chunk_id2chunk_len={i: length for i, (_, _, length) in enumerate(chunks)},
            chunk_id2seq_id={i: sequence for i, (sequence, _, _) in enumerate(chunks)},
            seq_id2assigned_bag_id=assigned,
            gpu_id2total_workload={gpu: sum(work[i] for i in ids) for gpu, ids in local.items()},
            balance_gpu_id2total_workload={gpu: sum(shared[chunks[i][0]] for i in ids) for gpu, ids in held.items()},
            per_gpu_capacity=sum(work) / len(gpus),
        )

    def chunk_table(self, bag: int) -> list[list[int]]:
        """Lengths of the chunks of each of a bag's sequences, by sequence id: (sequences, ranks of the bag)."""
        table: dict[int, list[int]] = {}
        for chunk, sequence in self.chunk_id2seq_id.items():
            if self.seq_id2assigned_bag_id[sequence] == bag:
                table.setdefault(sequence, []).append(self.balance_chunk_id2chunk_len[chunk])
        return [table[sequence] for sequence in sorted(table)]

    def imbalance(self) -> tuple[float, float]:
        """Most over mean work of a rank, without and with balancing; 1 is perfect."""
        totals = (self.gpu_id2total_workload.values(), self.balance_gpu_id2total_workload.values())
        before, after = (max(work) / self.per_gpu_capacity if self.per_gpu_capacity else 1.0 for work in totals)
        return before, after

    def to_dict(self) -> dict[str, Any]:
        """The published summary: the keys that it has, in its order."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in NOT_IN_SUMMARY}


NOT_IN_SUMMARY = (
    "seq_id2assigned_bag_id",
    "gpu_id2total_workload",
    "balance_gpu_id2total_workload",
    "per_gpu_capacity",
)


def workloads(lengths: Sequence[int], gamma: float, width: int) -> list[float]:
    """FLOPs of a layer's forward pass for each length, attention weighted by γ."""
    return [LINEAR_FLOPS * n * width**2 + gamma * ATTENTION_FLOPS * n * n * width for n in lengths]


def split_evenly(num_heads: int, num_ranks: int) -> int:
    """Heads per rank of a bag.

    Raises:
        ConfigurationError: they cannot be divided.
    """
    if num_heads % num_ranks:
        raise ConfigurationError(
            f"{num_heads} heads cannot be divided over a bag of {num_ranks} ranks; use bags that divide them, or "
            "knapformer.Balancer, which gives ranks unequal numbers of heads"
        )
    return num_heads // num_ranks


def _bags(topology: Topology, gpus: Sequence[int]) -> dict[int, list[int]]:
    ends = np.cumsum(topology.bag_sizes).tolist()
    return {i: list(gpus[end - size : end]) for i, (size, end) in enumerate(zip(topology.bag_sizes, ends, strict=True))}


def _chunks(
    plan: Plan, bags: dict[int, list[int]], bag_of: dict[int, int]
) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
    """(sequence, GPU, length) of each chunk, and the bag of each sequence. An empty sequence stays in its home's."""
    chunks, assigned = [], {}
    for sequence in range(plan.num_sequences):
        placement = plan.placement(sequence)
        held = {plan.group_offset + segment.rank: segment.end - segment.start for segment in placement.segments}
        bag = bag_of[next(iter(held), plan.group_offset + placement.home)]
        assigned[sequence] = bag
        chunks += [(sequence, gpu, held.get(gpu, 0)) for gpu in bags[bag]]
    return chunks, assigned
