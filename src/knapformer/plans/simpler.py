"""Placements by simpler rules, to measure the planners against. Pure functions from lengths and cost to a plan.

``karmarkar_karp`` never splits; ``power_of_two`` splits evenly over aligned blocks of 2^k ranks; ``cp_sat`` searches
the same blocks exhaustively with OR-tools (the extra ``cp-sat``) and is meant for small steps. They are registered as
references: comparisons show them on request.
"""

from __future__ import annotations

import heapq
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans import native  # noqa: F401  (tables show the planners before the references)
from knapformer.plans.plan import Plan
from knapformer.plans.registry import Request, register_planner


class Block(NamedTuple):
    """Consecutive ranks ``first:first + size``."""

    first: int
    size: int


Parts = list[tuple[float, list[int]]]
"""A partition into N parts, heaviest first: the work and the sequences of each; empty parts at the end are left out."""


def karmarkar_karp(lengths: Lengths, cost: CostModel) -> Plan:
    """Whole sequences by largest differencing: the two most uneven partitions are joined, heavy parts to light ones."""
    n = lengths.num_ranks
    heap: list[tuple[float, int, Parts]] = []
    for i, work in enumerate(cost.work_s(lengths.tokens).tolist()):
        heap.append((-work, i, [(work, [i])]))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _join(one, other, n)
        lightest = joined[-1][0] if len(joined) == n else 0.0
        heapq.heappush(heap, (lightest - joined[0][0], order, joined))
        order += 1
    blocks = [Block(0, 1)] * lengths.num_sequences
    for rank, (_, own) in enumerate(heap[0][2] if heap else []):
        for i in own:
            blocks[i] = Block(rank, 1)
    return even_plan(lengths, cost, blocks, "karmarkar-karp")


def _join(one: Parts, other: Parts, num_parts: int) -> Parts:
    """Part k of the one with part N − 1 − k of the other."""
    alone = num_parts - len(other)
    pairs = zip(one[alone:], reversed(other[num_parts - len(one) :]), strict=True)
    joined = one[:alone] + other[: num_parts - len(one)] + [(a + b, x + y) for (a, x), (b, y) in pairs]
    return sorted(joined, key=lambda part: (-part[0], part[1]))


def power_of_two(lengths: Lengths, cost: CostModel) -> Plan:
    """Heaviest first, over the fewest ranks 2^k whose share is at most the mean, on the least loaded aligned block."""
    n = lengths.num_ranks
    work = cost.work_s(lengths.tokens)
    mean = float(work.sum()) / n
    load = np.zeros(n)
    blocks = [Block(0, 1)] * lengths.num_sequences
    for i in np.argsort(-work, kind="stable").tolist():
        size = 1
        while 2 * size <= n and work[i] > mean * size:
            size *= 2
        aligned = load[: n // size * size].reshape(-1, size).max(axis=1)
        first = int(aligned.argmin()) * size
        load[first : first + size] += work[i] / size
        blocks[i] = Block(first, size)
    return even_plan(lengths, cost, blocks, "power-of-two")


def cp_sat(lengths: Lengths, cost: CostModel, time_limit_s: float = 10.0) -> Plan:
    """The blocks of 2^k ranks that minimise the largest rank's work and communication, summed over its sequences.

    Integer programme of one choice per sequence. Optimal for that objective if OR-tools ends in time, which it does for
    some dozens of sequences on up to 8 ranks; the makespan of the plan is then still that of meetings.

    Raises:
        ConfigurationError: OR-tools is not installed, or found no placement in time.
    """
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise ConfigurationError("the CP-SAT reference needs OR-tools: pip install ortools") from None
    n = lengths.num_ranks
    blocks = [Block(first, 1 << k) for k in range(n.bit_length()) for first in range(0, n - (1 << k) + 1, 1 << k)]
    unit_s = max(float(cost.work_s(lengths.tokens).sum()) / n, 1e-30) / 1e5
    model = cp_model.CpModel()
    loads: list[list[Any]] = [[] for _ in range(n)]
    choices = []
    for length in lengths.tokens.tolist():
        chosen = [model.NewBoolVar("") for _ in blocks]
        model.AddExactlyOne(chosen)
        choices.append(chosen)
        for block, variable in zip(blocks, chosen, strict=True):
            share = round(even_share_s(length, block.size, cost) / unit_s)
            for rank in range(block.first, block.first + block.size):
                loads[rank].append(share * variable)
    largest = model.NewIntVar(0, 10**9, "largest")
    for terms in loads:
        model.Add(sum(terms) <= largest)
    model.Minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.Solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ConfigurationError(f"CP-SAT found no placement in {time_limit_s} s")
    picked = [blocks[[solver.Value(v) for v in chosen].index(1)] for chosen in choices]
    return even_plan(lengths, cost, picked, "cp-sat")


def even_share_s(length: int, size: int, cost: CostModel) -> float:
    """Seconds of work and communication of each of ``size`` ranks that share a sequence evenly, inside a node."""
    work = float(cost.work_s([length])[0]) / size
    moved = 4.0 * length * cost.num_heads * cost.bytes_per_head_token * (size - 1) / size**2
    return work + cost.machine.communication_scale * moved / cost.machine.intra_node_bytes_per_s


def even_plan(lengths: Lengths, cost: CostModel, blocks: Sequence[Block], planner: str) -> Plan:
    """Equal segments and tiles of each sequence over its block."""
    segments, tiles = [], []
    for length, (first, size) in zip(lengths.tokens.tolist(), blocks, strict=True):
        tokens = [length * k // size for k in range(size + 1)]
        heads = [cost.num_heads * k // size for k in range(size + 1)]
        segments.append([(first + k, tokens[k], tokens[k + 1]) for k in range(size) if tokens[k + 1] > tokens[k]])
        tiles.append(
            [(first + k, heads[k], heads[k + 1], 0, length) for k in range(size) if length and heads[k + 1] > heads[k]]
        )
    return Plan.from_placements(
        lengths=lengths.tokens.tolist(),
        homes=lengths.homes.tolist(),
        segments=segments,
        tiles=tiles,
        world_size=lengths.num_ranks,
        num_heads=cost.num_heads,
        num_kv_heads=cost.num_heads,
        planner=planner,
    )


@register_planner("karmarkar-karp", summary="whole sequences by largest differencing", is_reference=True)
def _karmarkar_karp(request: Request) -> Plan:
    return karmarkar_karp(request.lengths, request.cost)


@register_planner("power-of-two", summary="even splits over aligned blocks of 2^k ranks", is_reference=True)
def _power_of_two(request: Request) -> Plan:
    return power_of_two(request.lengths, request.cost)


@register_planner(
    "cp-sat", summary="the best such blocks, by OR-tools", is_reference=True, most_ranks=8, package="ortools"
)
def _cp_sat(request: Request) -> Plan:
    return cp_sat(request.lengths, request.cost)
