"""The tight bound: no way to share a heavy sequence beats it, and it knows the links between nodes."""

from __future__ import annotations

from itertools import product

import pytest

from knapformer.given.cost import CostModel, Machine
from knapformer.plans.plan import Plan
from knapformer.plans.planners import Evaluation, evaluate, make_plan

HEADS = 24
LENGTH = 48_000


def two_nodes(tokens: int, heads: int) -> Plan:
    """One sequence on two nodes of one rank: so many tokens and heads on the first, the others on the second."""
    segments, tiles = [(0, 0, tokens), (1, tokens, LENGTH)], [(0, 0, heads, 0, LENGTH), (1, heads, HEADS, 0, LENGTH)]
    return Plan.from_placements(
        lengths=[LENGTH],
        homes=[0],
        segments=[[x for x in segments if x[1] < x[2]]],
        tiles=[[x for x in tiles if x[1] < x[2]]],
        world_size=2,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        planner="shares",
    )


def best_share(cost: CostModel) -> Evaluation:
    """The fastest of all shares of the first node, in steps of a head and as many tokens."""
    shares = product(range(HEADS + 1), repeat=2)
    found = (evaluate(two_nodes(LENGTH * x // HEADS, y), cost) for x, y in shares)
    return min(found, key=lambda evaluation: evaluation.makespan_s)


@pytest.mark.parametrize("inter_node_bytes_per_s", [5e9, 45e9, 300e9])
def test_no_share_of_two_nodes_beats_the_bound(inter_node_bytes_per_s: float) -> None:
    machine = Machine(ranks_per_node=1, inter_node_bytes_per_s=inter_node_bytes_per_s)
    best = best_share(CostModel(machine=machine))
    assert best.tight_bound_s <= best.makespan_s * (1 + 1e-12)
    gap = (best.makespan_s - best.tight_bound_s) / (best.makespan_s - best.lower_bound_s)
    assert gap < 0.5, "the bound explains less than half of what is beyond the work"


def test_the_bound_counts_slow_links_only_where_a_sequence_must_cross_them() -> None:
    slow, fast = (Machine(ranks_per_node=8, inter_node_bytes_per_s=rate) for rate in (5e9, 300e9))
    for lengths, crosses in (([[100_000], *[[]] * 15], True), ([[60_000], *[[20_000]] * 15], False)):
        plan = make_plan(lengths, max_tokens_per_rank=None)
        bounds = [evaluate(plan, CostModel(machine=machine)).tight_bound_s for machine in (slow, fast)]
        assert (bounds[0] > bounds[1] * 1.01) == crosses


@pytest.mark.parametrize(("length", "least"), [(100_147, 1.01), (131_072, 1.02)])
def test_one_sequence_of_more_than_a_node_forces_time_beyond_the_work(length: int, least: float) -> None:
    rest = [[2_500] * 9] * 31
    found = evaluate(make_plan([[length], *rest], max_tokens_per_rank=None))
    assert least < found.tight_bound_s / found.lower_bound_s <= found.over_lower_bound
