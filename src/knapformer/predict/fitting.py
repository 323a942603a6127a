"""Whether plans fit a rank's memory, and what would make them fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.plans.planners import make_plan
from knapformer.plans.registry import PlannerSpec
from knapformer.predict.memory import MemoryModel

CAP_TRIES, CAP_STEP = 8, 0.93
"""A cap that leaves no room for exchanges is lowered to this share, so often."""

RANK_TRIES = 4
"""Shard groups that are added, one by one, to ranks that hold the tokens but not the exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Changes that would make every step fit, each by itself; None where it would not.

    Attributes:
        max_tokens_per_rank: a cap, for a planner that keeps caps.
        shard_size: the fewest ranks over which to shard the parameters.
        recompute: blocks, in backward.
        ranks: the fewest that hold the same sequences, for a planner that keeps caps.
    """

    max_tokens_per_rank: int | None = None
    shard_size: int | None = None
    recompute: bool | None = None
    ranks: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """In words."""
        if self.recompute:
            yield "recompute in backward"
        if self.max_tokens_per_rank is not None:
            yield f"a cap of {self.max_tokens_per_rank:,} tokens a rank"
        if self.shard_size is not None:
            yield f"parameters sharded over {self.shard_size} ranks"
        if self.ranks is not None:
            yield f"the same sequences on {self.ranks} ranks"


def peak_memory_bytes(plan: Plan, memory: MemoryModel) -> float:
    """Of the fullest rank: its tokens and its part in exchanges."""
    split = plan.is_split
    tokens = plan.rank_tokens
    own = split[plan.segment_sequence]
    split_tokens = np.bincount(
        plan.segment_rank[own], (plan.segment_end - plan.segment_start)[own], minlength=plan.world_size
    )
    units = (plan.tile_head_end - plan.tile_head_start) * (plan.tile_query_end - plan.tile_query_start)
    own = split[plan.tile_sequence]
    tile_units = np.bincount(plan.tile_rank[own], units[own], minlength=plan.world_size)
    head_width = memory.width // plan.num_heads
    return max(
        memory.peak_bytes(
            int(n), exchanged_elements=memory.exchange_elements(a, b, head_width, keeps_own=n > a and n >= 2 * a)
        )
        for n, a, b in zip(tokens.tolist(), split_tokens.tolist(), tile_units.tolist(), strict=True)
    )


def fitting_row(
    plans: Sequence[Plan],
    steps: Sequence[Lengths],
    spec: PlannerSpec,
    cost: CostModel,
    memory: MemoryModel | None,
    memory_bytes: float | None,
) -> dict[str, Any]:
    """For a results file: the largest peak, what a rank has, in how many steps it is too little, what would help.

    Args:
        plans: of one planner, for
        steps: their lengths.
        spec: the planner.
        cost: that it was asked with.
        memory: of a rank; None where it is not known, and then all values are.
        memory_bytes: that a rank has; None for any amount.
    """
    row: dict[str, Any] = dict.fromkeys(
        ("peak_memory_gigabytes", "memory_gigabytes", "steps_over_memory", "would_fit"), None
    )
    if memory is None:
        return row
    peaks = [peak_memory_bytes(plan, memory) for plan in plans]
    row["peak_memory_gigabytes"] = max(peaks) / 1e9
    if memory_bytes is None:
        return row
    row["memory_gigabytes"] = memory_bytes / 1e9
    row["steps_over_memory"] = sum(peak > memory_bytes for peak in peaks)
    if row["steps_over_memory"]:
        row["would_fit"] = find_remedies(plans, steps, spec, cost, memory, memory_bytes).to_dict()
    return row


def peak_text(row: Mapping[str, Any]) -> str:
    """The peak of a ``fitting_row``, beside what there is where that is less."""
    if row["peak_memory_gigabytes"] is None:
        return "?"
    shown = f"{row['peak_memory_gigabytes']:.1f}"
    return f"{shown} > {row['memory_gigabytes']:.0f}" if row["steps_over_memory"] else shown


def fitting_lines(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What does not fit, and what would make it fit; rows that the same would help stand together."""
    alike: dict[str, list[str]] = {}
    memory = 0.0
    for name, row in rows.items():
        if row.get("steps_over_memory"):
            memory = row["memory_gigabytes"]
            remedies = "; or ".join(Remedies(**row["would_fit"]).lines())
            alike.setdefault(remedies, []).append(f"{name} ({row['peak_memory_gigabytes']:.1f} GB)")
    for remedies, names in alike.items():
        verb = "does" if len(names) == 1 else "do"
        would = f"What would: {remedies}." if remedies else "No single change would: load fewer tokens."
        yield f"{', '.join(names)} {verb} not fit the {memory:.0f} GB of a rank. {would}"


def find_remedies(
    plans: Sequence[Plan],
    steps: Sequence[Lengths],
    spec: PlannerSpec,
    cost: CostModel,
    memory: MemoryModel,
    memory_bytes: float,
) -> Remedies:
    """What would make plans fit that do not.

    Args:
        plans: of one planner, for
        steps: their lengths.
        spec: the planner.
        cost: that it was asked with.
        memory: of a rank as it is.
        memory_bytes: that a rank has.
    """

    def fits(changed: MemoryModel) -> bool:
        return all(peak_memory_bytes(plan, changed) <= memory_bytes for plan in plans)

    num_ranks = plans[0].world_size
    wider = (s for s in range(memory.shard_size + 1, num_ranks + 1) if num_ranks % s == 0)
    recompute = memory.recompute == "none" and fits(replace(memory, recompute="block"))
    over = [peak_memory_bytes(plan, memory) > memory_bytes for plan in plans]
    hardest_first = [steps[at] for at in sorted(range(len(steps)), key=lambda at: not over[at])]
    return Remedies(
        max_tokens_per_rank=_cap(hardest_first, spec, cost, memory, memory_bytes),
        shard_size=next((s for s in wider if fits(replace(memory, shard_size=s))), None),
        recompute=recompute or None,
        ranks=_ranks(hardest_first, num_ranks, spec, cost, memory, memory_bytes),
    )


def _cap(
    steps: Sequence[Lengths], spec: PlannerSpec, cost: CostModel, memory: MemoryModel, memory_bytes: float
) -> int | None:
    """The first cap, from what fits without exchanges downwards, under which every step is placed and fits."""
    try:
        cap = memory.tokens_that_fit(memory_bytes)
        for _ in range(CAP_TRIES if spec.keeps_caps else 0):
            if _all_fit(steps, spec, cost, memory, memory_bytes, cap):
                return cap
            cap = int(CAP_STEP * cap)
    except CapacityError:
        pass
    return None


def _ranks(
    steps: Sequence[Lengths],
    num_ranks: int,
    spec: PlannerSpec,
    cost: CostModel,
    memory: MemoryModel,
    memory_bytes: float,
) -> int | None:
    """The fewest ranks that hold each step's tokens, in whole shard groups; checked by planning there."""
    if not spec.keeps_caps or cost.machine.speeds or cost.machine.nodes:
        return None
    try:
        cap = memory.tokens_that_fit(memory_bytes)
        fewest = max(num_ranks + 1, *(math.ceil(step.num_tokens / cap) for step in steps))
        first = math.ceil(fewest / memory.shard_size) * memory.shard_size
        for ranks in range(first, first + RANK_TRIES * memory.shard_size, memory.shard_size):
            wider = [Lengths(s.tokens, np.pad(s.offsets, (0, ranks - num_ranks), "edge"), s.streams) for s in steps]
            if _all_fit(wider, spec, cost, memory, memory_bytes, cap):
                return ranks
    except CapacityError:
        pass
    return None


def _all_fit(
    steps: Sequence[Lengths], spec: PlannerSpec, cost: CostModel, memory: MemoryModel, memory_bytes: float, cap: int
) -> bool:
    """Whether every step is placed under a cap and its peak is no more than there is."""
    options: dict[str, Any] = {"planner": spec.name, "topology": spec.topology, "max_tokens_per_rank": cap}
    return all(peak_memory_bytes(make_plan(s, cost=cost, **options), memory) <= memory_bytes for s in steps)
