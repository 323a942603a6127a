"""What every planner's plan keeps of what was asked for, and what is refused for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel, Machine
from knapformer.given.topology import Topology
from knapformer.plans.planners import PLANNERS, evaluate, make_plan
from knapformer.plans.problem import cost_of_group

ROWS = [[900, 30], [10], [5, 5], []]
NAMES = [name for name, planner in PLANNERS.items() if planner.package is None]


@pytest.mark.parametrize("planner", NAMES)
def test_a_plan_has_the_heads_offset_and_caps_that_were_asked_for(planner):
    cost = CostModel(hidden=96, num_heads=6)
    options = {"planner": planner, "cost": cost, "topology": "g1n4"}
    plan = make_plan(ROWS, **options, num_kv_heads=2, group_offset=8, max_tokens_per_rank=2000)
    assert (plan.num_heads, plan.num_kv_heads, plan.group_offset) == (6, 2, 8)
    assert plan.max_tokens_per_rank == (2000,) * 4
    plain = make_plan(ROWS, **options)
    assert (plain.num_heads, plain.num_kv_heads, plain.group_offset) == (6, 6, 0)


@pytest.mark.parametrize("planner", NAMES)
def test_bags_that_do_not_fit_the_ranks_are_refused(planner):
    with pytest.raises(ConfigurationError, match="3 ranks"):
        make_plan(ROWS, planner=planner, topology="g3n1")


@pytest.mark.parametrize("planner", NAMES)
@pytest.mark.parametrize("rows", [[[], []], [[0], [0, 0]]])
def test_a_step_without_tokens_costs_nothing(planner, rows):
    found = evaluate(make_plan(rows, planner=planner, topology="g1n2"))
    assert (found.makespan_s, found.lower_bound_s, found.discrepancy, found.over_lower_bound) == (0, 0, 0, 1)
    assert found.rank_busy_s.tolist() == [0, 0]


def test_a_group_that_begins_inside_a_node_sees_the_real_nodes():
    """Groups of 12 ranks on nodes of 8: the second group has 4 ranks of one node and 8 of the next."""
    nodes = [1] * 4 + [2] * 8
    machine = Machine(ranks_per_node=8, inter_node_bytes_per_s=1e9)
    cost = CostModel(hidden=3072, num_heads=24, machine=machine)
    seen = cost_of_group(cost, 12, 12).machine.rank_nodes(12)
    assert seen.tolist() == nodes and cost_of_group(cost, 0, 12) is cost
    told = replace(cost, machine=replace(machine, nodes=tuple(nodes)))
    assert cost_of_group(told, 12, 12) is told, "nodes that are given are the group's own"
    rows = [[6000, 6000] if r == 3 else [1000] for r in range(12)]
    for topology in (None, Topology((), 8)):
        offset = make_plan(rows, cost=cost, topology=topology, group_offset=12)
        expected = make_plan(rows, cost=told)
        assert replace(offset, group_offset=0).digest() == expected.digest()
        assert evaluate(offset, cost).makespan_s == evaluate(expected, told).makespan_s
    # The negative control: as ranks 0 to 11 of the world they sit on other nodes, which matters here.
    assert make_plan(rows, cost=cost).digest() != expected.digest()
    assert evaluate(expected, cost).makespan_s > 1.01 * evaluate(expected, told).makespan_s
